"""The identity of this process, checks whether another one is alive, and children that end with their parent."""

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
    """Return a unique name of this process: machine, process id, start time, random digits."""
    pid = os.getpid()
    return f"{boot_name()}-{pid}-{_start_of(pid) or 0}-{uuid.uuid4().hex[:8]}"


def is_gone(name: str) -> bool:
    """Whether the process of that name ran on this machine and has ended; False if unknown."""
    began = _start_times(name)
    return began is not None and began[0] != 0 and began[1] not in (began[0], None)


def is_running(name: str) -> bool:
    """Whether the process of that name runs on this machine, even if stopped; False if unknown."""
    began = _start_times(name)
    return began is not None and began[0] == began[1] != 0


def _start_times(name: str) -> tuple[int, int | None] | None:
    """Return when the process of that name started, by its name and by the kernel; None: it is on another machine."""
    machine, _, rest = name.partition("-")
    if not machine or machine != boot_name():
        return None
    pid, start, _ = rest.split("-")
    return int(start), _start_of(int(pid))


@functools.cache
def boot_name() -> str:
    """Return a name of this boot of this machine, and of the container; empty if the kernel is not Linux."""
    try:
        about = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
    return hashlib.blake2b(about.encode(), digest_size=6).hexdigest()


@functools.cache
def machine_name() -> str:
    """Return a name of this machine that stays the same after a restart: its host name and installation.

    A container has its own host name.
    """
    about = ""
    for file in (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")):
        with contextlib.suppress(OSError):
            about = about or file.read_text().strip()
    return f"{socket.gethostname()}-{hashlib.blake2b(about.encode(), digest_size=4).hexdigest()}"


def _start_of(pid: int) -> int | None:
    """Return when a process started, in kernel ticks; 0 if it has ended; None if unknown.

    A process without free file descriptors, for example, cannot read it, even for itself.
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
    """Return the environment of a process that may use only these GPUs; None: all that are visible."""
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}


def import_path() -> dict[str, str]:
    """Return the environment in which Python finds our packages.

    With its option -P, packages of the same names in the working folder do not come before them.
    """
    path = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def die_with_parent(signal_number: int = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel signals the child when its parent dies for any reason (Linux)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1

    def in_child() -> None:
        prctl(set_parent_death_signal, signal_number)

    return in_child


def adopt_orphans() -> None:
    """Make this process the new parent of orphans among its descendants (Linux)."""
    set_child_subreaper = 36
    ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1)
