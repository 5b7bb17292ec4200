"""Training on an export: the updates of the trainer's loop on rows that no ledger holds, and one version at the end.

Nothing is published before all epochs are done: what a crash or a stop leaves is the root folder as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.errors import StartupError
from shared.experience import Experience
from shared.log import StageLogger
from shared.stop_request import StopRequest
from trainer_service.answers import answer_tokenizer
from trainer_service.errors import UpdateError
from trainer_service.export import batches_of
from trainer_service.loop import Trainer

log = StageLogger("train")


class OfflineTrainer(Trainer):
    """A trainer whose rows are an export's. Its versions and states are those of the trainer of its name."""

    def train(self, rows: list[Experience], epochs: int, stop: StopRequest, *, lasts: bool = True) -> int:
        """Train so many epochs and publish the result. Returns its version.

        lasts: whether the trainer of this name shall go on from it.

        Raises StartupError, with nothing published, when it is asked to stop before, an update fails or a token id
        is not the model's.
        """
        vocabulary, context = self._learner.vocabulary, self._learner.context
        _require_known_ids(rows, vocabulary)
        answers = answer_tokenizer(self._config.trainer, self._base_folder, vocabulary=vocabulary, context=context)
        rows = rows if answers is None else answers.with_corrections(rows)
        progress, done = self._progress, 0
        for epoch, of_epoch, number, batch in self._plan(rows, epochs):
            if stop:
                self._give_back_leases()
                raise StartupError("asked to stop before all epochs were done; nothing was published")
            try:
                stats = self._learner.train(batch, step=progress.step, version=progress.version, ahead=done)
            except UpdateError as exc:
                raise StartupError(f"epoch {epoch}, batch {number}: {exc}; nothing was published") from exc
            progress.step, progress.stats, done = progress.step + 1, stats, done + 1
            shown = {name: float(f"{stats[name]:.4g}") for name in ("rows", "reward_mean", "grad_norm", "seconds")}
            log.info("trained", epoch=f"{epoch}/{epochs}", batch=f"{number}/{of_epoch}", **shown)
        self._publish()
        if lasts:
            self._save_rest()
        self._give_back_leases()
        return self._progress.version

    def _plan(self, rows: list[Experience], epochs: int) -> Iterator[tuple[int, int, int, list[Experience]]]:
        """Each batch with its epoch, how many that has, and its number there."""
        for epoch in range(1, epochs + 1):
            batches = batches_of(rows, self._config, epoch)
            for number, batch in enumerate(batches, start=1):
                yield epoch, len(batches), number, batch


def _require_known_ids(rows: list[Experience], vocabulary: int) -> None:
    """Raise StartupError for a token id that the model does not know: the rows are another model's."""
    for row in rows:
        largest = max(int(row.tokens.prompt_ids.max()), int(row.tokens.reply_ids.max()))
        if largest >= vocabulary:
            raise StartupError(
                f"row {row.id}: the token id {largest} is outside of the model's vocabulary of {vocabulary}; set "
                "model.path to the model that the export is of"
            )
