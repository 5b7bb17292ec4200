"""The tables of docs/trinity.md, from the tables that `flywheel convert-config` uses."""

from __future__ import annotations

from collections.abc import Iterator

from services.trinity.algorithms import TRINITY, TRL, Algorithm
from services.trinity.key import Key
from services.trinity.table import KEYS
from services.trinity.takes_trainer import ESTIMATORS, STAND_IN


def tables() -> dict[str, str]:
    """Return each table in Markdown, by the name of its markers in the page."""
    return {
        "keys": "\n".join(["| Trinity | Flywheel | |", "|---|---|---|", *map(_key_row, KEYS)]),
        "algorithms": _algorithms("algorithm_type", TRINITY),
        "trl": _algorithms("TRL 1.16", TRL),
        "kl": "\n".join(["| Trinity | in the reward | in the loss |", "|---|---|---|", *map(_kl_row, ESTIMATORS)]),
    }


def fill(page: str) -> str:
    """Return the page with up-to-date tables."""
    for name, text in tables().items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}"
    return page


def _key_row(key: Key) -> str:
    ours = f"`{key.to}`" if key.to else "not needed" if key.off is None else "no counterpart"
    off = ", ".join(f"`{value}`".lower() for value in key.off or () if value not in ("", {}, [], None))
    remarks = (key.note, off and f"not needed with {off}", "changes training" if key.changes_training else "")
    return f"| `{key.names}` | {ours} | {'; '.join(filter(None, remarks))} |"


def _kl_row(theirs: str) -> str:
    ours = (ESTIMATORS[theirs].get(where) for where in ("reward", "loss"))
    cells = (f"`{name}`" if name else f"`{STAND_IN}`, and training changes" for name in ours)
    return f"| `{theirs}` | {' | '.join(cells)} |"


def _algorithms(theirs: str, table: dict[str, Algorithm]) -> str:
    return "\n".join([f"| {theirs} | Flywheel | |", "|---|---|---|", *_algorithm_rows(table)])


def _algorithm_rows(table: dict[str, Algorithm]) -> Iterator[str]:
    for name, found in table.items():
        ours = f"`{found.ours}`" if found.ours else "no counterpart"
        yield f"| `{name}` | {ours} | {found.note} |"
