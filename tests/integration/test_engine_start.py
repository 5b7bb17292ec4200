"""`flywheel engine` starts on the version that should serve, and never on one that nobody has proven."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from services.engine.launch import _start, command_line, environment, prepare_model, run_engine
from services.engine.lease import StartLease
from services.engine.output import EngineOutput
from services.engine.stage import Stage
from services.engine.warmup import WarmingEngine
from services.trainer import resumed
from shared.config import Config
from shared.errors import ConfigError, StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import version_leases, versions
from shared.soundness import require_sound
from shared.stop_request import StopRequest
from shared.versions import Manifest, version_path
from tests.support.batches import ALONE
from tests.support.deltas import FILES, Weights
from tests.support.processes import write_config
from tests.support.scripted_adapters import BASE, write_adapter
from tests.support.servers import free_port, make_config, safetensors, wait_until, write_scripted_version
from trainer_service.loop import Trainer


def start(
    root: Path, published: int, served: list[int], rejected: tuple[int, ...] = (), stage: Stage | None = None
) -> Path | None:
    """What an engine would start on, after these versions were published, and served in this order."""
    config = make_config(root, ["http://127.0.0.1:1"])
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger, ledger.write() as connection:
        for version in range(published):
            parent = version - 1 if version else None
            transitions.publish(connection, version=version, parent=parent, kind="full", step=version)
        for version in served:
            transitions.serve_version(connection, version, by="engine e0")
        for version in rejected:
            transitions.reject_version(connection, version, "a reason", by="engine e0")
    return prepare_model(config, StopRequest(), StartLease(config), stage)


def test_an_engine_for_adapters_starts_on_the_base_though_an_adapter_served_before_it_did(tmp_path):
    config = adapters_that_served_before_the_base(tmp_path)
    folder = prepare_model(config, StopRequest(), StartLease(config))
    assert folder is not None and folder.name == "v000000"


STARTS = """
import sys
from services.engine.launch import prepare_model
from services.engine.lease import StartLease
from shared.config.load import load_config
from shared.stop_request import StopRequest
config = load_config(sys.argv[1])
print(prepare_model(config, StopRequest(), StartLease(config)).name, "torch" in sys.modules)
"""


def test_an_engine_that_starts_again_imports_no_pytorch(tmp_path):
    config = adapters_that_served_before_the_base(tmp_path / "data")
    file = write_config(config, tmp_path / "flywheel.yaml")
    printed = subprocess.run([sys.executable, "-c", STARTS, str(file)], capture_output=True, text=True, check=True)
    assert printed.stdout == "v000000 False\n"


@pytest.mark.parametrize("state", ["SKIPPED", "FAILED"])
def test_an_engine_starts_on_a_base_that_the_ledger_holds_for_overtaken_or_failed(state, tmp_path):
    config = adapters_that_served_before_the_base(tmp_path)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger, ledger.write() as connection:
        connection.execute(update(versions).where(versions.c.version == 0).values(state=state))
    folder = prepare_model(config, StopRequest(), StartLease(config))
    assert folder is not None and folder.name == "v000000"


@pytest.mark.parametrize("damaged", [[2], [1, 2]])
def test_an_engine_for_adapters_starts_though_the_configuration_of_the_newest_ones_is_gone(damaged, tmp_path):
    config = adapters_that_served_before_the_base(tmp_path)
    write_adapter(tmp_path, 2)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger, ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="lora", step=2)
        assert transitions.serve_version(connection, 2, by="engine e0")
    for version in damaged:
        (tmp_path / version_path(version) / "adapter_config.json").unlink()
    folder = prepare_model(config, StopRequest(), StartLease(config))
    assert folder is not None and folder.name == "v000000"
    refusal = "version 2 cannot be trained from"  # with which a trainer would begin
    with pytest.raises(StartupError, match=refusal), resumed(config, ALONE, StopRequest(), Trainer):
        pass


def test_an_engine_is_not_started_for_another_rank_than_that_of_the_newest_adapter_that_can_be_read(tmp_path):
    config = adapters_that_served_before_the_base(tmp_path)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger, ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="lora", step=2)
    other = make_config(tmp_path, ["http://127.0.0.1:1"], model={"kind": "lora", "lora": {"rank": 4, "alpha": 4.0}})
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=4, and version 1 in"):
        prepare_model(other, StopRequest(), StartLease(other))
    assert prepare_model(config, StopRequest(), StartLease(config)) is not None


def adapters_that_served_before_the_base(root: Path) -> Config:
    """A ledger whose version 1, an adapter, an engine took up at once."""
    config = make_config(root, ["http://127.0.0.1:1"], model={"kind": "lora", "lora": {"rank": 2, "alpha": 4.0}})
    write_scripted_version(root, 0, -1.0, {"model.safetensors": safetensors(BASE)}, base="base")
    write_adapter(root, 1)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger, ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.publish(connection, version=1, parent=0, kind="lora", step=1)
        assert transitions.serve_version(connection, 1, by="engine e0")
    return config


@pytest.mark.parametrize(
    ("served", "rejected", "expected"),
    [
        ([], (), "v000000"),
        ([0, 1], (), "v000001"),
        ([0, 1, 2], (), "v000002"),
        ([0, 2, 1], (), "v000001"),
        ([0, 1, 2], (2,), "v000001"),
        ([0], (0,), None),
    ],
)
def test_an_engine_starts_on_what_should_serve_and_never_on_an_unproven_version(served, rejected, expected, tmp_path):
    for version in range(4):
        write_scripted_version(tmp_path, version, -1.0)
    if expected is None:
        with pytest.raises(StartupError, match="no proven version"):
            start(tmp_path, 4, served, rejected)
        return
    folder = start(tmp_path, 4, served, rejected)
    assert folder is not None and folder.name == expected


def test_an_engine_starts_on_a_version_that_an_operator_promoted(tmp_path):
    for version in range(3):
        write_scripted_version(tmp_path, version, -1.0)
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    start(tmp_path, 3, [0, 1, 2])
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger, ledger.write() as connection:
        transitions.share_traffic(connection, {1: 1.0}, at_most=1, by="operator")
    folder = prepare_model(config, StopRequest(), StartLease(config))
    assert folder is not None and folder.name == "v000001"


def test_an_engine_does_not_start_on_an_unsound_version(tmp_path):
    for version in range(3):
        write_scripted_version(tmp_path, version, -1.0)
    (tmp_path / "versions" / "v000002" / "pytorch_model.bin").touch()
    folder = start(tmp_path, 3, [0, 1, 2])
    assert folder is not None and folder.name == "v000001"


def test_an_engine_starts_on_a_delta_that_it_rebuilds_or_else_on_the_last_whole_version(tmp_path):
    weights = Weights(tmp_path)
    for version in range(3):
        weights.publish(version)
    stage = Stage(tmp_path, tmp_path / "staged", keep=2)
    folder = start(tmp_path, 3, [0, 1, 2], stage=stage)
    assert folder is not None and folder.is_relative_to(tmp_path / "staged") and (folder / FILES[0]).is_file()
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    whole = prepare_model(config, StopRequest(), StartLease(config))
    assert whole is not None and whole.name == "v000000"


def test_what_an_engine_starts_on_stays_leased_while_its_files_are_read_for_long(tmp_path, monkeypatch):
    write_scripted_version(tmp_path, 0, -1.0)
    start(tmp_path, 1, [0])
    config, read = make_config(tmp_path, [f"http://127.0.0.1:{free_port()}"]), []

    def until(ledger: Ledger) -> float:
        with ledger.read() as connection:
            return max(connection.execute(select(version_leases.c.until)).scalars())

    def read_for_long(*given: Any) -> Manifest:
        with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
            before = until(ledger)
            wait_until(lambda: until(ledger) > before)
        read.append(0)
        return require_sound(*given)

    monkeypatch.setattr("services.engine.lease._RENEW_S", 0.05)
    monkeypatch.setattr("services.engine.launch.require_sound", read_for_long)
    monkeypatch.setattr("services.engine.launch._run_vllm", lambda *_: 0)
    monkeypatch.setattr("services.engine.launch.adopt_orphans", lambda: None)
    monkeypatch.setattr(StopRequest, "listen", lambda self: self)
    assert run_engine(config, None) == 0
    assert read == [0]


HANGS = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        time.sleep(600)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_warm_up_that_hangs_ends_at_a_stop_request_and_at_the_limit_of_the_start(is_stopped, tmp_path, monkeypatch):
    monkeypatch.setattr("services.engine.launch.end", subprocess.Popen.kill)  # this process has other children
    stop, port = StopRequest(), free_port()
    with (
        subprocess.Popen([sys.executable, "-c", HANGS, f"{port}"], stdout=subprocess.PIPE) as process,
        WarmingEngine(f"http://127.0.0.1:{port}", "agent", "secret") as warming,
    ):
        output = EngineOutput(process.stdout, tmp_path / "vllm.log")
        wait_until(warming.is_healthy)
        monkeypatch.setattr(warming, "is_healthy", lambda: True)
        if is_stopped:
            stop.set()
            assert not _start(process, warming, stop, 600.0, output)
        else:
            with pytest.raises(StartupError, match=r"was not warm after 0.1 s; raise engine.start_timeout_s"):
                _start(process, warming, stop, 0.1, output)


def test_vllm_finds_our_gate_and_modules_of_the_working_folder_also_if_packages_there_have_names_of_ours(
    tmp_path, monkeypatch
):
    (tmp_path / "services").mkdir()
    for name in ("__init__.py", "engine.py"):
        (tmp_path / "services" / name).touch()
    (tmp_path / "of_a_user.py").touch()
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    command = command_line(config, config.explorer.engines[0], "127.0.0.1", tmp_path)
    python = [*command[: command.index("-m")], "-c", "import of_a_user, services.engine.gate"]
    subprocess.run(python, env={**os.environ, **environment(config)}, check=True)


ENDS = """
import subprocess, sys
from services.engine.ending import end

loads = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
serves = f'''
import signal, subprocess, sys
core = subprocess.Popen([sys.executable, "-c", {loads!r}])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(core.wait() + signal.SIGKILL))
signal.pause()
'''
process = subprocess.Popen([sys.executable, "-c", serves], stdout=subprocess.PIPE)
process.stdout.read(1)  # its core ignores SIGTERM now
end(process)
sys.exit(process.returncode)
"""


SHARES = """
import subprocess, sys, time
from pathlib import Path
from services.engine.ending import end

core = '''
import time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=16).name, flush=True)
time.sleep(600)
'''
serves = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {core!r}])"
process = subprocess.Popen([sys.executable, "-c", serves], stdout=subprocess.PIPE)
shared = Path("/dev/shm") / process.stdout.readline().decode().strip()
assert shared.is_file()
end(process)
while shared.exists():
    time.sleep(0.01)
"""


def test_vllm_s_shared_memory_is_removed_at_its_end():
    ended = subprocess.run([sys.executable, "-c", SHARES], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_vllm_that_still_loads_ends_at_once_because_its_core_is_killed():
    """It exits by itself: it is not killed at the limit."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
