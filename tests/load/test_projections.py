"""The fused products of each kind of layer: their modules, and the sizes that everything else is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.load.checkpoint import expected_tensors
from engine.load.dimensions import DIMENSIONS, FULL, LINEAR, ModelDimensions
from engine.load.projections import layer_projections, projection_shapes
from tests.support import small_config

SMALL = ModelDimensions.from_config(small_config())


@pytest.mark.parametrize("d", [SMALL, *DIMENSIONS.values()], ids=["small", *DIMENSIONS])
def test_every_linear_module_is_in_one_weight_whose_rows_it_shares(d: ModelDimensions) -> None:
    """Against the tensors of a checkpoint; what a weight has beyond its modules is less than a tile of zeros."""
    tensors = expected_tensors(d)
    linear = {name.removesuffix(".weight") for name, spec in tensors.items() if spec.kind == "linear"}
    seen: list[str] = []
    for n, kind in enumerate(d.layer_types):
        for p in layer_projections(d, kind).values():
            names = [f"layers.{n}.{module}" for module in p.modules]
            shapes = [tensors[name + ".weight"].shape for name in names]
            assert {shape[1] for shape in shapes} == {p.columns}
            assert 0 <= p.rows - sum(shape[0] for shape in shapes) < 16
            assert p.rows % 16 == 0
            seen += names
    assert len(seen) == len(set(seen))
    assert set(seen) == linear


def test_products_come_in_the_order_of_a_forward_and_their_modules_in_that_of_rows() -> None:
    for kind, mixer in ((FULL, "self_attn.q_proj"), (LINEAR, "linear_attn.in_proj_qkv")):
        projections = layer_projections(SMALL, kind)
        assert list(projections) == ["in_proj", "out_proj", "gate_up", "down"] == [p.name for p in projections.values()]
        assert projections["in_proj"].modules[0] == mixer
        assert projections["gate_up"].modules == ("mlp.gate_proj", "mlp.up_proj")


@pytest.mark.parametrize(
    ("layers", "attention"),
    [
        ((LINEAR, LINEAR), set()),
        ((LINEAR, FULL), {"parts"}),
        ((FULL, LINEAR), {"whole"}),
        ((FULL, FULL), {"whole", "parts"}),
    ],
)
def test_a_last_layer_of_attention_multiplies_with_the_parts_of_its_input(
    layers: tuple[str, ...], attention: set[str]
) -> None:
    d = replace(DIMENSIONS["4b"], layer_types=layers)
    shapes = projection_shapes(d)
    assert len(shapes) == len(set(shapes))
    assert ((10_240, 2_560) in shapes) == ("whole" in attention)
    assert ((8_192, 2_560) in shapes) == ((2_048, 2_560) in shapes) == ("parts" in attention)
    assert {(18_432, 2_560), (2_560, 9_216), (2_560, 4_096)} <= set(shapes)
    assert ((12_352, 2_560) in shapes) == (LINEAR in layers)
