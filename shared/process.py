"""Which process this is, whether another one is still alive, and children that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path


def process_name() -> str:
    """A unique name of this process: machine, process id, start time, random digits."""
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_start_of(pid) or 0}-{uuid.uuid4().hex[:8]}"


def is_gone(name: str) -> bool:
    """Whether the process of that name ran on this machine and has ended; False where that cannot be known."""
    began = _began(name)
    return began is not None and began[1] not in (began[0], None)


def is_running(name: str) -> bool:
    """Whether the process of that name runs on this machine, be it stopped; False where that cannot be known."""
    began = _began(name)
    return began is not None and began[0] == began[1] != 0


def _began(name: str) -> tuple[int, int | None] | None:
    """When the process of that name began, as its name says and as the kernel says now; None: on another machine."""
    machine, _, rest = name.partition("-")
    if not machine or machine != _machine():
        return None
    pid, start, _ = rest.split("-")
    return int(start), _start_of(int(pid))


@functools.cache
def _machine() -> str:
    """This boot of this machine, and the container's process ids if it is one; empty where the kernel is not Linux."""
    try:
        about = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
    return hashlib.blake2b(about.encode(), digest_size=6).hexdigest()


@functools.cache
def machine_name() -> str:
    """This machine among those that share a ledger, the same after a restart: its host name and installation.

    A container has a host name of its own.
    """
    about = ""
    for file in (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")):
        with contextlib.suppress(OSError):
            about = about or file.read_text().strip()
    return f"{socket.gethostname()}-{hashlib.blake2b(about.encode(), digest_size=4).hexdigest()}"


def _start_of(pid: int) -> int | None:
    """When a process began, in the kernel's ticks; 0 when it has ended; None when that cannot be known.

    A process without free descriptors, for one, cannot read it, not even for itself.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if _exists(pid) else 0
    except OSError:
        return None
    return 0 if state == "Z" else int(rest[18])  # proc(5): starttime


def _exists(pid: int) -> bool:
    """Whether there is such a process, also where /proc hides those of other users (mount option `hidepid`)."""
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return not isinstance(exc, ProcessLookupError)
    return True


def visible_devices(devices: Sequence[int] | None) -> dict[str, str]:
    """The environment of a process that is to see these GPUs alone; None: those that it sees anyway."""
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}


def die_with_parent(signal_number: int = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel signals the child when its parent dies, however it dies (Linux)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1

    def in_child() -> None:
        prctl(set_parent_death_signal, signal_number)

    return in_child


def adopt_orphans() -> None:
    """From now on whatever this process's descendants leave behind when they die becomes its own child (Linux)."""
    set_child_subreaper = 36
    ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1)
