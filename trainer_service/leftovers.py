"""Deletes what a crash left in the root folder: versions and states that the ledger does not contain.

One crash leaves at most one version folder and one state, of the number that the trainer had reserved, or the folder of
the base model, whose number is not reserved. More unknown folders mean that the ledger is another one, or an older
copy; then nothing is deleted. Folders that other trainers are writing are kept.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from shared.belonging import REMEDY, in_short, require_belonging, version_folders, version_number
from shared.errors import StartupError
from shared.experience import VersionState
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import TrainerRow, find_trainer, list_states, list_versions
from shared.versions import remove_temporary_versions, temporary_versions, version_path
from trainer_service.resume import state_path


def remove_leftovers(root: Path, ledger: Ledger, trainer: str) -> TrainerRow | None:
    """Delete a version folder that a crash left without a row, and withdraw versions without a saved state.

    Returns this trainer's row.

    Raises StartupError, and deletes nothing, if more is unknown than one crash leaves, the folder is another ledger's,
    or the saved state is missing.
    """
    require_belonging(root, ledger)
    # listed before the ledger is read: a trainer reserves a number before it writes that folder
    folders, temporary = version_folders(root), temporary_versions(root)
    with ledger.read() as connection:
        row, rows = find_trainer(connection, trainer), list_versions(connection)
        kept = [state.path for state in list_states(connection, trainer)]
    reserved = {row.version: row.writer for row in rows if row.state == VersionState.RESERVED}
    # a crash may leave the state of a reserved or published version, or interrupt the deletion of states
    written = [state_path(trainer, one.version) for one in rows if one.writer == trainer]
    _require_known_states(root, ledger, trainer, row, [*kept, *written])
    remove_temporary_versions(temporary, keep={number for number, writer in reserved.items() if writer != trainer})
    own = [root / version_path(number) for number, writer in reserved.items() if writer == trainer]
    highest = rows[-1].version if rows else -1
    for folder in [*own, *(folder for folder in folders if version_number(folder) > highest)]:
        shutil.rmtree(folder, ignore_errors=True)
    if row is not None:
        with ledger.write() as connection:
            transitions.withdraw_versions(connection, writer=trainer, after=row.version)
    return row


def _require_known_states(root: Path, ledger: Ledger, trainer: str, row: TrainerRow | None, known: list[str]) -> None:
    folder, named = root / "trainer" / trainer, row.state_path if row else None
    states = {str(state.relative_to(root)) for state in folder.glob("state-*")}
    if named is not None and named not in states:
        found = in_short([Path(state).name for state in states]) if states else "no state"
        raise StartupError(
            f"the ledger {ledger.shown_url} names the state {Path(named).name} of trainer {trainer!r}, but {folder} "
            f"holds {found}; restore the state, or the ledger that belongs to this root_dir; nothing was deleted"
        )
    unknown = states - ({named, *known} if row else set())  # a trainer is announced before it saves a state
    if unknown:
        raise StartupError(
            f"{folder} holds {in_short([Path(state).name for state in unknown])}, which no row of the ledger "
            f"{ledger.shown_url} names; {REMEDY}"
        )
