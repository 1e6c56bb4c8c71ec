"""The byte test of tuned products: what its rows can show, and what passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphs.tuning.search import CannotRunError
from graphs.tuning.trials import GpuTrials, byte_test_rows, byte_test_weight
from ops.linear_tuned import FIXED


class TestByteTest:
    def test_rows_are_of_five_kinds_in_turn(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for shift in (0, 2):
            x = byte_test_rows(64, 256, generator, shift=shift).float()
            kind = (torch.arange(64) + shift) % 5
            spread = x.std(dim=1)
            assert ((spread > 0.7) & (spread < 1.4))[(kind == 0) | (kind == 3)].all()
            assert (spread[kind == 1] > 700).all()
            assert (spread[kind == 2] < 1.4e-3).all()
            assert torch.equal(x[kind == 3, :128], -x[kind == 3, 128:])
            share = (x[kind == 4] != 0).float().mean(dim=1)
            assert (share[1:] < 0.1).all()
            assert share[0] == 0
            assert (share[1:] > 0).any()

    def test_cancelling_rows_tell_a_split_sum_from_one_that_is_not(self) -> None:
        """A product that adds two halves of K, each summed in float32, against one accumulator."""
        generator = torch.Generator().manual_seed(1)
        x, w = byte_test_rows(64, 2_048, generator).float(), byte_test_weight(512, 2_048, generator).float()

        def summed(first: int, last: int) -> Tensor:
            acc = torch.zeros(64, 512)
            for k in range(first, last, 16):
                acc = acc + x[:, k : k + 16] @ w[:, k : k + 16].T
            return acc

        whole, split = summed(0, 2_048).bfloat16(), (summed(0, 1_024) + summed(1_024, 2_048)).bfloat16()
        differs = whole.view(torch.int16) != split.view(torch.int16)
        assert differs[torch.arange(64) % 5 == 3, 1::4].float().mean() > 0.9

    def test_a_weight_repeats_itself_in_every_other_row(self) -> None:
        left, right = byte_test_weight(8, 256, torch.Generator().manual_seed(0)).float().chunk(2, dim=1)
        assert torch.equal(left[1::4], right[1::4])
        assert not torch.equal(left[3::4], right[3::4])
        assert torch.allclose(left[3::4], right[3::4], rtol=0.1)
        assert not torch.allclose(left[::2], right[::2], rtol=0.1)


class Replay:
    """A graph's stand-in: runs the product again and writes where it wrote."""

    def __init__(self, run: Callable[[], Tensor], out: Tensor) -> None:
        self.run, self.out = run, out

    def replay(self) -> None:
        self.out.copy_(self.run())


class CpuTrials(GpuTrials):
    def __init__(self) -> None:
        self.device, self._stream = torch.device("cpu"), None
        self._generator = torch.Generator().manual_seed(0)
        self._shape = self._cell = None
        self._weights, self._rows, self._expected = [], [], []

    def _captured(self, run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        out = run().clone()
        return Replay(run, out), out


class TestTrials:
    """What passes the byte test, told by products of the test's making."""

    CELL = (48, 64, 72)

    @pytest.fixture
    def products(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        products = {FIXED: lambda x, w: F.linear(x.float(), w.float()).bfloat16()}
        monkeypatch.setattr("graphs.tuning.trials.product", products.__getitem__)
        return products

    def test_the_same_product_passes(self, products: dict[str, Any]) -> None:
        products["same"] = products[FIXED]
        assert CpuTrials().same_bytes(self.CELL, "same")

    def test_one_unit_in_the_last_place_of_one_output_fails(self, products: dict[str, Any]) -> None:
        def off(x: Tensor, w: Tensor) -> Tensor:
            out = products[FIXED](x, w)
            out.view(torch.int16)[-1, -1] += 1
            return out

        products["off"] = off
        assert not CpuTrials().same_bytes(self.CELL, "off")

    def test_the_sign_of_a_zero_counts(self, products: dict[str, Any]) -> None:
        products["minus"] = lambda x, w: torch.where((out := products[FIXED](x, w)) == 0, -0.0, out)
        assert not CpuTrials().same_bytes(self.CELL, "minus")

    def test_an_output_left_unwritten_fails(self, products: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The first run writes all of it, as memory that was used before would look; the replays leave out a row."""
        products["all"] = products[FIXED]

        def replay(self: Replay) -> None:
            self.out[:-1] = self.run()[:-1]

        assert CpuTrials().same_bytes(self.CELL, "all")
        monkeypatch.setattr(Replay, "replay", replay)
        assert not CpuTrials().same_bytes(self.CELL, "all")

    def test_what_raises_cannot_run(self, products: dict[str, Any]) -> None:
        def unsupported(x: Tensor, w: Tensor) -> Tensor:
            raise RuntimeError("status 15")

        products["unsupported"] = unsupported
        with pytest.raises(CannotRunError, match=r"unsupported at \(48, 64, 72\): status 15"):
            CpuTrials().same_bytes(self.CELL, "unsupported")

    def test_every_cell_has_rows_and_weights_of_its_own_sizes(self, products: dict[str, Any]) -> None:
        seen = []

        def recording(x: Tensor, w: Tensor) -> Tensor:
            seen.append((w.shape[0], w.shape[1], x.shape[0]))
            assert x.is_contiguous()
            return products[FIXED](x, w)

        products["recording"] = recording
        trials = CpuTrials()
        cells = [(48, 64, 72), (48, 64, 64), (32, 96, 64), (48, 64, 72)]
        assert all(trials.same_bytes(cell, "recording") for cell in cells)
        assert list(dict.fromkeys(seen)) == cells[:3]

    def test_what_cannot_run_has_no_time(self, products: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        def unsupported(x: Tensor, w: Tensor) -> Tensor:
            raise RuntimeError("status 15")

        monkeypatch.setattr("graphs.tuning.trials._replay_times", lambda graphs, rounds: dict.fromkeys(graphs, 6.0))
        products |= {"slow": products[FIXED], "unsupported": unsupported}
        monkeypatch.setattr("graphs.tuning.trials.product", products.__getitem__)
        times = CpuTrials().times(self.CELL, [FIXED, "unsupported", "slow"], careful=True)
        assert list(times) == [FIXED, "slow"]
        assert times[FIXED] == 6.0 / 12  # a small weight is multiplied in as many copies as there are
        products[FIXED] = unsupported
        with pytest.raises(RuntimeError, match="status 15"):
            CpuTrials().times(self.CELL, [FIXED], careful=True)
