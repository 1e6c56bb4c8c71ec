"""Captures that others break: tried again, ended whole, said once; and the same on a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphs import graph as capturing
from graphs.graph import CaptureError, capture_graph


class FakeStream:
    def __init__(self, number: int) -> None:
        self.number, self.device, self.waits = number, torch.device("cpu"), 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def synchronize(self) -> None:
        self.waits += 1


class FakeCuda:
    """One device: what is captured, into which pool, and what the allocator takes to be under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.pools, self.used, self.under_way = FakeStream(1), 0, [], []
        self.capturing = self.broken = False
        self.ends_badly = False
        cuda = self

        class Graph:
            def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                assert gc.isenabled(), "collection belongs to the process"
                cuda.capturing = True
                cuda.used.append(pool)
                cuda.under_way.append(pool)
                self._pool = pool

            def capture_end(self) -> None:
                broken, cuda.capturing, cuda.broken = cuda.broken, False, False
                if broken or cuda.ends_badly:
                    raise RuntimeError("CUDA error: capture invalidated\nmore")
                cuda.under_way.remove(self._pool)

            def pool(self) -> Any:
                return self._pool

        def new_pool() -> tuple[int, int]:
            self.pools += 1
            return 0, self.pools

        def end_allocate(device: int, pool: Any) -> None:
            if pool not in self.under_way:
                raise RuntimeError("not currently recording to this pool")
            self.under_way.remove(pool)

        for name, value in (
            ("CUDAGraph", Graph),
            ("current_stream", lambda: self.stream),
            ("default_stream", lambda: FakeStream(0)),
            ("graph_pool_handle", new_pool),
            ("is_current_stream_capturing", lambda: self.capturing),
            ("current_device", lambda: 0),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocate, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)
        monkeypatch.setattr(capturing, "_said", set())

    def breaking(self, times: int) -> Callable[[], str]:
        """Work during whose first captures another thread synchronises the device."""
        left = [times]

        def run() -> str:
            assert self.capturing
            if left[0]:
                left[0] -= 1
                self.broken = True
            return "result"

        return run


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class TestAttempts:
    def test_the_first_that_holds_is_taken_in_the_pool_given(self, cuda: FakeCuda) -> None:
        graph, result = capture_graph(cuda.breaking(0), pool=(7, 7))
        assert (result, graph.pool(), cuda.stream.waits, cuda.under_way) == ("result", (7, 7), 0, [])

    def test_a_broken_one_is_tried_again_in_a_new_pool_and_said_once(
        self, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(2):
            graph, result = capture_graph(cuda.breaking(2), pool=(7, 7))
            assert result == "result"
            assert graph.pool() == cuda.used[-1]
            assert not cuda.under_way
        assert cuda.used == [(7, 7), (0, 1), (0, 2), (7, 7), (0, 3), (0, 4)]
        assert cuda.stream.waits == 4
        assert caplog.messages == [
            "the capture of a CUDA graph failed and is tried again (CUDA error: capture invalidated)"
        ]

    def test_after_the_last_the_first_cause_is_raised(self, cuda: FakeCuda) -> None:
        with pytest.raises(CaptureError, match=r"none of 3 attempts: CUDA error: capture invalidated$") as caught:
            capture_graph(cuda.breaking(3), pool=None)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert len(cuda.used) == 4  # one more, of nothing, for torch's generator
        assert not cuda.under_way
        assert not cuda.capturing

    def test_what_the_work_raises_ends_the_capture(self, cuda: FakeCuda) -> None:
        def run() -> None:
            raise ValueError("no such tile")

        with pytest.raises(CaptureError, match="none of 2 attempts: no such tile"):
            capture_graph(run, pool=None, attempts=2)
        assert not cuda.capturing
        assert not cuda.under_way

    def test_an_end_that_fails_too_is_told_with_the_cause(self, cuda: FakeCuda) -> None:
        cuda.ends_badly = True

        def run() -> None:
            raise ValueError("no such tile")

        with pytest.raises(CaptureError) as caught:
            capture_graph(run, pool=None, attempts=1)
        assert caught.value.__cause__ is not None
        assert caught.value.__cause__.__notes__ == [
            "and then, at the end of the capture: CUDA error: capture invalidated"
        ]
        assert not cuda.under_way

    def test_an_interrupt_is_not_tried_again_and_leaves_nothing_open(self, cuda: FakeCuda) -> None:
        def run() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            capture_graph(run, pool=None)
        assert len(cuda.used) == 1
        assert not cuda.capturing

    def test_the_default_stream_is_refused(self, cuda: FakeCuda) -> None:
        cuda.stream = FakeStream(0)
        with pytest.raises(ValueError, match=r"default stream cannot be captured; .*torch\.cuda\.stream"):
            capture_graph(cuda.breaking(0), pool=None)
        assert not cuda.used


@pytest.fixture
def side_stream() -> Iterator[torch.cuda.Stream]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_d32_a_capture_broken_by_another_thread_is_tried_again(side_stream: torch.cuda.Stream) -> None:
    x = torch.arange(8.0, device="cuda")
    broken = []

    def synchronise() -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            broken.append(error)

    def run() -> torch.Tensor:
        out = x + 1
        if not broken:
            other = threading.Thread(target=synchronise)
            other.start()
            other.join()
        return out + 1

    graph, out = capture_graph(run, pool=None)
    assert broken, "the control: this synchronise breaks a capture"
    x.mul_(2)
    graph.replay()
    assert torch.equal(out, x + 2)
    again, _ = capture_graph(lambda: x + 1, pool=graph.pool())
    assert again.pool() == graph.pool()


@pytest.mark.gpu
def test_d32_after_captures_that_all_failed_the_process_is_as_before(side_stream: torch.cuda.Stream) -> None:
    def run() -> torch.Tensor:
        out = torch.zeros(1 << 20, device="cuda")
        out.sum().item()  # waits for the device, which a capture forbids
        return out

    run()
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="none of 3 attempts"):
        capture_graph(run, pool=None)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.isfinite(torch.randn(16, device="cuda")).all(), "torch's generator takes itself to be captured"
    torch.cuda.synchronize()
    graph, out = capture_graph(lambda: torch.ones(4, device="cuda") * 3, pool=None)
    graph.replay()
    assert out.tolist() == [3.0] * 4
