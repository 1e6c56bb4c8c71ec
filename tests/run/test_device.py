"""The owner of a device: one thread, one queue, typed ends, and nothing of the caller's modes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch

from engine.errors import ClosedError, DeviceLostError, ForkedError, SettingsError
from engine.run import device as device_module
from engine.run.device import DeviceOwner, owner_of

CPU = torch.device("cpu")


@pytest.fixture
def owner() -> Iterator[DeviceOwner]:
    owner = DeviceOwner(CPU)
    yield owner
    owner._stop()


class Gate:
    """Work that holds the owner until `open`."""

    def __init__(self) -> None:
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self._open.wait(60)
        return "done"

    def open(self) -> None:
        self._open.set()


def test_turns_of_all_clients_run_on_one_thread_first_come_first_served(owner: DeviceOwner) -> None:
    clients, gate, order = [owner.client() for _ in range(3)], Gate(), []
    held = clients[0].submit(gate)
    assert gate.entered.wait(60)

    def turn(i: int) -> str:
        order.append(i)
        return threading.current_thread().name

    waiting = [clients[i % 3].submit(lambda i=i: turn(i)) for i in range(9)]  # type: ignore[misc]
    gate.open()
    assert held.result(60) == "done"
    assert {future.result(60) for future in waiting} == {"forkgraph-cpu"}
    assert order == list(range(9))


def test_one_owner_for_a_device() -> None:
    found: list[DeviceOwner] = []
    threads = [threading.Thread(target=lambda: found.append(owner_of(CPU))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_a_cancelled_turn_never_runs(owner: DeviceOwner) -> None:
    client, gate, ran = owner.client(), Gate(), []
    client.submit(gate)
    assert gate.entered.wait(60)
    waiting = client.submit(lambda: ran.append(1))
    assert waiting.cancel()
    gate.open()
    client.call(lambda: None)
    assert ran == []
    with pytest.raises(CancelledError):
        waiting.result()


def test_modes_of_a_caller_do_not_reach_the_work(owner: DeviceOwner) -> None:
    client = owner.client()

    def modes() -> tuple[bool, ...]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    with torch.inference_mode(), torch.autocast("cpu"):
        assert modes()[0]
        assert client.call(modes) == (False, False, False)
        assert not client.call(lambda: torch.zeros(1)).is_inference()


def test_d35_closing_answers_those_who_wait_with_the_typed_error(owner: DeviceOwner) -> None:
    client, other, gate, released = owner.client(), owner.client(), Gate(), threading.Event()
    running = client.submit(gate)
    assert gate.entered.wait(60)
    waiting = [client.submit(lambda: "never") for _ in range(6)]
    beside = other.submit(lambda: "other")
    owner.leave(client, released.set)
    for future in waiting:
        with pytest.raises(ClosedError, match="this engine is closed; load another one"):
            future.result(60)
    with pytest.raises(ClosedError):
        client.submit(lambda: None)
    assert not released.is_set()
    gate.open()
    assert running.result(60) == "done"
    assert beside.result(60) == "other"
    client.released.result(60)
    assert released.is_set()
    owner.leave(client, lambda: pytest.fail("released twice"))


def test_a_callback_may_ask_and_wait(owner: DeviceOwner) -> None:
    client, found, done = owner.client(), [], threading.Event()

    def ask(future: Future[int]) -> None:
        found.append(future.result() + client.call(lambda: 2))
        done.set()

    client.submit(lambda: 1).add_done_callback(ask)
    assert done.wait(60)
    assert found == [3]


def test_a_callback_that_fails_leaves_the_next_one(owner: DeviceOwner, caplog: pytest.LogCaptureFixture) -> None:
    client, done = owner.client(), threading.Event()
    future = client.submit(lambda: 1)
    future.add_done_callback(lambda _: 1 // 0)
    future.add_done_callback(lambda _: done.set())
    assert done.wait(60)
    assert "a callback of a result failed" in caplog.text


def test_progress_runs_where_it_was_asked_for_and_may_ask(owner: DeviceOwner) -> None:
    client, other, seen = owner.client(), owner.client(), []

    def work(report: Any) -> str:
        for i in range(3):
            report(i + 1, 3)
        return "loaded"

    def progress(done: int, total: int) -> None:
        seen.append((done, total, threading.current_thread() is threading.main_thread(), other.call(lambda: done)))

    assert client.report(work, progress) == "loaded"
    assert seen == [(i, 3, True, i) for i in (1, 2, 3)]


def test_progress_that_raises_ends_the_work(owner: DeviceOwner) -> None:
    client, ended = owner.client(), threading.Event()

    def work(report: Any) -> None:
        try:
            while True:
                report(1, 2)
                time.sleep(0.001)
        finally:
            ended.set()

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.report(work, progress)
    assert ended.wait(60)
    assert client.call(lambda: 5) == 5


def test_idle_work_waits_for_those_who_ask_and_is_said_when_it_fails(
    owner: DeviceOwner, caplog: pytest.LogCaptureFixture
) -> None:
    left, order, done = [3], [], threading.Event()

    def idle() -> bool:
        if not left[0]:
            done.set()
            return False
        left[0] -= 1
        order.append("idle")
        return True

    gate = Gate()
    client = owner.client(idle)
    client.submit(gate)
    assert gate.entered.wait(60)
    last = client.submit(lambda: order.append("asked"))
    gate.open()
    last.result(60)
    assert done.wait(60)
    assert order.count("idle") == 3
    broken = owner.client(lambda: bool(1 // 0))
    broken.call(lambda: None)
    client.call(lambda: None)
    deadline = time.monotonic() + 60
    while "in idle time failed" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.001)
    assert "ZeroDivisionError" in caplog.text
    assert broken.call(lambda: 7) == 7


def test_a_lost_device_says_so_at_once_and_for_ever(owner: DeviceOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is CUDA's; here a stream stands in that answers nothing any more."""

    class Dead:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    client, gate = owner.client(), Gate()
    monkeypatch.setattr(device_module, "stream_of", lambda _: Dead())
    monkeypatch.setattr(owner, "device", torch.device("cuda", 0))
    held = client.submit(gate)
    assert gate.entered.wait(60)

    def fault() -> None:
        raise RuntimeError("illegal memory access")

    failing, waiting = client.submit(fault), client.submit(lambda: 1)
    gate.open()
    held.result(60)
    for future in (failing, waiting):
        with pytest.raises(DeviceLostError, match=r"cuda:0 is lost .*illegal memory access was encountered\)"):
            future.result(60)
    with pytest.raises(DeviceLostError):
        client.submit(lambda: 1)
    with pytest.raises(DeviceLostError):
        owner.client()


