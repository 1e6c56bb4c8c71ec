"""The self-test of the kernels: that it passes what is right, finds planted faults, and is made once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import assembly
from engine.config import EngineConfig
from engine.errors import ConfigError, InferenceError
from engine.load.dimensions import DIMENSIONS
from graphs import examine as examination
from graphs import selftest
from graphs.examine import ALLOWED, OPERATORS, LayerSizes, examine
from graphs.selftest import Environment, SelfTestError, self_test
from graphs.tuning.tuner import UnknownEnvironmentError
from ops.tables import NUM_ROWS, NUM_SEGMENTS

CPU = torch.device("cpu")
SIZES = LayerSizes(
    hidden_size=96, intermediate_size=160, gdn_proj=208, key_heads=2, value_heads=4, key_dim=16, value_dim=16,
    heads=6, kv_heads=2, head_dim=32, rotary_dim=8,
)  # fmt: skip
ENVIRONMENT = Environment(gpu="GPU 1", driver="1.2", torch="3", triton="4", sources="5", sizes=SIZES)


def first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def tables_of(args: tuple[Any, ...]) -> Tensor | None:
    return next((x for x in args if isinstance(x, Tensor) and x.dtype == torch.int32), None)


def with_fault(name: str, spoil: Callable[[Tensor, tuple[Any, ...]], None]) -> dict[str, Callable[..., Any]]:
    """The operators, one of which has its first result spoilt."""

    def wrong(*args: Any) -> Any:
        found = OPERATORS[name](*args)
        spoil(first(found), args)
        return found

    return {**OPERATORS, name: wrong}


class TestExamination:
    def test_the_cpu_kernels_have_no_fault(self) -> None:
        assert examine(SIZES, CPU) is None

    @pytest.mark.parametrize("name", OPERATORS)
    def test_one_wrong_row_is_found(self, name: str) -> None:
        def spoil(out: Tensor, args: tuple[Any, ...]) -> None:
            out[-1] *= 1.25

        fault = examine(SIZES, CPU, with_fault(name, spoil))
        assert fault is not None
        assert fault.startswith(f"{name}: error 0.")
        assert fault.endswith(f" against the CPU, allowed {ALLOWED[name]:.2g}")

    @pytest.mark.parametrize("name", OPERATORS)
    def test_nan_is_found(self, name: str) -> None:
        def spoil(out: Tensor, args: tuple[Any, ...]) -> None:
            out[1, 0] = torch.nan

        fault = examine(SIZES, CPU, with_fault(name, spoil))
        assert fault is not None
        assert fault.startswith(f"{name}: error inf")

    @pytest.mark.parametrize(
        ("name", "argument"),
        [("gdn_conv", 5), ("gdn_conv", 6), ("gdn_conv", 7), ("delta_rule", 4), ("attention_prepare", 5),
         ("attention_prepare", 6)],
    )  # fmt: skip
    def test_a_wrong_row_of_what_is_written_is_found(self, name: str, argument: int) -> None:
        """Histories, tails of keys and gates, states, keys and values of the kept prefix."""

        def spoil(out: Tensor, args: tuple[Any, ...]) -> None:
            written = args[argument]
            row = written.view(-1, written.shape[-1])
            row[row.abs().sum(1).argmax()] *= 1.5

        fault = examine(SIZES, CPU, with_fault(name, spoil))
        assert fault is not None
        assert fault.startswith(f"{name}: error 0.")

    def test_gates_of_one_kind_are_not_lost_among_larger_ones(self) -> None:
        def wrong(*args: Any) -> Any:
            qkv, gates, *kinds = OPERATORS["gdn_conv"](*args)
            kinds[-1].mul_(1.05)  # views of `gates`
            return qkv, gates, *kinds

        fault = examine(SIZES, CPU, {**OPERATORS, "gdn_conv": wrong})
        assert fault is not None
        assert fault.startswith("gdn_conv: error 0.")

    @pytest.mark.parametrize("name", sorted(set(OPERATORS) - {"take_rows", "add_rows", "attention_prepare"}))
    def test_one_bit_of_a_branch_that_depends_on_a_sibling_is_found(self, name: str) -> None:
        """Far below the allowed error: an operator without tables can tell by the number of rows."""

        def spoil(out: Tensor, args: tuple[Any, ...]) -> None:
            tables = tables_of(args)
            beside = len(out) == 188 if tables is None else tables[NUM_SEGMENTS] > 1 and len(out) == tables[NUM_ROWS]
            if beside:
                place = out[100].abs().argmax()
                out.view(torch.int16)[100, place] ^= 1

        fault = examine(SIZES, CPU, with_fault(name, spoil))
        assert fault == f"{name}: bits of a branch depend on a sibling or on how its prompt is split"

    def test_keys_that_depend_on_a_sibling_are_found_where_they_are_attended_to(self) -> None:
        def wrong(*args: Any) -> Any:
            q, k, v = OPERATORS["attention_prepare"](*args)
            if args[7][NUM_SEGMENTS] > 1:
                v.view(torch.int16)[:, 0] ^= 1
            return q, k, v

        fault = examine(SIZES, CPU, {**OPERATORS, "attention_prepare": wrong})
        assert fault == "attention: bits of a branch depend on a sibling or on how its prompt is split"

    def test_bits_that_depend_on_what_is_read_are_found(self) -> None:
        def spoil(out: Tensor, args: tuple[Any, ...]) -> None:
            if args[-1]:
                out.view(torch.int16)[0, out[0].abs().argmax()] ^= 1

        assert examine(SIZES, CPU, with_fault("attention", spoil)) == (
            "attention: bits of a row depend on which rows are read"
        )

    def test_every_row_of_the_tree_has_inputs_of_its_own(self) -> None:
        entries = (*examination._PREFIX_PASS, *examination._TREE_PASS)
        assert sorted(i for e in entries for i in e.token_ids.tolist()) == list(range(examination._ROWS))


class TestRecord:
    @pytest.fixture
    def examined(self, monkeypatch: pytest.MonkeyPatch) -> list[LayerSizes]:
        examined: list[LayerSizes] = []
        monkeypatch.setattr(selftest, "examine", lambda sizes, device: examined.append(sizes))
        monkeypatch.setattr(selftest, "current_environment", lambda sizes, device: replace(ENVIRONMENT, sizes=sizes))
        return examined

    def test_what_passed_is_not_tested_again(self, examined: list[LayerSizes], tmp_path: Path) -> None:
        for _ in range(2):
            self_test(SIZES, device=CPU, cache_dir=tmp_path)
        assert examined == [SIZES]
        (kept,) = (tmp_path / "selftest").iterdir()
        assert kept == selftest.record_path(tmp_path, ENVIRONMENT)

    @pytest.mark.parametrize(
        "other",
        [
            {"gpu": "GPU 2"},
            {"driver": "1.3"},
            {"torch": "3.1"},
            {"triton": "4.1"},
            {"sources": "6"},
            {"sizes": replace(SIZES, hidden_size=112)},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_what_differs_in_anything_is_tested(
        self, examined: list[LayerSizes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
    ) -> None:
        self_test(SIZES, device=CPU, cache_dir=tmp_path)
        monkeypatch.setattr(selftest, "current_environment", lambda sizes, device: replace(ENVIRONMENT, **other))
        for _ in range(2):
            self_test(SIZES, device=CPU, cache_dir=tmp_path)
        assert len(examined) == 2
        monkeypatch.setattr(selftest, "current_environment", lambda sizes, device: ENVIRONMENT)
        self_test(SIZES, device=CPU, cache_dir=tmp_path)
        assert len(examined) == 2

    @pytest.mark.parametrize("text", [b"", b"{", b"null", b'{"gpu": "GPU 1"}', b"\xff\xfe"])
    def test_a_damaged_record_is_made_again(self, examined: list[LayerSizes], tmp_path: Path, text: bytes) -> None:
        self_test(SIZES, device=CPU, cache_dir=tmp_path)
        selftest.record_path(tmp_path, ENVIRONMENT).write_bytes(text)
        for _ in range(2):
            self_test(SIZES, device=CPU, cache_dir=tmp_path)
        assert len(examined) == 2

    def test_a_record_that_cannot_be_kept_is_said(
        self, examined: list[LayerSizes], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "selftest").write_text("a file where a folder should be")
        self_test(SIZES, device=CPU, cache_dir=tmp_path)
        said = [m for m in caplog.messages if "cannot be written" in m]
        assert len(said) == 1
        assert "the next start tests the kernels again; name another folder with cache_dir" in said[0]

    def test_without_the_drivers_version_nothing_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
        def unknown() -> str:
            raise UnknownEnvironmentError("the version of the driver is not known: no library")

        examined: list[LayerSizes] = []
        monkeypatch.setattr(selftest, "examine", lambda sizes, device: examined.append(sizes))
        monkeypatch.setattr(selftest, "driver_version", unknown)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 1")
        for _ in range(2):
            self_test(SIZES, device=CPU, cache_dir=tmp_path)
        assert len(examined) == 2
        assert list(tmp_path.iterdir()) == []
        assert "the version of the driver is not known: no library, so the kernels are tested at every" in caplog.text

    def test_what_failed_is_not_kept_and_says_all_there_is_to_know(
        self, examined: list[LayerSizes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(selftest, "examine", lambda sizes, device: "attention: error 0.3")
        for _ in range(2):
            with pytest.raises(SelfTestError) as caught:
                self_test(SIZES, device=CPU, cache_dir=tmp_path)
        assert str(caught.value) == (
            "the self-test of the kernels failed on GPU 1 with torch 3 and Triton 4: attention: error 0.3; "
            "install another version of Triton, and report this message"
        )
        assert list(tmp_path.iterdir()) == []

    def test_a_record_holds_for_the_kernels_it_was_made_with(self) -> None:
        tested = selftest._tested_sources()
        kernels = {"ops/kernels/delta_rule.py", "ops/kernels/rows.py", "ops/attention.py", "ops/tables.py"}
        assert kernels | {"graphs/examine.py"} <= set(tested)
        assert not [name for name in tested if "linear" in name]


class TestEngine:
    CONFIG = EngineConfig(device="cuda:0", dtype="bfloat16", gemm="fixed")

    def failing(self, monkeypatch: pytest.MonkeyPatch, error: Exception, tmp_path: Path) -> None:
        def fail(sizes: LayerSizes, **where: Any) -> None:
            assert where == {"device": torch.device("cuda:0"), "cache_dir": tmp_path}
            assert (sizes.hidden_size, sizes.gdn_proj, sizes.value_heads, sizes.heads) == (5_120, 16_480, 48, 24)
            raise error

        monkeypatch.setattr(assembly, "self_test", fail)
        assembly.check_kernels(replace(self.CONFIG, cache_dir=str(tmp_path)), DIMENSIONS["27b"])

    def test_a_wrong_kernel_is_an_error_of_this_configuration(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=r"^attention: error 1 on GPU$"):
            self.failing(monkeypatch, SelfTestError("attention: error 1 on GPU"), tmp_path)

    def test_a_kernel_that_cannot_be_run_is_told_as_in_a_forward(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with pytest.raises(InferenceError, match=r"^the self-test of the kernels failed: no C compiler; Triton needs"):
            self.failing(monkeypatch, RuntimeError("Failed to find C compiler. Please"), tmp_path)
        with pytest.raises(InferenceError, match=r"^the self-test of the kernels failed: ValueError: no such layout$"):
            self.failing(monkeypatch, ValueError("no such layout"), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("model", DIMENSIONS)
def test_the_kernels_pass_on_this_gpu(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are printed; nothing stays allocated; the record that is left says it all."""
    plain = examination._error

    def printed(found: Tensor, wanted: Tensor) -> float:
        error = plain(found, wanted)
        if error:
            print(model, tuple(wanted.shape), wanted.dtype, f"{error:.1e}")
        return error

    monkeypatch.setattr(examination, "_error", printed)
    config = EngineConfig(model=model, device="cuda:0", dtype="bfloat16", cache_dir=str(tmp_path))
    gc.collect()  # what tests before left is not ours
    before = torch.cuda.memory_allocated()
    assembly.check_kernels(config, DIMENSIONS[model])
    assert torch.cuda.memory_allocated() == before
    (kept,) = (tmp_path / "selftest").iterdir()
    monkeypatch.setattr(selftest, "examine", None)
    assembly.check_kernels(config, DIMENSIONS[model])
    assert [path.name for path in (tmp_path / "selftest").iterdir()] == [kept.name]


@pytest.mark.gpu
def test_a_kernel_made_wrong_is_found_on_this_gpu() -> None:
    """Its scores are half of what they should be."""
    right = OPERATORS["attention"]

    def wrong(q: Tensor, *others: Any) -> Tensor:
        return right(q / 2 if q.is_cuda else q, *others)

    fault = examine(SIZES, torch.device("cuda"), {**OPERATORS, "attention": wrong})
    assert fault is not None
    assert fault.startswith("attention: error ")
