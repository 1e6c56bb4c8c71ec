"""Several engines and a program in one process, on a CPU."""

from __future__ import annotations

import torch

from engine import Engine
from tests.engine.crowd import Crowd, alone, requests
from tests.engine.engine_support import loaded


def test_d31_engines_share_a_process_with_a_program() -> None:
    """Four engines of two models, opened and closed meanwhile, beside products, allocations and a compiler."""
    works = requests(6, seed=0, longest=200)
    with loaded() as one, loaded(seed=1, dtype="bfloat16") as two:
        expected = alone(one, works), alone(two, works)
        crowd = Crowd()
        with one.like(schedule="tree") as tree, two.like(schedule="batched") as batched:
            for name, engine, model in (
                ("levels", one, 0),
                ("tree", tree, 0),
                ("other", two, 1),
                ("batched", batched, 1),
            ):
                crowd.ask(name, engine, works, expected[model])
                crowd.ask(name, engine, works, expected[model])
            x = torch.randn(64, 64)
            crowd.do("multiply", lambda _: x @ x, pause=0.001)
            crowd.do("compile", lambda i: _compiled_and_traced(i, x))
            crowd.do("open", lambda _: _opened_and_closed(one), pause=0.01)
            crowd.run(6)
        assert crowd.wrong == []
        assert crowd.errors == []
        assert not crowd.failed_calls
        assert crowd.answers > 20


def _opened_and_closed(engine: Engine) -> None:
    with engine.like(schedule="levels") as other:
        other.hidden_states([[1, 2, 3]])


def _compiled_and_traced(i: int, x: torch.Tensor) -> None:
    torch.compile(lambda y: y * i + 1, backend="aot_eager")(x)
    torch.fx.symbolic_trace(torch.nn.Linear(4, 4))