def test_a_fault_that_leaves_the_device_is_handed_out_as_it_is(
    owner: DeviceOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        """A capture elsewhere forbids the first synchronise."""

        calls = 0

        def synchronize(self) -> None:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("operation not permitted when stream is capturing")

    busy, client = Busy(), owner.client()
    monkeypatch.setattr(device_module, "stream_of", lambda _: busy)
    monkeypatch.setattr(owner, "device", torch.device("cuda", 0))
    with pytest.raises(ZeroDivisionError):
        client.call(lambda: 1 // 0)
    assert busy.calls == 2
    assert client.call(lambda: 3) == 3


@pytest.mark.parametrize(
    ("name", "change", "back"),
    [
        (
            "torch.set_float32_matmul_precision",
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
        (
            "torch.backends.mkldnn.enabled",
            lambda: torch._C._set_mkldnn_enabled(False),
            lambda: torch._C._set_mkldnn_enabled(True),
        ),
    ],
)
def test_d33_a_switch_that_cannot_be_kept_out_is_refused_by_name(
    owner: DeviceOwner, name: str, change: Any, back: Any
) -> None:
    client, ran = owner.client(), []
    client.call(lambda: None)
    change()
    try:
        with pytest.raises(SettingsError, match=rf"{name} was .* when this engine was loaded and is "):
            client.call(lambda: ran.append(1))
        assert owner.client().call(lambda: "loaded now") == "loaded now"
    finally:
        back()
    assert ran == []
    assert client.call(lambda: 1) == 1
    with pytest.raises(SettingsError, match=name):
        client.call(change)
    back()


def test_d33_threads_set_elsewhere_do_not_reach_the_owner(owner: DeviceOwner) -> None:
    client, before = owner.client(), torch.get_num_threads()
    x = torch.randn(256, 512)
    expected = client.call(lambda: x @ x.T)
    try:
        torch.set_num_threads(before + 1)
        assert client.call(torch.get_num_threads) == before
        assert torch.equal(client.call(lambda: x @ x.T), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process")
def test_d34_a_forked_child_is_told_and_does_not_hang(owner: DeviceOwner) -> None:
    client = owner.client()
    assert client.call(lambda: 1) == 1
    child = os.fork()
    if not child:
        said = 0
        for use in (lambda: client.call(lambda: 1), owner.client):
            try:
                use()
            except ForkedError as error:
                said += "spawn" in str(error)
        owner.leave(client, lambda: None)
        os._exit(said)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended[0] == child, "the child hangs"
    assert os.waitstatus_to_exitcode(ended[1]) == 2
    assert client.call(lambda: 2) == 2
