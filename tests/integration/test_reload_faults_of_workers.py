"""What goes wrong in a take-up, with several workers on two engines and streams in flight: all ends in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import httpx
import pytest

from shared.config import Config
from shared.ledger.connect import Ledger
from tests.support import take_up_faults
from tests.support.forms import FULL
from tests.support.house import House, Streams
from tests.support.processes import Process, wait_for, write_config
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import make_config, wait_until

WORKERS = 4
SETTINGS = {"poll_interval_s": 0.02, "drain_s": 1.0, "retry_s": 0.05, "timeout_s": 8.0}
LOCKED_S = 2.5  # longer than streams wait for the ledger, and shorter than explorers live without heartbeats
LONG_FORM = pytest.mark.skipif(not FULL, reason="a long form")
FAULTS = [  # in turn; what the version comes to
    ("failed_loads", "REJECTED"),
    ("wrong_probe_for", "REJECTED"),
    ("deadly_loads", "FAILED"),
    ("hung_loads", "FAILED"),
]
SHORT = ("failed_loads", "hung_loads")


@dataclasses.dataclass
class Workers:
    """An explorer of several processes, as tests ask one of a single process."""

    config: Config
    ledger: Ledger
    process: Process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.explorer.port}"

    @property
    def http(self) -> httpx.Client:
        """A new connection: the kernel gives it to any of the workers."""
        return httpx.Client(base_url=self.url, timeout=120, headers={"Connection": "close"})


@pytest.fixture(scope="module")
def ledger_timeout_s(request: pytest.FixtureRequest) -> float:
    return float(getattr(request, "param", 15.0))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, ledger_timeout_s: float) -> Iterator[House]:
    workers = WORKERS if FULL or ledger_timeout_s > LOCKED_S else 2
    folder = tmp_path_factory.mktemp("workers")
    engines = [ScriptedEngine(), ScriptedEngine()]
    urls = [engine.url for engine in engines]
    limits = {"ledger_timeout_s": ledger_timeout_s, "engine_wait_s": 60.0}
    config = make_config(folder, urls, workers=workers, reload=SETTINGS, **limits)
    ledger = Ledger.open(config.ledger_url)
    with Process(["explorer", "-c", str(write_config(config, folder / "f.yaml"))], folder / "log") as process:
        wait_for(lambda: process.output().count("listening") == workers, "the workers", 240)
        explorer = Workers(config, ledger, process)
        house = House([explorer, explorer], engines, asked=2 * workers)  # type: ignore[list-item]
        wait_for(lambda: explorer.http.get("/ready").status_code == 200, "service", 240)
        yield house.begin()
        assert process.stop(240) == 0
    assert "Traceback" not in process.output()
    ledger.close()
    for engine in engines:
        engine.stop()


def test_four_workers_give_up_a_version_as_one_and_the_last_good_one_serves(house):
    before = house.good()
    for fault, state in [one for one in FAULTS if FULL or one[0] in SHORT]:
        version = house.newest + 1
        for engine in house.engines:
            getattr(engine.script, fault).add(f"v{version:06d}")
        with Streams(house) as chats:
            house.publish(version)
            wait_until(lambda: house.state(version) == state, 120)  # noqa: B023
        house.all_serve(before)
        assert house.row(version).reason and house.row(version).served_at is None
        assert house.loads(version) <= 2
        chats.check_labels()
        if fault in ("failed_loads", "hung_loads"):
            assert len(chats.whole) == 8, chats.ended
    last = house.newest + 1
    with Streams(house) as chats:
        house.publish(last)
    house.all_serve(last)
    assert len(chats.whole) == 8 and not chats.ended, chats.ended
    chats.check_labels()


@LONG_FORM
@pytest.mark.parametrize("path", take_up_faults.CALLS)
def test_an_engine_that_is_killed_once_in_a_take_up_comes_back_and_takes_it_up(house, path):
    house.good()
    take_up_faults.kill_engine(house, path)


@LONG_FORM
def test_a_fault_of_a_folder_reaches_neither_an_engine_nor_a_stream(house):
    take_up_faults.give_up_folders(house, house.good())


@LONG_FORM
def test_a_folder_that_shows_late_is_taken_up_then(house, tmp_path):
    take_up_faults.wait_for_folder(house, house.good(), tmp_path / "late")


@LONG_FORM
def test_engines_whose_disk_is_full_serve_on_and_stage_the_version_when_there_is_room(house, monkeypatch):
    take_up_faults.fill_staging_disk(house, house.good(), monkeypatch)


@pytest.mark.parametrize("ledger_timeout_s", [LOCKED_S - 0.5], indirect=True)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=LONG_FORM) for path in ("/flywheel/stage", *take_up_faults.CALLS[:-1])]
    + [take_up_faults.CALLS[-1]],
)
def test_a_ledger_that_is_locked_in_a_take_up_delays_it(house, path):
    house.good()
    take_up_faults.lock_ledger(house, path, LOCKED_S)
