"""A wrong host, database, file or folder is one line that says what to correct, also where the output is closed."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import psycopg
import pytest

from services.cli import main
from shared.config import load_config
from shared.errors import ConfigError, LedgerError, StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.row_files import replace_whole
from shared.ports import require_free_port
from tests.support.processes import REPOSITORY, environment, run_here, write_config
from tests.support.servers import make_config


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_command_whose_output_is_closed_does_its_work(closed):
    command = ["sh", "-c", f"exec {sys.executable} -m services.cli demo --list {closed}"]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, timeout=240, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_an_error_does_not_go_to_the_output_when_stderr_is_closed():
    command = ["sh", "-c", f"exec {sys.executable} -m services.cli status -c none.yaml 2>&-"]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout) == (2, b"")


def line_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    before = os.umask(0o077)
    try:
        assert main(arguments) in (1, 2)
    finally:
        os.umask(before)
    line = capsys.readouterr().err
    assert line.startswith("flywheel: ") and line.count("\n") == 1
    return line


def test_a_name_that_is_too_long_is_one_line(tmp_path, capsys):
    file = tmp_path / "f.yaml"
    file.write_text(f"root_dir: {'d' * 300}\nmodel: {{path: x}}")
    assert f"{os.strerror(errno.ENAMETOOLONG)}; choose a shorter name" in line_of(capsys, "status", "-c", str(file))


def test_a_file_that_cannot_be_written_is_named_without_an_option_that_archive_lacks(tmp_path):
    with pytest.raises(StartupError, match=r"rows.jsonl cannot be written \(No such file or directory\); choose anoth"):
        replace_whole(tmp_path / "none" / "rows.jsonl", [])


def test_a_model_is_not_exported_into_a_file(tmp_path, capsys):
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    ledger = Ledger.open(config.ledger_url)
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
    ledger.close()
    (tmp_path / "file").touch()
    target = ["--version", "0", "--to", str(tmp_path / "file/model")]
    line = line_of(capsys, "export-model", "-c", str(write_config(config, tmp_path / "f.yaml")), *target)
    assert f"{tmp_path}/file: {os.strerror(errno.EEXIST)}; choose another name" in line


@pytest.mark.parametrize("host", ["127.0.0..1", "192.0.2.1", "localhost:8010"])
def test_an_address_that_is_not_of_this_machine_is_to_be_corrected(host):
    with pytest.raises(StartupError, match=r"\); correct explorer\.host or explorer\.port$"):
        require_free_port(host, 8010, "explorer.host or explorer.port")


def test_what_holds_a_port_is_to_be_ended():
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(StartupError, match="end what holds the port"):
        require_free_port("127.0.0.1", holder.getsockname()[1], "explorer.host or explorer.port")


@pytest.mark.parametrize("url", ["http://engine..lan:8101", f"http://{'e' * 64}.lan:8101"])
def test_an_engine_at_no_host_name_is_refused(url, tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text(f"model: {{path: x}}\nexplorer: {{engines: [{{name: e0, url: '{url}'}}]}}")
    with pytest.raises(ConfigError, match=r"explorer.engines 'e0': the url's host or port is none; correct it"):
        load_config(file, {})


def test_a_database_at_no_host_name_is_refused():
    with pytest.raises(LedgerError, match=r"its host is no host name.*correct database_url"):
        Ledger.open("postgresql+psycopg://db..lan/flywheel")


@pytest.mark.parametrize("url", ["sqlite:///", "sqlite:///:memory:", "sqlite:///x.sqlite3?timeout=abc"])
def test_an_sqlite_url_names_a_file_and_nothing_else(url, tmp_path):
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    Ledger.open(config.ledger_url).close()
    with pytest.raises(ConfigError, match=r"--to: .*sqlite:///FILE"):
        run_here(config, "migrate", "--to", url)


def test_a_ledger_is_not_copied_into_itself(tmp_path, monkeypatch):
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    Ledger.open(config.ledger_url).close()
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///ledger.sqlite3", f"sqlite:///{tmp_path}/ledger.sqlite3"):
        with pytest.raises(ConfigError, match="--to names the ledger that is to be copied; name an empty database"):
            run_here(config, "migrate", "--to", url)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LocalHost"])
def test_a_ledger_on_postgresql_is_not_copied_into_itself(postgres, tmp_path, host):
    """So a backup is not taken for restored while database_url names the new, empty ledger."""
    url = postgres.new_ledger()
    config = make_config(tmp_path, ["http://127.0.0.1:1"], database_url=url)
    again = url.replace("127.0.0.1", host).replace("postgresql:", "postgres:") + "?application_name=x"
    with pytest.raises(
        ConfigError, match=r"--to names the ledger .*; name an empty database, or .*DATABASE_URL=sqlite"
    ):
        run_here(config, "migrate", "--to", again)


def test_a_ledger_without_rows_is_not_reported_as_copied(tmp_path, capsys):
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    Ledger.open(config.ledger_url).close()
    with pytest.raises(StartupError, match=r"ledger\.sqlite3 holds no rows, so nothing was copied; .*database_url"):
        run_here(config, "migrate", "--to", f"sqlite:///{tmp_path}/there.sqlite3")
    assert "verified" not in capsys.readouterr().out


def test_a_right_that_a_user_of_the_database_lacks_is_to_be_granted(postgres, tmp_path):
    url = postgres.new_ledger()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
    config = make_config(tmp_path, ["http://127.0.0.1:1"], database_url=url.replace("postgres@", "reader@"))
    assert run_here(config, "status") == 0
    with pytest.raises(LedgerError, match=r"\(permission denied for table .*\); grant its user that right$"):
        run_here(config, "erase", "--task", "t")


@pytest.mark.parametrize("wrong", ["user", "database"])
def test_a_user_or_database_that_does_not_exist_is_to_be_created(wrong, postgres):
    url = postgres.new_database().replace("postgresql:", "postgresql+psycopg:")
    url = url.replace("postgres@", "nobody@") if wrong == "user" else f"{url}-2"
    with pytest.raises(LedgerError, match=r"does not exist\); create it, or correct database_url$"):
        Ledger.open(url)
