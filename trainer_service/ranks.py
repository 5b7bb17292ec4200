"""The ranks of one trainer: processes that train one model together.

Only rank 0 uses the ledger and writes to the root folder. It sends orders, which the other ranks execute at the same
time; data are arrays and JSON. Orders use the job's store, where a rank can wait without limit. Data use collectives,
where a rank that is missing for `trainer.rank_timeout_s` ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from shared.errors import ConfigError, StartupError, first_line
from shared.stop_request import StopRequest
from trainer_service.broadcast import AnyArray, pack_arrays, unpack_arrays
from trainer_service.errors import RankLost
from trainer_service.process_groups import DataParallel

JOIN_TIMEOUT_S = 120.0  # from a rank's start until all have joined
PATIENCE_S = 15.0
_LOOK_EVERY_S = 1.0  # interval of checks for an order and for a stop request
_PART_BYTES = 4 << 20  # of an order; PyTorch's store ends a connection that sends a value above 8 MiB
_END = "end"
_GONE = "another rank ended or came too late (trainer.rank_timeout_s), and says why itself; all end, to start again"


class Ranks:
    """This process among the ranks. With one rank every call is the identity."""

    def __init__(self, rank: int, size: int, store: Any, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout_s = store, timeout_s
        self._ordered = 0
        self._unread: deque[tuple[str, int]] = deque()  # on rank 0: key and number of parts of each order
        self._data_parallel: DataParallel | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def begin(self, stop: StopRequest) -> tuple[str, dict[str, float]] | None:
        """On the other ranks: return the folder, inside the root folder, that training starts from, and the algorithms.

        None: rank 0 has ended.
        """
        for _name, (folder, algorithms) in self.orders(stop):
            return str(folder), dict(algorithms)
        return None

    def order(self, name: str, *arguments: Any) -> None:
        """On rank 0: make the others call the method `name` of their learner. arguments: JSON, rows or bytes."""
        if self.size > 1 and self.is_first:
            key, data = f"order-{self._ordered}", msgspec.msgpack.encode((name, arguments))
            starts = range(0, len(data), _PART_BYTES)
            for part, start in enumerate(starts):
                self._store.set(f"{key}.{part}", data[start : start + _PART_BYTES])
            self._store.set(key, str(len(starts)))
            self._unread.append((key, len(starts)))
            self._ordered += 1
            self._delete_read_orders()

    def _delete_read_orders(self) -> None:
        """Delete the oldest orders, as long as all other ranks have read them."""
        while self._unread and self._store.add(f"{self._unread[0][0]}.read", 0) == self.size - 1:
            key, parts = self._unread.popleft()
            for name in (key, f"{key}.read", *(f"{key}.{part}" for part in range(parts))):
                self._store.delete_key(name)

    def end(self) -> None:
        """On rank 0: let the other ranks end."""
        self.order(_END)

    def data_parallel(self) -> DataParallel | None:
        """Return the groups of DeepSpeed's collectives, created on all ranks by the first call; None with one rank."""
        if self.size > 1 and self._data_parallel is None:
            self._data_parallel = DataParallel(self.rank, self.size, self._timeout_s)
        return self._data_parallel

    def leave(self) -> None:
        """At the end, rank 0, whose process may contain the store, waits until the others have read all orders.

        It waits up to PATIENCE_S for ranks that are gone. The process group ends with the process.
        """
        if not self.is_first:
            self._store.set(f"left-{self.rank}", b"")
        elif self.size > 1:
            others = [f"left-{rank}" for rank in range(1, self.size)]
            with contextlib.suppress(dist.DistStoreError):
                self._store.wait(others, timedelta(seconds=PATIENCE_S))
        atexit.register(_end_process_group)

    def orders(self, stop: StopRequest) -> Iterator[tuple[str, list[Any]]]:
        """On the other ranks: yield each order until the last. Raises RankLost if rank 0 is gone.

        Rank 0 handles a stop request. After one, the next order is waited for no longer than PATIENCE_S or
        `trainer.rank_timeout_s`, whichever is longer.
        """
        while True:
            name, arguments = self._next_order(stop)
            if name == _END:
                return
            yield name, arguments

    def _next_order(self, stop: StopRequest) -> tuple[str, list[Any]]:
        key, waited_s = f"order-{self._ordered}", 0.0
        while (order := self._read_order(key)) is None:
            waited_s += _LOOK_EVERY_S if stop else 0.0
            if waited_s > max(PATIENCE_S, self._timeout_s):  # it may be writing a version or a state
                raise RankLost(f"rank 0 gave no order for {waited_s:g} s after a request to stop")
        self._ordered += 1
        name, arguments = msgspec.msgpack.decode(order)
        return name, arguments

    def _read_order(self, key: str) -> bytes | None:
        """Return the order if it arrives within _LOOK_EVERY_S. Raises RankLost if rank 0 is gone or suspended.

        If the store's process is suspended, or its machine is cut off, calls to the store block without limit. So a
        thread makes the call, and is abandoned.
        """
        asked: Future[bytes] = Future()
        Thread(target=_settle, args=(asked, partial(self._wait_and_get, key)), daemon=True).start()
        try:
            return asked.result(_LOOK_EVERY_S + self._timeout_s)
        except dist.DistStoreError:
            return None
        except TimeoutError as exc:
            raise RankLost(f"rank 0 does not answer, for {self._timeout_s:g} s now (trainer.rank_timeout_s)") from exc
        except (RuntimeError, dist.DistNetworkError) as exc:
            raise RankLost(f"rank 0 is gone ({first_line(exc) or type(exc).__name__})") from exc

    def _wait_and_get(self, key: str) -> bytes:
        self._store.wait([key], timedelta(seconds=_LOOK_EVERY_S))
        parts = int(self._store.get(key))
        order = b"".join(self._store.get(f"{key}.{part}") for part in range(parts))
        self._store.add(f"{key}.read", 1)
        return order

    def broadcast(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return rank 0's tensor on the device; the others pass one of the same shape and type."""
        tensor = tensor.to(device)
        if self.size > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def broadcast_json(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self.gather_json(value)[0]

    def gather_json(self, value: Any) -> list[Any]:
        """Return each rank's value, by rank."""
        if self.size == 1:
            return [value]
        return [msgspec.msgpack.decode(data) for data in self._gather(msgspec.msgpack.encode(value))]

    def share(self, costs: Sequence[int]) -> list[int]:
        """Return the indices of the items that this rank computes, in order. Every rank passes the same costs.

        Items are assigned largest first, each to the rank with the lowest total.
        """
        totals, mine = [0] * self.size, []
        for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
            rank = totals.index(min(totals))
            totals[rank] += costs[number]
            if rank == self.rank:
                mine.append(number)
        return sorted(mine)

    def gather(self, arrays: Sequence[AnyArray]) -> list[list[AnyArray]]:
        """Return each rank's arrays, by rank."""
        return [list(arrays)] if self.size == 1 else [unpack_arrays(data) for data in self._gather(pack_arrays(arrays))]

    def largest(self, value: int) -> int:
        """Return the maximum over all ranks."""
        if self.size == 1:
            return value
        found = torch.tensor([value])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def _gather(self, data: bytes) -> list[bytes]:
        length = self.largest(len(data))
        padded = torch.zeros(8 + length, dtype=torch.uint8)
        framed = len(data).to_bytes(8, "little") + data
        padded[: len(framed)] = torch.from_numpy(np.frombuffer(framed, np.uint8).copy())
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        whole = [part.numpy().tobytes() for part in parts]
        return [part[8 : 8 + int.from_bytes(part[:8], "little")] for part in whole]


def _end_process_group() -> None:
    """Destroy the process group if there is one: NCCL warns if a process exits with it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether a collective raised this because another rank is gone or was too late."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """In this block, the loss of another rank raises RankLost."""
    try:
        yield
    except RuntimeError as exc:
        if not is_lost(exc):
            raise
        raise RankLost(_GONE) from exc


def join_ranks(timeout_s: float) -> Ranks:
    """Join the other ranks that torchrun's environment names; without it this process is the only rank.

    timeout_s: of a collective. Raises StartupError if the others do not join, or this rank has no GPU.
    """
    size, rank, local_rank = max(1, _number("WORLD_SIZE")), _number("RANK"), _number("LOCAL_RANK")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _require_gpus(local_rank, max(1, _number("LOCAL_WORLD_SIZE")))
        torch.cuda.set_device(local_rank)
    if size == 1:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]  # public, and missing from its __all__
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    else:
        store = _meet(rank, size)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    return Ranks(rank, size, store, timeout_s)


def _settle(asked: Future[bytes], question: Callable[[], bytes]) -> None:
    try:
        asked.set_result(question())
    except RuntimeError as exc:  # raised again by the waiting caller
        asked.set_exception(exc)


def _meet(rank: int, size: int) -> Any:
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise StartupError(
            f"WORLD_SIZE={size} and {missing[0]} is not set; start the ranks with `flywheel trainer` (trainer.ranks) "
            "or torchrun, or unset WORLD_SIZE"
        )
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        limit = timedelta(seconds=JOIN_TIMEOUT_S)
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=limit))  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, OSError) as exc:
        raise StartupError(
            f"WORLD_SIZE={size}, and its ranks did not all meet at {address} within {JOIN_TIMEOUT_S:g} s "
            f"({first_line(exc) or type(exc).__name__}); start all of them, or unset WORLD_SIZE"
        ) from exc
    return store


def _require_gpus(local_rank: int, needed: int) -> None:
    """Raise ConfigError on the first rank of a machine with fewer GPUs than ranks; the others exit silently."""
    found = torch.cuda.device_count()
    if needed > found and local_rank:
        raise SystemExit(2)
    if needed > found:
        raise ConfigError(
            f"trainer.ranks={needed}, but this trainer sees {found} GPUs; lower trainer.ranks, or name more of them in "
            "trainer.devices"
        )


def _number(name: str) -> int:
    text = os.environ.get(name) or "0"
    if not text.isdigit():
        raise StartupError(f"{name}={text!r} is no number; start the ranks with `flywheel trainer` or torchrun")
    return int(text)
