"""The one owner of a device in a process: a thread that alone loads, tunes, compiles, captures and launches there.

Engines stand in one queue, first come first served, whatever thread they are called from. Nothing that a process or a
thread can set reaches the work: it runs on a thread and, on CUDA, a stream of its own, without gradients or inference
mode. Callbacks run on another thread, so that they may ask and wait. Knows no question.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from engine.errors import ClosedError, DeviceLostError, ForkedError
from engine.run.settings import Settings, check_settings, read_settings

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Steps done, steps in all."""
_TRIES, _PAUSE_S = 4, 0.05
"""How often the device is asked whether it still answers, and how much longer each time before."""
logger = logging.getLogger("forkgraph")


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that everything of ours runs on. One for all engines of a device: the BLAS library keeps a workspace
    for each stream it has seen, and a capture needs a stream that is not the default one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Here(threading.local):
    device: torch.device | None = None


_here = _Here()


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """This thread computes for an engine: modes that belong to a thread are set here, whatever its caller set.

    The owner's thread always does. Elsewhere, on CUDA, our stream and the caller's wait for one another at both ends.
    """
    if _here.device == device:
        yield
        return
    before = _here.device
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        modes.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            modes.enter_context(torch.cuda.device(device))  # Triton launches on the current device
            modes.enter_context(_stream_of_ours(device))
        _here.device = device
        try:
            yield
        finally:
            _here.device = before


@contextmanager
def _stream_of_ours(device: torch.device) -> Iterator[None]:
    theirs, ours = torch.cuda.current_stream(device), stream_of(device)
    ours.wait_stream(theirs)
    with torch.cuda.stream(ours):
        yield
    theirs.wait_stream(ours)


class _Result(Future[T]):
    """A future whose callbacks run on a thread of their own: they may call the engine and wait for it."""

    def __init__(self, callbacks: _Callbacks) -> None:
        super().__init__()
        self._thread = callbacks

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        super().add_done_callback(lambda future: self._thread.put(lambda: fn(future)))


