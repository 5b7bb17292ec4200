"""Staging: copies or rebuilds the next version on the engine's own disk while the engine serves.

The copy gets its name, and the caller its path, only after every file's sha256 is verified: the pause of a reload then
only includes reading it from there. A thread of `flywheel engine` does this, and not vLLM's process, which has replies
to write; the gate in that process forwards the request over a socket. Versions staged by an earlier process are
ignored, so that nothing here needs to survive a power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from shared.chain import Link, copy_version, read_chain
from shared.config import Config
from shared.errors import StartupError, VersionError, VersionExchanged, VersionMissing, is_full
from shared.ledger.queries import VersionRow
from shared.log import StageLogger
from shared.versions import WEIGHTS_SUFFIX, Manifest

log = StageLogger("stage")

REQUEST_BYTES = 16_384
_NICENESS = 5  # lower priority than the engines
_OWN = re.compile(r"v\d{6,}-[0-9a-f]{16}|\.tmp")  # what staging writes into its folder
# statuses of the gate's answers
STAGED, MISSING, UNSOUND, NO_DISK = 200, 409, 422, 507


class Request(msgspec.Struct):
    """The body of POST /flywheel/stage."""

    version: int
    manifest_sha256: str | None = None  # from the ledger; null: it has none
    in_use: list[int] = []  # versions that the engine may read again


_decode_request = msgspec.json.Decoder(Request).decode


class Stage:
    """The staged versions of one engine. Thread-safe: one version is staged at a time."""

    def __init__(self, root: Path, folder: Path, keep: int) -> None:
        """Empty the folder, which must hold nothing but staged versions. Raises StartupError.

        keep: number of versions to keep there.
        """
        self._root = root
        self._folder = folder
        self._keep = keep
        self._staged: dict[str, Path] = {}  # by the manifest's sha256, the last requested one at the end
        self._lock = threading.Lock()
        with _writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _require_own(folder)
            for old in folder.iterdir():
                shutil.rmtree(old)

    def stage(self, version: int, manifest_sha256: str | None = None, in_use: Collection[int] = ()) -> Path:
        """Return a version's folder on this machine, with all its weights; create it if necessary.

        manifest_sha256: from the ledger; None: it has none. in_use: versions whose folders are kept besides the last
        requested ones: an engine reads an adapter again if it was evicted from memory and a request needs it.

        Raises VersionError if the version is unsound, VersionMissing if it or its base is not there, and OSError if a
        disk cannot be read or written; no partial files remain.
        """
        with self._lock:
            chain = read_chain(self._root, version, manifest_sha256)
            sha256 = chain[-1].sha256
            folder = self._staged.pop(sha256, None)
            if folder is None or not _is_whole(folder, chain[-1].manifest):
                folder = self._copy(chain)
            self._staged[sha256] = folder
            kept = {f"v{number:06d}" for number in in_use}
            for old in list(self._staged)[: -self._keep]:
                if self._staged[old].name.partition("-")[0] not in kept:
                    shutil.rmtree(self._staged.pop(old), ignore_errors=True)
            return folder

    def _copy(self, chain: list[Link]) -> Path:
        version, started = chain[-1].manifest.version, time.monotonic()
        temporary = self._folder / ".tmp"
        try:
            try:
                copy_version(chain, _empty(temporary), self._staged)
            except VersionError as error:
                if not self._staged:
                    raise
                log.warning(
                    "what is staged is no base; building on a whole version", version=version, reason=str(error)
                )
                copy_version(chain, _empty(temporary))
            folder = self._folder / f"v{version:06d}-{chain[-1].sha256[:16]}"
            shutil.rmtree(folder, ignore_errors=True)  # remains, if the folder was emptied by others
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        log.info("staged", version=version, seconds=time.monotonic() - started)
        return folder


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """In this block, an error of the file system raises StartupError."""
    try:
        yield
    except OSError as exc:
        raise StartupError(
            f"engine.staging_dir cannot be written ({folder}: {exc.strerror}); correct its permissions"
        ) from exc


def _require_own(folder: Path) -> None:
    """Raise StartupError if the folder holds what no engine has staged, such as the base model."""
    for entry in sorted(folder.iterdir()):
        if not _OWN.fullmatch(entry.name):
            raise StartupError(
                f"{folder} holds {entry.name}, and an engine deletes what is in its folder of engine.staging_dir; "
                "nothing was deleted; set engine.staging_dir to a folder of its own"
            )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an engine's folder; a second engine would delete its versions. Raises StartupError.

    The lock's file is beside the folder.
    """
    with _writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise StartupError(
                f"another engine uses {folder}; stop it, or give each deployment its own engine.staging_dir"
            ) from exc
        yield


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the staged files are still there: others may have emptied the folder to free space."""
    files = {name: entry for name, entry in manifest.files.items() if not name.endswith(WEIGHTS_SUFFIX)}
    for name, entry in {**files, **manifest.weights}.items():
        try:
            if (folder / name).stat().st_size != entry.size:
                return False
        except OSError:
            return False
    return True


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def rebuilt(row: VersionRow, stage: Stage | None) -> Path:
    """Return the folder of a delta, rebuilt whole, to start on. Raises VersionError and StartupError."""
    if stage is None:
        raise VersionError(f"version {row.version} is a delta, which only an engine with engine.staging_dir loads")
    try:
        return stage.stage(row.version, row.manifest_sha256)
    except OSError as exc:
        raise StartupError(
            f"version {row.version} cannot be rebuilt in engine.staging_dir ({exc.strerror}); {_remedy(exc)}"
        ) from exc


@contextlib.contextmanager
def serve_stage(config: Config, engine: str) -> Iterator[tuple[Stage, str] | None]:
    """Serve staging requests of an engine's gate in threads. Yields the stage and its socket; None: staging is off.

    Raises StartupError.
    """
    if config.engine.staging_dir is None:
        yield None
        return
    own = engine.replace("/", "%")  # which no name contains: another engine's folder must not be inside
    folder = Path(config.engine.staging_dir) / own
    with _locked(folder), tempfile.TemporaryDirectory(prefix="flywheel-") as private:
        stage = Stage(config.root, folder, config.engine.keep_staged)
        socket = os.path.join(private, "stage")  # noqa: PTH118 — its path must be short and private
        with _listen(socket, stage) as server:
            thread = threading.Thread(target=server.serve_forever, name="stage", daemon=True)
            thread.start()
            try:
                yield stage, socket
            finally:
                server.shutdown()
                thread.join()


def _listen(socket: str, stage: Stage) -> _Server:
    try:
        return _Server(socket, stage)
    except OSError as exc:
        reason = f"no socket can be made in {tempfile.gettempdir()} ({exc.strerror or exc})"
        raise StartupError(f"{reason}; set TMPDIR to a folder with a short name, such as /tmp") from exc


class _Server(socketserver.ThreadingUnixStreamServer):
    """Reads a line of JSON, and answers with a status and JSON on one line."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str, stage: Stage) -> None:
        super().__init__(path, _Handler)
        self.stage = stage


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        if sys.platform == "linux":  # a thread has its own priority there
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        status, body = answer(self.server.stage, self.rfile.readline(REQUEST_BYTES))
        with contextlib.suppress(OSError):  # the caller has gone, and may ask again
            self.wfile.write(b"%d %s\n" % (status, msgspec.json.encode(body)))


def answer(stage: Stage, line: bytes) -> tuple[int, object]:
    """Return the status and the JSON of the answer to a request."""
    try:
        request = _decode_request(line)
        return STAGED, {"path": str(stage.stage(request.version, request.manifest_sha256, request.in_use))}
    except (VersionMissing, VersionExchanged) as error:  # this machine lacks the published files; another may have them
        return MISSING, _error("version_missing", str(error))
    except VersionError as error:
        return UNSOUND, _error("version_error", str(error))
    except msgspec.MsgspecError as error:
        return 400, _error("invalid_request_error", f'{error}; send {{"version": NUMBER}}')
    except OSError as error:
        return NO_DISK, _error(
            "disk_error", f"it cannot be staged in engine.staging_dir ({error.strerror}); {_remedy(error)}"
        )


def _remedy(error: OSError) -> str:
    """Return what to do about an error of reading root_dir or writing engine.staging_dir."""
    return "free space there" if is_full(error) else "check the disks of root_dir and engine.staging_dir"


def _error(kind: str, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
