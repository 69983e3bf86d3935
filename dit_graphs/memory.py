"""Owns what all graphs of one device share: pool, capture stream, locks, order, recovery.

Must never know modules or signatures. The surprising fact: on torch 2.11 one failed capture makes
its pool unusable, breaks `torch.randn` and stops `empty_cache` from releasing anything, so first
attempts go to a scratch pool where others use the shared one, and a failure is healed by `recover`.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from .errors import CaptureAborted, Reason
from .gate import CaptureGate, Held

__all__ = ["CaptureGate", "CudaState", "DeviceState", "HostState", "Stopwatch", "device_state"]

PoolId = tuple[int, int]
_registry: dict[torch.device, DeviceState] = {}
_registry_lock = threading.Lock()


def device_state(device: torch.device) -> DeviceState:
    """The one state of this device; made on first use."""
    if device.type == "cuda" and str(device) == "cuda":  # no index: the current device
        device = torch.device("cuda", torch.cuda.current_device())
    with _registry_lock:
        found = _registry.get(device)
        if found is None:
            found = CudaState(device) if device.type == "cuda" else HostState(device)
            _registry[device] = found
        return found


class Stopwatch(Protocol):
    """Times one span of device work; never synchronises."""

    def stop(self) -> None: ...

    def elapsed_ms(self, *, wait: bool = False) -> float | None: ...


class GraphHolder(Protocol):
    """Whoever keeps recordings on a device and can let all of them go."""

    def drop_graphs(self) -> int: ...

    def holds_graphs(self) -> bool: ...


class Holders:
    """Everybody who keeps recordings on one device, held weakly.

    Threads come, go and look at once; a bare WeakSet raises where it grows under a look.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection inside may close somebody
        self._known: weakref.WeakSet[GraphHolder] = weakref.WeakSet()

    def add(self, holder: GraphHolder) -> None:
        """`holder` is one of them."""
        with self._lock:
            self._known.add(holder)

    def discard(self, holder: GraphHolder) -> None:
        """`holder` is none of them."""
        with self._lock:
            self._known.discard(holder)

    def __iter__(self) -> Iterator[GraphHolder]:
        """Those there are at this moment."""
        with self._lock:
            return iter(list(self._known))