class _Callbacks:
    """A thread that runs callbacks in the order they came; started by the first one."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._waiting: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._waiting.put(call)

    def _run(self) -> None:
        while True:
            try:
                self._waiting.get()()
            except Exception:
                logger.exception("a callback of a result failed")


@dataclass(eq=False)
class _Turn(Generic[T]):
    """Work of one engine that waits for the device."""

    client: Client
    work: Callable[[], T]
    future: Future[T]

    def run(self, owner: DeviceOwner) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            owner.check()
            if self.client.settings is None:
                self.client.settings = read_settings(owner.device)
            check_settings(self.client.settings)
            result = self.work()
            check_settings(self.client.settings)
        except BaseException as error:
            self.future.set_exception(owner.verdict(error))
        else:
            self.future.set_result(result)


class DeviceOwner:
    """The thread and the queue of one device. Taken with `owner_of`; work comes in through a `Client`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.callbacks = _Callbacks(f"forkgraph-callbacks-{device}")
        self._lost: DeviceLostError | None = None
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self._waiting: deque[_Turn[Any]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name=f"forkgraph-{device}", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def client(self, idle: Callable[[], bool] | None = None) -> Client:
        """A place in the queue for one engine. `idle` does one thing of its own while nobody waits, and says whether
        there was one."""
        self.check()
        client = Client(owner=self, idle=idle)
        with self._wake:
            self._clients.add(client)
        return client

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process whose thread serves the device."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise DeviceLostError or ForkedError where nothing can run any more."""
        if self.forked:
            raise ForkedError(
                f"this process was forked from one that runs Forkgraph on {self.device}, and engines do not work in "
                "the child; start processes with multiprocessing's 'spawn' method and load an engine in each"
            )
        if self._lost is not None:
            raise DeviceLostError(str(self._lost)) from self._lost.__cause__

    def bytes_beside(self, client: Client) -> int:
        """What the other engines of this device hold: weights, each set once, and what lies above them."""
        with self._wake:
            others = [other for other in self._clients if other is not client and not other.closed]
        weights = {key: size for other in others for key, size in other.weights.items() if key not in client.weights}
        return sum(weights.values()) + sum(other.held_bytes for other in others)

    def enter(self, turn: _Turn[Any]) -> None:
        """Queue a turn. Raises what `check` raises, and ClosedError for a closed engine."""
        self.check()
        with self._wake:
            if turn.client.closed:
                raise ClosedError
            self._waiting.append(turn)
            self._wake.notify()

    def leave(self, client: Client, release: Callable[[], None]) -> None:
        """Answer what of this client still waits with ClosedError, then run `release` in turn. Does not wait."""
        if self.forked:  # nobody serves the queue here, and its lock may be held for ever
            client.closed = True
            return
        with self._wake:
            if client.closed:
                return
            client.closed = True
            mine = [turn for turn in self._waiting if turn.client is client]
            self._waiting = deque(turn for turn in self._waiting if turn.client is not client)
            self._waiting.append(_Turn(client, release, client.released))
            self._wake.notify()
        for turn in mine:
            if turn.future.set_running_or_notify_cancel():
                turn.future.set_exception(ClosedError())

    def verdict(self, error: BaseException) -> BaseException:
        """The error to hand out for the one that ended a turn: that the device is lost, where it is."""
        if self.device.type != "cuda" or self._lost is not None:
            return error
        for attempt in range(_TRIES):
            try:
                stream_of(self.device).synchronize()
                return error
            except RuntimeError as fault:  # forbidden for a moment while others capture; for ever in a dead context
                reason = str(fault).partition("\n")[0]
                time.sleep(_PAUSE_S * attempt)
        self._lost = DeviceLostError(
            f"{self.device} is lost to this process ({reason}), and with it every engine there; start a new process"
        )
        self._lost.__cause__ = error
        logger.error("%s", self._lost)
        return self._lost

    def _serve(self) -> None:
        with computing(self.device):
            while not self._stopping:
                with self._wake:
                    turn = self._waiting.popleft() if self._waiting else None
                if turn is not None:
                    turn.run(self)
                    del turn  # so that what it held is gone before the next one waits
                elif not self._idled():
                    with self._wake:
                        self._wake.wait_for(lambda: self._waiting or self._stopping)

    def _idled(self) -> bool:
        """Whether some engine had something to do while nobody waits."""
        with self._wake:
            clients = [client for client in self._clients if not client.closed and client.idle is not None]
        for client in clients:
            try:
                if client.idle is not None and client.idle():
                    return True
            except Exception as error:
                client.idle = None
                logger.exception("what %s does in idle time failed, and is left alone", self.device)
                self.verdict(error)
        return False

    def _stop(self) -> None:
        if not self.forked:
            with self._wake:
                self._stopping = True
                self._wake.notify()
            self._thread.join()


@dataclass(eq=False, kw_only=True)
class Client:
    """One engine at the owner of its device."""

    owner: DeviceOwner
    idle: Callable[[], bool] | None = None
    settings: Settings | None = None
    """As they were at its first turn."""
    weights: dict[int, int] = field(default_factory=dict)
    """Bytes of the weights that this engine computes with, by identity: engines may share them."""
    held_bytes: int = 0
    """What it may hold above its weights."""
    closed: bool = False
    released: Future[None] = field(default_factory=Future)
    """Done when what it held is given back."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. Raises ClosedError, DeviceLostError or ForkedError."""
        future: Future[T] = _Result(self.owner.callbacks)
        self.owner.enter(_Turn(self, work, future))
        return future

    def call(self, work: Callable[[], T]) -> T:
        """`work` on the owner's thread, waited for. Raises what `submit` and `work` raise."""
        return self.submit(work).result()

    def report(self, work: Callable[[Progress], T], progress: Progress | None) -> T:
        """As `call`, with `progress` called on this thread: it may ask an engine and wait, and what it raises ends the
        work at its next step, as Ctrl-C does."""
        steps: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        left = threading.Event()

        def step(done: int, total: int) -> None:
            if left.is_set():
                raise InterruptedError("nobody waits for this any more")
            steps.put((done, total))

        future = self.submit(lambda: work(step))
        Future.add_done_callback(future, lambda _: steps.put(None))
        try:
            while (now := steps.get()) is not None:
                if progress is not None:
                    progress(*now)
            return future.result()
        except BaseException:
            left.set()
            raise


_owners: dict[torch.device, DeviceOwner] = {}
_making = threading.Lock()


def owner_of(device: torch.device) -> DeviceOwner:
    """The owner of `device` (for CUDA with its index) in this process, started by the first who asks."""
    with _making:
        if device not in _owners:
            _owners[device] = DeviceOwner(device)
        return _owners[device]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)
