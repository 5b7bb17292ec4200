"""A start that may be on the wrong ledger, and that nothing contradicts: the log names the ledger."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest

from services.explorer import run_explorer
from shared.belonging import require_belonging
from shared.config import Config
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from tests.support.postgres import sqlite_alone
from tests.support.servers import make_config, write_scripted_version

database_url = sqlite_alone  # nothing here depends on the database


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "flywheel")
    return caplog


def open_empty(config: Config) -> contextlib.closing[Ledger]:
    """Open a database without tables."""
    (config.root / "ledger.sqlite3").touch()  # without it, tests get a copy of a ledger
    return contextlib.closing(Ledger.open(config.ledger_url))


def test_the_log_names_a_ledger_that_begins_without_a_warning_at_a_first_start(tmp_path, lines):
    config = make_config(tmp_path, ["http://e0"])
    with open_empty(config) as ledger:
        require_belonging(tmp_path, ledger)
    (record,) = lines.records
    assert record.levelname == "INFO"
    assert "a new ledger begins" in record.getMessage() and f"{tmp_path}/ledger.sqlite3" in record.getMessage()


def test_a_ledger_that_is_opened_again_does_not_begin(tmp_path, lines):
    config = make_config(tmp_path, ["http://e0"])
    open_empty(config).thing.close()
    lines.clear()
    Ledger.open(config.ledger_url).close()
    assert not lines.records


def test_a_ledger_without_versions_beside_a_folder_that_has_version_0_is_a_warning(tmp_path, lines):
    config = make_config(tmp_path, ["http://e0"])
    write_scripted_version(tmp_path, 0, -1.0)
    with open_empty(config) as ledger:
        for _ in range(2):  # at each start, until it is corrected
            lines.clear()
            require_belonging(tmp_path, ledger)
            (warning,) = [record.getMessage() for record in lines.records if record.levelname == "WARNING"]
            assert f"{tmp_path}/versions" in warning and f"{tmp_path}/ledger.sqlite3" in warning
            assert "root_dir" in warning and "FLYWHEEL_DATABASE_URL" in warning
        with ledger.write() as connection:
            transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        lines.clear()
        require_belonging(tmp_path, ledger)
        assert not lines.records


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("10.0.0.2", True)])
def test_an_explorer_on_sqlite_warns_if_its_engines_are_on_other_machines(
    host: str, warned: bool, tmp_path: Path, capsys
):
    config = make_config(tmp_path, ["http://127.0.0.1:1", f"http://{host}:8101"], workers=2)
    assert run_explorer(config, tmp_path / "flywheel.yaml") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "the ledger is SQLite" in line]
    assert len(said) == warned and all("WARNING" in line and "engines=e1" in line for line in said)
