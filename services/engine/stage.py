"""Staging: the next version is copied or rebuilt on the engine's own disk while the engine serves.

Only when every file of the copy has its sha256 does it get its name, and the caller its path: what remains for the
pause of a reload is to read it from there. A thread of `flywheel engine` does it, not vLLM's process, which has replies
to write; the gate in that process passes the request on over a socket. What an earlier process staged counts for
nothing, so that nothing here has to survive a power cut.
"""

from __future__ import annotations

import contextlib
import os
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
from shared.errors import StartupError, VersionError, VersionExchanged, VersionMissing
from shared.ledger.queries import VersionRow
from shared.log import StageLogger
from shared.versions import WEIGHTS_SUFFIX, Manifest

log = StageLogger("stage")

REQUEST_BYTES = 16_384
_NICENESS = 5  # staging uses what the engines leave of the processors
# the statuses of the gate's answers
STAGED, MISSING, UNSOUND, NO_DISK = 200, 409, 422, 507


class Request(msgspec.Struct):
    """What is asked of POST /flywheel/stage."""

    version: int
    manifest_sha256: str | None = None  # as the ledger has it; null: it has none
    in_use: list[int] = []  # versions that the engine may read again


class Stage:
    """The staged versions of one engine. Safe to call from several threads: one version is staged at a time."""

    def __init__(self, root: Path, folder: Path, keep: int) -> None:
        """Empty the folder. keep: how many versions stay there. Raises StartupError."""
        self._root = root
        self._folder = folder
        self._keep = keep
        self._staged: dict[str, Path] = {}  # by the sha256 of the manifest, the one asked for last at the end
        self._lock = threading.Lock()
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as exc:
            raise StartupError(
                f"engine.staging_dir cannot be written ({folder}: {exc.strerror}); correct its permissions"
            ) from exc

    def stage(self, version: int, manifest_sha256: str | None = None, in_use: Collection[int] = ()) -> Path:
        """A version's folder on this machine, with all its weights; made if it is not there.

        manifest_sha256: as the ledger has it; None: it has none. in_use: versions whose folders stay, besides the last
        ones asked for: an engine reads an adapter again when a request needs it and it was put out of its memory.

        Raises VersionError when the version is unsound, VersionMissing when it or what it is made of is not there, and
        OSError, with nothing half-made left, when the disk refuses.
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
            shutil.rmtree(folder, ignore_errors=True)  # what is left of it, if somebody has emptied it
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        log.info("staged", version=version, seconds=time.monotonic() - started)
        return folder


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether what was staged is still there: somebody may have emptied the folder to make room."""
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
    """The folder of a delta made whole, to start on. Raises VersionError when that cannot be, StartupError."""
    if stage is None:
        raise VersionError(f"version {row.version} is a delta, which only an engine with engine.staging_dir loads")
    try:
        return stage.stage(row.version, row.manifest_sha256)
    except OSError as exc:
        raise StartupError(
            f"version {row.version} cannot be rebuilt in engine.staging_dir ({exc.strerror}); free space there"
        ) from exc


@contextlib.contextmanager
def serve_stage(config: Config, engine: str) -> Iterator[tuple[Stage, str] | None]:
    """Stage for the gate of an engine, in threads. Yields the stage and its socket; None: nothing is to be staged."""
    if config.engine.staging_dir is None:
        yield None
        return
    stage = Stage(config.root, Path(config.engine.staging_dir) / engine, config.engine.keep_staged)
    with tempfile.TemporaryDirectory(prefix="flywheel-") as private:  # a socket's path is short, and this one private
        socket = os.path.join(private, "stage")  # noqa: PTH118
        with _Server(socket, stage) as server:
            thread = threading.Thread(target=server.serve_forever, name="stage", daemon=True)
            thread.start()
            try:
                yield stage, socket
            finally:
                server.shutdown()
                thread.join()


class _Server(socketserver.ThreadingUnixStreamServer):
    """A line of JSON in, a line with a status and JSON out."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str, stage: Stage) -> None:
        super().__init__(path, _Handler)
        self.stage = stage


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        status, body = answer(self.server.stage, self.rfile.readline(REQUEST_BYTES))
        with contextlib.suppress(OSError):  # whoever asked has gone, and may ask again
            self.wfile.write(b"%d %s\n" % (status, msgspec.json.encode(body)))


def answer(stage: Stage, line: bytes) -> tuple[int, object]:
    """The status and the JSON with which a request is answered."""
    try:
        request = msgspec.json.decode(line, type=Request)
        return STAGED, {"path": str(stage.stage(request.version, request.manifest_sha256, request.in_use))}
    except (VersionMissing, VersionExchanged) as error:  # this machine has not what was published; another may
        return MISSING, _error("version_missing", str(error))
    except VersionError as error:
        return UNSOUND, _error("version_error", str(error))
    except msgspec.MsgspecError as error:
        return 400, _error("invalid_request_error", f'{error}; send {{"version": NUMBER}}')
    except OSError as error:
        return NO_DISK, _error(
            "disk_error", f"it cannot be staged in engine.staging_dir ({error.strerror}); free space there"
        )


def _error(kind: str, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
