"""What the ledger's code promises about itself: writes in transitions, states and columns declared once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shared.experience import BatchState, Experience, Sample, Sampling, State, VersionState
from shared.ledger.tables import experiences, metadata

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "shared" / "ledger"
PRODUCT = ("shared", "explorer_service", "trainer_service", "services")
WRITES = {"insert", "update", "delete"}
WRITES_NO_STATE = {"prefix.py", "migrate.py"}  # how tokens are stored, and whole tables


def product_files() -> Iterator[Path]:
    for folder in PRODUCT:
        for file in (ROOT / folder).rglob("*.py"):
            if "migrations" not in file.parts:
                yield file


def test_only_transitions_write_to_the_ledger():
    may_write = {LEDGER / name for name in WRITES_NO_STATE} | set((LEDGER / "transitions").iterdir())
    writing = {
        file.relative_to(ROOT)
        for file in product_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if file not in may_write and isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sqlalchemy")
        if WRITES & {alias.name for alias in node.names}
    }
    assert not writing


def test_states_are_written_as_the_enums_that_declare_them():
    states = {*State, *VersionState, *BatchState}
    bare = {
        (file.relative_to(ROOT), node.lineno)
        for file in product_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in states and file != ROOT / "shared" / "experience.py"
    }
    assert not bare


def test_every_column_that_a_sample_brings_is_stored_and_read_by_its_name():
    columns = set(experiences.c.keys())
    not_columns = {"tokens", "sampling", "request", "reply", "quarantine", "extends"}  # payloads, and what is computed
    assert set(Sample.__dataclass_fields__) - columns == not_columns
    assert set(Sampling.__dataclass_fields__) <= columns
    computed = {"tokens", "sampling", "signals", "preferred_over", "correction", "hint", "teacher", "unused"}
    computed |= {"correction_key", "hint_key", "is_rehearsal"}
    assert set(Experience.__dataclass_fields__) - columns == computed


def test_the_page_of_the_ledger_names_every_table_and_columns_that_exist():
    text = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)
    assert {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)} == set(metadata.tables)
    columns = {f"{table.name}.{column.name}" for table in metadata.tables.values() for column in table.columns}
    named = {f"{table}.{column}" for table, column in re.findall(r"`(\w+)\.(\w+)`", text)}
    assert {name for name in named if name.partition(".")[0] in metadata.tables} <= columns
