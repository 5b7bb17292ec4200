"""Training on an export: the updates of the trainer's loop on rows from a file, and one version at the end.

Nothing is published before all epochs are done: a crash or a stop leaves the root folder unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from shared.errors import StartupError
from shared.experience import Experience
from shared.ledger import queries
from shared.log import StageLogger
from shared.stop_request import StopRequest
from trainer_service.answers import answer_tokenizer
from trainer_service.errors import Stopped, UpdateError
from trainer_service.export import batches_of, counted, learns_from
from trainer_service.heartbeat import Heartbeat
from trainer_service.loop import Trainer
from trainer_service.watch.record import Record, count_signals

log = StageLogger("train")
# Not checked: a file's version numbers may be those of another root folder, and the ledger's rewards were given before
_UNCHECKED = ("logprob_gap", "outside_cut", "reward_drop")
_LEFT_OUT = ("hints_contradicting", "hints_without_effect")  # figures of the algorithms


class OfflineTrainer(Trainer):
    """A trainer on the rows of an export. Its versions and states are those of the trainer of its name."""

    def train(self, rows: list[Experience], epochs: int, stop: StopRequest) -> int:
        """Train for this number of epochs and publish the result. Returns its version.

        Publishes nothing if it raises: Stopped after a stop request; StartupError if an update fails or crosses a bound
        of the breaker, the breaker has tripped before, no update changes a weight, or a token id is not in the model's
        vocabulary.
        """
        beats = Heartbeat(self._ledger, self._config.trainer, stop, self._janitor.note_contact)
        try:
            with beats:  # others see that this trainer is alive
                self._breaker.require_free()
                rows = self._require_known(rows)
                self._update_all(rows, epochs, stop)
                self._progress.trained_on = self._write(partial(queries.ids_read, rows=rows))
                self._publish()
        finally:
            self._release_leases()
        return self._progress.version

    def _require_known(self, rows: list[Experience]) -> list[Experience]:
        """Return the rows that the model can read, with tokenized corrections.

        Raises StartupError for a token id that the model lacks, and if no row fits its context.
        """
        settings, vocabulary, context = self._config.trainer, self._learner.vocabulary, self._learner.context
        _require_known_ids(rows, vocabulary)
        if settings.rehearse:
            about = {"key": "trainer.rehearse", "value": settings.rehearse}
            log.warning("has no effect", **about, reason="a file is read as often as --epochs says")
        answers = answer_tokenizer(settings, self._base_folder, vocabulary=vocabulary, context=context)
        if answers is not None:  # before rows are left out: a correction of a whole is about its last reply
            rows = answers.with_corrections(rows)
        if settings.max_trajectory_tokens is None and context is not None:  # else longer rows were not read
            rows = within_context(rows, context)
        return rows

    def _update_all(self, rows: list[Experience], epochs: int, stop: StopRequest) -> None:
        """Run all updates of all epochs. Raises StartupError and Stopped."""
        changed, left_out = False, Counter[str]()
        for done, (epoch, of_epoch, number, batch) in enumerate(self._plan(rows, epochs)):
            if stop:
                raise Stopped
            try:
                record = self._update(batch, ahead=done)
            except UpdateError as exc:
                raise StartupError(f"epoch {epoch}, batch {number}: {exc}; nothing was published") from exc
            figures, trip = record.figures, self._breaker.check(record, without=_UNCHECKED)
            shown = {n: float(f"{figures[n]:.4g}") for n in ("rows", "reward_mean", "grad_norm") if n in figures}
            log.info("trained", epoch=f"{epoch}/{epochs}", batch=f"{number}/{of_epoch}", **shown)
            self._watch.write(record)
            if trip is not None:
                raise StartupError(f"epoch {epoch}, batch {number}: {trip.found}; nothing was published")
            changed |= figures["grad_norm"] > 0
            left_out.update({_short(name): int(n) for name, n in figures.items() if n and _is_reason(name)})
        if not changed:
            raise StartupError(self._no_change_message(rows, left_out))

    def _update(self, batch: list[Experience], ahead: int) -> Record:
        """Run one update like the loop does. Raises UpdateError and Stopped."""
        progress, batch = self._progress, self._learner.prepare(batch)
        progress.stats = self._learner.train(batch, step=progress.step, version=progress.version, ahead=ahead)
        progress.step += 1
        return self._measured(batch)

    def _no_change_message(self, rows: list[Experience], left_out: Counter[str]) -> str:
        reasons = f" ({counted(left_out)})" if left_out else ""
        return (
            f"no update changed a weight: nothing was published; the rows have {counted(count_signals(rows))}, and "
            f"{learns_from(self._config.trainer)}{reasons}; choose another trainer.algorithm, or other rows"
        )

    def _plan(self, rows: list[Experience], epochs: int) -> Iterator[tuple[int, int, int, list[Experience]]]:
        """Yield each batch with its epoch, the epoch's number of batches, and its number there."""
        for epoch in range(1, epochs + 1):
            batches = batches_of(rows, self._config, epoch)
            for number, batch in enumerate(batches, start=1):
                yield epoch, len(batches), number, batch


def _is_reason(figure: str) -> bool:
    """Whether a figure counts what an algorithm left out for some reason."""
    return "unused/" in figure or _short(figure) in _LEFT_OUT


def _short(figure: str) -> str:
    return figure.rpartition("/")[2]


def within_context(rows: list[Experience], context: int) -> list[Experience]:
    """Return the rows of at most `context` tokens, as a trainer claims them. Raises StartupError if there are none."""
    fitting = [row for row in rows if row.tokens.prompt_ids.size + row.tokens.reply_ids.size <= context]
    if not fitting:
        raise StartupError(f"every row is longer than the model's context of {context} tokens; export shorter ones")
    if len(fitting) < len(rows):
        log.warning("rows left out: longer than the model's context", rows=len(rows) - len(fitting), tokens=context)
    return fitting


def _require_known_ids(rows: list[Experience], vocabulary: int) -> None:
    """Raise StartupError for a token id that the model does not have: the rows belong to another model.

    The replies that the rows are preferred over are read, too.
    """
    for row in rows:
        others = ((f"reply {other.name}", other.tokens) for other in row.preferred_over)
        for name, tokens in ((f"row {row.id}", row.tokens), *others):
            largest = max(int(tokens.prompt_ids.max()), int(tokens.reply_ids.max()))
            if largest >= vocabulary:
                raise StartupError(
                    f"{name}: the token id {largest} is outside of the model's vocabulary of {vocabulary}; set "
                    "model.path to the model that the export is of"
                )