class DeviceState:
    """What is true of any device; `HostState` and `CudaState` add how work is ordered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gate = CaptureGate()
        self.replay_lock = threading.RLock()
        self.generation = 0
        self.may_hold_graphs = False  # then a failed capture ruins their pool, and they give memory
        self.holders = Holders()
        self._replaying = 0
        self._replayer: int | None = None
        self._retire_later = False
        self._later: list[Callable[[], object]] = []
        self._turn = Held(self.begin_replay, self.end_replay)

    def replaying(self) -> AbstractContextManager[None]:
        """Held from bind to hand-out. Raises `CaptureAborted` inside another replay's break."""
        return self._turn

    def is_replaying_here(self) -> bool:
        """Whether the calling code runs in a break of a replay."""
        return self._replayer == threading.get_ident()

    def after_replay(self, action: Callable[[], object]) -> None:
        """Does `action`, at once or, inside a replay's break, after that: it may be that graph."""
        with self.replay_lock:  # not while another thread replays
            if self._replaying:
                self._later.append(action)
                return
            self.settle()
            action()

    def begin_replay(self) -> None:
        """See `replaying`."""
        self.replay_lock.acquire()
        try:
            if self._replaying:
                raise CaptureAborted(Reason.NESTED_REPLAY, "")
            self._begin_order()
            self._replaying += 1
            self._replayer = threading.get_ident()
        except BaseException:
            self.replay_lock.release()
            raise

    def end_replay(self) -> None:
        """The results are the caller's own; another call may replay."""
        try:
            self._end_order()
        finally:
            self._replaying -= 1
            self._replayer = None
            try:
                while self._later:
                    self._later.pop(0)()
                if self._retire_later:
                    self.retire()
            finally:
                self.replay_lock.release()

    @contextmanager
    def quiet_collector(self) -> Iterator[None]:
        """No garbage collection inside: freeing an old graph during a capture is illegal."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()

    def _begin_order(self) -> None:
        """What follows runs after every earlier replay on the device."""

    def _end_order(self) -> None:
        """Later replays run after what was launched since `_begin_order`."""

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """Work inside runs on the capture stream, ordered after and before the caller's."""
        yield

    def stopwatch(self) -> Stopwatch:
        raise CaptureAborted(Reason.NO_CUDA, "no clock")

    def random_state(self) -> list[Tensor]:
        """The default generator's state, for `set_random_state`."""
        return [torch.get_rng_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        """The default generator continues from `state`."""
        torch.set_rng_state(state[0])

    def default_budget(self) -> int:
        """The bytes "auto" allows graphs on this device."""
        return 1 << 62

    def pool_bytes(self) -> int:
        """Bytes the shared graph pool reserves on the device."""
        return 0

    def driver_bytes(self) -> int:
        """Bytes in use on the device outside torch's allocator."""
        return 0

    def reclaim(self) -> None:
        """Cached blocks go back to the driver where no graph holds them."""

    def check_can_capture(self) -> None:
        """Raises `CaptureAborted` where a capture would fail for lack of memory or support."""

    def settle(self) -> None:
        """All replays have finished on the device."""

    def retire(self) -> int:
        """Every graph of the device is dropped and the next capture starts a new pool.

        Returns how many graphs there were; 0 from inside a replay, after which it is done.
        """
        with self.replay_lock:  # no graph dies under another thread's replay or capture
            self._retire_later = bool(self._replaying)
            if self._retire_later:
                return 0
            self.settle()
            dropped = sum(holder.drop_graphs() for holder in self.holders)
            self.may_hold_graphs = False
            self._new_pool()
            self.generation += 1
            return dropped

    def retire_if_unused(self) -> None:
        """The memory of a pool in which no graph is left goes back to the device."""
        if not any(holder.holds_graphs() for holder in self.holders):
            self.retire()

    def _new_pool(self) -> None:
        pass


class HostState(DeviceState):
    """CPU: calls are ordered by themselves."""

    def stopwatch(self) -> Stopwatch:
        return _HostWatch()


class _HostWatch:
    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._stop: float | None = None

    def stop(self) -> None:
        self._stop = time.perf_counter()

    def elapsed_ms(self, *, wait: bool = False) -> float | None:
        return None if self._stop is None else (self._stop - self._start) * 1e3


class _EventWatch:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._start.record(self._stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def elapsed_ms(self, *, wait: bool = False) -> float | None:
        if wait:
            self._end.synchronize()  # sync: a capture is about to be decided
        elif not self._end.query():
            return None
        return float(self._start.elapsed_time(self._end))


class CudaState(DeviceState):
    """One pool and one capture stream; replays of a device run one after another."""

    HEADROOM_BYTES = 256 << 20

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        self._pool: PoolId | None = None
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._last_replay = torch.cuda.Event()
        # one each, because one replay at a time is between its two ends
        self._on_device = torch.cuda.device(device)
        self._caller: torch.cuda.Stream | None = None

    @property
    def pool(self) -> PoolId:
        """The shared pool of this generation."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # an empty graph keeps the pool's use count above zero while all others come and go
            self._anchor = self._trivial_graph(self._pool)
        return self._pool

    def _trivial_graph(self, pool: PoolId) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        seed = torch.zeros(1, device=self.device)
        quiet, here = self.quiet_collector(), torch.cuda.device(self.device)
        with quiet, here, torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream(self.device))
            torch._C._cuda_clearCublasWorkspaces()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            seed.add_(0)
            graph.capture_end()
        return graph

    def _begin_order(self) -> None:
        self._on_device.__enter__()
        self._caller = torch.cuda.current_stream(self.device)
        self._last_replay.wait(self._caller)

    def _end_order(self) -> None:
        caller, self._caller = self._caller, None
        try:
            assert caller is not None
            self._last_replay.record(caller)
        finally:
            self._on_device.__exit__(None, None, None)

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        self.stream.wait_event(self._last_replay)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    def stopwatch(self) -> Stopwatch:
        return _EventWatch(self.device)

    def _generator(self) -> torch.Generator:
        torch.cuda.init()
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]

    def random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), self._generator().get_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        self._generator().set_state(state[1])

    def pool_bytes(self) -> int:
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(
            int(segment["total_size"])
            for segment in segments
            if tuple(segment.get("segment_pool_id", ())) == tuple(self._pool)
            and segment.get("device", 0) == self.device.index
        )

    def default_budget(self) -> int:
        # half of what is left, so that an eager VAE decode keeps its activation peak
        free, _ = torch.cuda.mem_get_info(self.device)
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return (int(free) + idle + self.pool_bytes()) // 2

    def driver_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free - torch.cuda.memory_reserved(self.device))

    def reclaim(self) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def check_can_capture(self) -> None:
        if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
            raise CaptureAborted(Reason.ALLOCATOR, "cudaMallocAsync")
        if torch.cuda.mem_get_info(self.device)[0] >= self.HEADROOM_BYTES:
            return
        self.reclaim()  # cached blocks of the default pool are useless to a graph's pool
        free = torch.cuda.mem_get_info(self.device)[0]
        if free < self.HEADROOM_BYTES:
            raise CaptureAborted(Reason.LOW_MEMORY, f"{free >> 20} MiB free on the device")

    def settle(self) -> None:
        self._last_replay.synchronize()  # sync: buffers a replay reads are about to be freed

    def _new_pool(self) -> None:
        if self._anchor is not None:
            self._anchor.reset()
        self._anchor, self._pool = None, None
        torch._C._cuda_clearCublasWorkspaces()
        self.reclaim()

    def recover(self, pool: PoolId) -> None:
        """After a capture into `pool` failed: allocator, generator and cache work again.

        The order is the one measured to work on torch 2.11 and harmless on newer releases.
        """
        index = self.device.index
        for heal in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            try:
                heal(index, pool)
            except RuntimeError:  # newer torch has done this step itself
                continue
        throwaway = torch.cuda.graph_pool_handle()
        self._trivial_graph(throwaway).reset()
        torch._C._cuda_clearCublasWorkspaces()
        if self._pool is not None and tuple(pool) == tuple(self._pool):
            # the shared pool itself is ruined: older graphs keep replaying, new ones start afresh
            self._pool, self._anchor = None, None
            self.generation += 1
