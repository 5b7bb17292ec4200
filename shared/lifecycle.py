"""Starting and ending: signals that ask to stop, ports that must be free, children that must not outlive us."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import random
import select
import signal
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from shared.errors import StartupError

_PHASE = random.random()  # so that processes do not beat in step


def until_next(period_s: float) -> float:
    """Seconds until this process's next beat of that period: what waits for the same beat wakes the process once.

    Of two periods, the beats of one that is a multiple of the other fall on beats of that.
    """
    left = period_s - (time.monotonic() + _PHASE) % period_s
    return left if left > period_s / 20 else left + period_s  # it may be awake a little early


class StopRequest:
    """Set by SIGTERM or SIGINT. Wait on it instead of sleeping.

    Made of a pipe, not of threading.Event: a handler runs in the main thread at any moment, also while that holds the
    event's lock, and would then wait for itself.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)

    def listen(self) -> StopRequest:
        """Install the signal handlers (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.set()

    def set(self) -> None:
        if not self._stopped:
            self._stopped = True
            os.write(self._writable, b"!")  # never read: it wakes everyone who waits, now and later

    def __bool__(self) -> bool:
        return self._stopped

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; True when the process should stop."""
        waiting = select.poll()
        waiting.register(self._readable, select.POLLIN)
        waiting.poll(max(0.0, timeout_s) * 1000)
        return self._stopped

    def __del__(self) -> None:
        for descriptor in (self._readable, self._writable):
            os.close(descriptor)


def require_free_port(host: str, port: int, setting: str) -> None:
    """Raise StartupError when nothing can listen there, naming the setting to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise StartupError(
                f"cannot listen on {host}:{port} ({exc.strerror}); end what holds the port, or change {setting}"
            ) from exc


def process_name() -> str:
    """A name for this process that no other one has had: of its machine, its id and its start."""
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_start_of(pid)}-{uuid.uuid4().hex[:8]}"


def is_gone(name: str) -> bool:
    """Whether the process of that name ran on this machine and does so no more; False where that cannot be known."""
    machine, _, rest = name.partition("-")
    if not machine or machine != _machine():
        return False
    pid, start, _ = rest.split("-")
    return _start_of(int(pid)) != int(start)


@functools.cache
def _machine() -> str:
    """This boot of this machine, and the container's process ids if it is one; empty where the kernel is not Linux."""
    try:
        about = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
    return hashlib.blake2b(about.encode(), digest_size=6).hexdigest()


def _start_of(pid: int) -> int:
    """When a process began, in the kernel's ticks; 0 when it has ended, or where the kernel is not Linux."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state == "Z" else int(rest[18])  # proc(5): starttime


def die_with_parent(signal_number: int = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel signals the child when its parent dies, however it dies (Linux)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1

    def in_child() -> None:
        prctl(set_parent_death_signal, signal_number)

    return in_child
