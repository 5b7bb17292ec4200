"""compose's PostgreSQL: Flywheel's role needs no superuser, and is none."""

from __future__ import annotations

import os
import subprocess

import psycopg
import pytest
import yaml

from shared.config import ledger_url
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import ledger_status
from tests.support.postgres import Postgres
from tests.support.processes import REPOSITORY


def test_the_ledger_works_under_the_role_that_compose_makes(postgres: Postgres):
    server = ["-h", "127.0.0.1", "-p", str(postgres.port), "-v", "ON_ERROR_STOP=1", "-q"]
    file = REPOSITORY / "deploy" / "compose" / "postgres.sql"
    assert not is_healthy(postgres)  # as of a server whose first start could not read the file
    ended = subprocess.run(
        [postgres.binaries / "psql", *server, "-U", "postgres", "-d", "postgres", "-f", file],
        env={**os.environ, "POSTGRES_PASSWORD": "it's $secret"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert is_healthy(postgres)
    url = f"postgresql://flywheel:it%27s%20%24secret@127.0.0.1:{postgres.port}"
    ledger = Ledger.open(ledger_url(f"{url}/flywheel"))
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
    with ledger.read() as connection:
        assert ledger_status(connection)["versions"]["newest"] == 0
    ledger.close()
    with psycopg.connect(f"{url}/flywheel") as connection:
        row = connection.execute("SELECT rolsuper, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = 'flywheel'")
        assert row.fetchone() == (False, False, False)
    with pytest.raises(psycopg.OperationalError, match="permission denied"):
        psycopg.connect(f"{url}/postgres")


def is_healthy(postgres: Postgres) -> bool:
    """What compose's health check says of this server."""
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    kind, program, *arguments = services["postgres"]["healthcheck"]["test"]
    assert kind == "CMD"
    command = [postgres.binaries / program, *arguments, "-p", str(postgres.port)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
