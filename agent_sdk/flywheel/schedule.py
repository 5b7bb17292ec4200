"""The schedule of learn: starts of runs, commits, evaluations, and the end."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import asdict, dataclass, replace

from flywheel.config import LearnConfig
from flywheel.episode import Attempts
from flywheel.errors import Refused
from flywheel.evaluation import Trial, try_serving
from flywheel.feedback import send_all
from flywheel.pace import LAST_LOOK_S, Pacer
from flywheel.report import Evaluation, Report
from flywheel.tasks import NamedTask, shuffled
from flywheel.wire import get_ledger_made

_LAST_EVALUATION_S = 30.0  # how long the version for the last evaluation is awaited
_BREAK_OFF_S = 10.0  # how long runs in flight may take to finish after a failure


@dataclass(eq=False)
class _Group:
    """Runs of a task that are committed together."""

    task_id: str
    begun: int = 0  # number of started runs
    is_whole: bool = False  # no more of them will start
    ended: int = 0
    rows: int = 0


class Learning:
    """One call of learn, with the state that its parts share."""

    def __init__(
        self, how: LearnConfig, attempts: Attempts, trial: Trial, pacer: Pacer, eval_tasks: list[NamedTask]
    ) -> None:
        self.how = how
        self.attempts = attempts
        self.pacer = pacer
        self.stopping = asyncio.Event()
        self.report = Report(name=how.name)
        self.planned = 0
        self._trial = trial
        self._eval_tasks = eval_tasks
        self._evaluated: int | None = -1  # version; -1: none yet
        self._slots = asyncio.Semaphore(how.at_once)
        self._running: set[asyncio.Task[None]] = set()
        self._open: list[_Group] = []  # not committed yet
        self._error: BaseException | None = None
        self._evaluation: asyncio.Task[Evaluation] | None = None  # the running one

    def interrupt(self) -> None:
        """Start nothing more, and end a running evaluation without a result."""
        self.report.stopped = "interrupted"
        self.stopping.set()
        if self._evaluation is not None:
            self._evaluation.cancel()

    def end(self, reason: str) -> None:
        """Start nothing more, and finish what runs, unless learn is stopping already."""
        if not self.stopping.is_set():
            self.report.stopped = reason
            self.stopping.set()

    async def go(self, tasks: list[NamedTask]) -> None:
        """Run everything that is not in the journal. Raises LearnError, and errors of the explorer."""
        try:
            if self.attempts.journal.ledger is not None:
                await self._check_ledger()  # before anything is sent
            await self._send_again()
            await self.pacer.until_served(self.stopping)
            await self._check_ledger()
            if self.stopping.is_set():
                return
            await self._evaluate()
            for epoch in range(self.how.epochs):
                for task in shuffled(tasks, self.how.seed, epoch):
                    if self.stopping.is_set():
                        break
                    await self._group(task, f"{self.how.name}/{epoch}/{task.digest}")
            await self._until_ended()
            self._raise_error()
            for group in [one for one in self._open if one.ended]:  # the rest of the group was not started
                await self._commit(group)
            await self._evaluate()
        except asyncio.CancelledError:
            self.report.stopped = "interrupted"
            raise
        finally:
            try:
                await self._drain(_BREAK_OFF_S)
            finally:  # also if learn is cancelled once more meanwhile
                await self._break_off()

    async def _check_ledger(self) -> None:
        """Note in which ledger the runs are. Raises JournalMismatch if those of earlier starts are in another one."""
        client = self.attempts.client
        asking = client.drive(get_ledger_made(client.explorer.retry_s))
        made = await self.pacer.unless_stopped(self.stopping, asking)
        self.attempts.journal.check_ledger(made, client.explorer.shown_url)

    async def _send_again(self) -> None:
        """Send feedback again that an earlier start may not have sent; its keys are the same, so it counts once.

        A run whose feedback is invalid, such as a reward that the explorer does not accept, is made again.
        """
        client, journal = self.attempts.client, self.attempts.journal
        for place, line in list(journal.unsent.items()):
            # if no target is known, its rows have expired, or the ledger was emptied, and nothing can be rewarded
            try:
                sending = client.drive(send_all(line["feedback"], client.explorer.retry_s))
                if await self.pacer.unless_stopped(self.stopping, sending) is None:
                    return  # a later start sends it
                journal.note({"kind": "sent", "place": place})
            except Refused as exc:
                if exc.status not in (400, 413):
                    raise
                journal.ended.discard(place)
                await journal.write({"kind": "void", "place": place})

    async def _group(self, task: NamedTask, task_id: str) -> None:
        """Start those runs of a task that are not in the journal, together; they are committed together."""
        journal = self.attempts.journal
        missing = [n for n in range(self.how.runs_per_task) if f"{task_id}#{n}" not in journal.ended]
        group = _Group(task_id)
        if not missing:
            if task_id in journal.uncommitted:
                await self._commit(group)
            return
        await self.pacer.wait(self.stopping, len(missing))
        await self._evaluate_when_due()
        self._open.append(group)
        for number in missing:
            await self._slots.acquire()
            self._raise_error()
            await self._end_when_learned()
            if self.stopping.is_set():
                return
            self.pacer.starts()
            group.begun += 1
            job = asyncio.create_task(self._run(task, group, number))
            self._running.add(job)
            job.add_done_callback(self._ended)
        group.is_whole = True

    async def _run(self, task: NamedTask, group: _Group, number: int) -> None:
        try:
            rows = await self.attempts.run(task, group.task_id, number, self._until_served)
        finally:
            self._slots.release()
        if rows is None:  # learn is stopping; a group without a run that ended is not committed
            return
        group.rows += rows
        group.ended += 1
        self.attempts.failures.check()
        if group.ended == group.begun and group.is_whole:
            await self._commit(group)

    async def _until_served(self) -> bool:
        """Wait for an engine after a chat that none answered. Returns False if learn is stopping."""
        await self.pacer.until_served_again(self.stopping)
        return not self.stopping.is_set()

    async def _commit(self, group: _Group) -> None:
        said = await self.attempts.client.commit(task_id=group.task_id)
        self.attempts.journal.note({"kind": "committed", "task_id": group.task_id})
        self.pacer.committed(group.begun, group.rows, said)
        if group in self._open:
            self._open.remove(group)

    def _ended(self, job: asyncio.Task[None]) -> None:
        self._running.discard(job)
        if not job.cancelled() and job.exception() is not None and self._error is None:
            self._error = job.exception()
            self.stopping.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            self.report.stopped = f"failed: {type(self._error).__name__}"
            raise self._error

    async def _until_ended(self) -> None:
        """Wait for the runs in flight; after a stop, at most as long as a run may take."""
        stop = asyncio.create_task(self.stopping.wait())
        while self._running and not self.stopping.is_set():
            await asyncio.wait({*self._running, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        await self._drain(self.how.timeout_s)

    async def _drain(self, seconds: float) -> None:
        """Wait for running runs, after an error only briefly. Those that do not end in time fail, without a reward."""
        began = time.monotonic()
        while self._running:
            limit_s = seconds if self._error is None else min(seconds, _BREAK_OFF_S)
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.wait(self._running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        await self._break_off()

    async def _break_off(self) -> None:
        """Cancel running runs."""
        late = list(self._running)
        for job in late:
            job.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _evaluate_when_due(self) -> None:
        version = await self.pacer.version(self.stopping)
        if version is not None and version >= max(0, self._evaluated or 0) + self.how.eval_every_versions:
            await self._evaluate()

    async def _serving(self) -> int | None:
        """Return the version in service; the last known one if learn is stopping first. Raises Away, Unreachable."""
        status = await self.pacer.unless_stopped(self.stopping, self.attempts.client.status())
        return await self.pacer.version(self.stopping, 0.0) if status is None else status.serving

    async def _end_when_learned(self) -> None:
        wanted = self.how.versions
        version = None if wanted is None else await self.pacer.version(self.stopping)
        if wanted is not None and version is not None and version >= (self.report.version_first or 0) + wanted:
            self.end("versions")

    async def _evaluate(self) -> None:
        """Evaluate the version in service, unless it was evaluated before, or learn was interrupted."""
        is_over = self.stopping.is_set() and self.report.stopped not in ("time", "versions")
        version = await self.pacer.version(self.stopping, 0.0, LAST_LOOK_S if is_over else _LAST_EVALUATION_S)
        if self.report.version_first is None:
            self.report.version_first = version
        self.report.version_last = version
        if not self._eval_tasks or version == self._evaluated or is_over:
            return
        job = asyncio.create_task(try_serving(self.attempts.client, self._trial, self._eval_tasks, self._serving))
        self._evaluation = job
        try:
            await asyncio.wait({job})
        finally:
            self._evaluation = None
            job.cancel()
        if job.cancelled():
            return
        found = replace(job.result(), after_runs=len(self.attempts.journal.ended) + self.attempts.counted)
        self._evaluated = self.report.version_last = found.version
        if self.how.progress:
            erase = "\r\x1b[K" if sys.stderr.isatty() else ""
            sys.stderr.write(f"{erase}{_evaluation_line(found)}\n")
        self.report.evaluations.append(found)
        self.attempts.journal.note({"kind": "evaluation", "result": asdict(found)})
        stop = self.how.stop
        if stop is not None and stop.says_stop([one.mean for one in self.report.evaluations if one.n]):
            self.end("early")


def _evaluation_line(found: Evaluation) -> str:
    """Format an evaluation on one line, with the most frequent cause of failures."""
    failed = f", {found.failed} failed" if found.failed else ""
    cause = f", such as {found.main_failure}" if found.failures else ""
    return f"version {found.version}: {found.mean:.3f} ± {found.standard_error:.3f} over {found.n} runs{failed}{cause}"


def _share_done(learning: Learning) -> float:
    """Return the share of the runs, or of the versions, that is done; at least that of the first one."""
    runs = max(1, learning.attempts.counted) / max(1, learning.planned)
    status, wanted = learning.pacer.status, learning.how.versions
    if wanted is None or status is None:
        return runs
    made = (status.serving or 0) - (learning.report.version_first or 0)
    return max(runs, max(1, made) / wanted)


async def show(learning: Learning) -> None:
    """Show progress: one line on a terminal, or else one every ten seconds."""
    live, began = sys.stderr.isatty(), time.monotonic()
    while True:
        await asyncio.sleep(1.0 if live else 10.0)
        done, seconds = learning.attempts.counted, time.monotonic() - began
        left_s = min(seconds / _share_done(learning), learning.how.seconds or math.inf) - seconds
        status = learning.pacer.status
        planned = "" if learning.how.seconds or learning.how.versions else f"/{learning.planned}"
        line = (
            f"{learning.how.name}: {done}{planned} runs, {done / seconds:.1f}/s, version "
            f"{status.serving if status else '?'}, ready {status.ready if status else '?'}, "
            f"failed {sum(learning.attempts.failures.causes.values())}, {max(0.0, left_s) / 60:.1f} min to go"
        )
        line += "" if status is None or status.has_engine else "; no engine is in service"
        sys.stderr.write(f"\r\x1b[K{line}" if live else f"{line}\n")
        sys.stderr.flush()
