"""learn: runs a workflow on tasks, sends the rewards, adapts to the trainer's pace, and can resume after kill -9."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from flywheel.async_client import AsyncClient
from flywheel.config import LearnConfig
from flywheel.episode import Attempts, Failures
from flywheel.errors import JournalMismatch
from flywheel.evaluation import Trial
from flywheel.journal import Journal
from flywheel.loops import CtrlC, run_alone
from flywheel.pace import Pacer
from flywheel.report import Evaluation, Report, summarize
from flywheel.schedule import Learning, show
from flywheel.tasks import NamedTask, Task, digest_of, load_tasks
from flywheel.threads import DaemonThreads
from flywheel.workflow import Caller, Function, name_of


async def alearn(
    workflow: Function,
    tasks: str | Path | Iterable[Task],
    *,
    url: str | None = None,
    key: str | None = None,
    client: AsyncClient | None = None,
    judge: Function | None = None,
    eval_tasks: str | Path | Iterable[Task] | None = None,
    folder: str | Path | None = None,
    resume: bool = True,
    config: LearnConfig | None = None,
    **options: Any,
) -> Report:
    """Like learn, within a running event loop.

    >>> import inspect
    >>> inspect.iscoroutinefunction(alearn)
    True
    """
    how = (config or LearnConfig()).with_options(**options)
    named, held_out = load_tasks(tasks), [] if eval_tasks is None else load_tasks(eval_tasks)
    home = Path("runs") / how.name if folder is None else Path(folder)
    work = {name: getattr(how, name) for name in ("name", "seed", "epochs", "runs_per_task")}
    work |= {"workflow": name_of(workflow), "tasks": digest_of(named)}
    talker = client or AsyncClient(url, key=key, retry_s=300.0)
    journal = Journal(home / "journal.jsonl", work, resume)
    pools = [DaemonThreads(how.at_once, f"flywheel-{name}") for name in ("learn", "evaluate")]
    try:
        flows = [Caller(workflow, ("task", "model", "run"), pool) for pool in pools]
        judges = [None if judge is None else Caller(judge, ("task", "reply", "run"), pool) for pool in pools]
        attempts = Attempts(talker, journal, Failures(how.max_failed_share), flows[0], judges[0], how)
        trial = Trial(flows[1], judges[1], how.eval_runs, how.at_once, how.timeout_s, how.eval_params)
        patience = {"patience_s": how.patience_s, "engine_patience_s": how.timeout_s}
        pacer = Pacer(talker, how.max_ready_rows, how.require_trainer, **patience)
        return await _learn(Learning(how, attempts, trial, pacer, held_out), named, home)
    finally:
        journal.close()
        for pool in pools:
            pool.shutdown()
        if client is None:
            await talker.close()


async def _learn(learning: Learning, tasks: list[NamedTask], home: Path) -> Report:
    """Run the work, and write the report even if learning fails, unless the folder's is of other work."""
    how, journal, began = learning.how, learning.attempts.journal, time.monotonic()
    is_ours = True
    learning.planned = len(tasks) * how.epochs * how.runs_per_task - len(journal.ended)
    learning.report.evaluations = [Evaluation(**line["result"]) for line in journal.evaluations]
    shown = asyncio.create_task(show(learning)) if how.progress else None
    timer = None if how.seconds is None else asyncio.get_running_loop().call_later(how.seconds, learning.end, "time")
    try:
        with CtrlC(partial(_stop, learning)):
            await learning.go(tasks)
    except JournalMismatch:
        is_ours = False
        raise
    except Exception as exc:
        learning.report.stopped = f"failed: {type(exc).__name__}"
        raise
    finally:
        for one in (shown, timer):
            if one is not None:
                one.cancel()
        journal.close()
        learning.report.seconds = round(time.monotonic() - began, 3)
        learning.report.waited_s = round(learning.pacer.waited_s, 3)
        if is_ours:
            summarize(learning.report, journal.path).write(home, journal.path)
    return learning.report


def _stop(learning: Learning) -> None:
    learning.interrupt()
    if learning.how.progress:
        sys.stderr.write("\nstopping: what runs is finished; Ctrl-C once more breaks it off\n")


def learn(workflow: Function, tasks: str | Path | Iterable[Task], **options: Any) -> Report:
    """Run a workflow on tasks and send the rewards, so that the trainer learns from them. Returns a Report.

    workflow: a function, sync or async, of (task), (task, model) or (task, model, run) that returns a number, a
    mapping, a Reward or a Result; with judge=, a function of (task, reply, run), it may return anything. tasks: a
    .jsonl or .csv file, or an iterable of mappings. The runs of a task start together and are committed together. A
    workflow that raises an error is retried as a new run; the rows of a failed run are never rewarded. With the same
    folder (runs/NAME), a restart only runs what is missing. Ctrl-C finishes the running runs, and reports. options:
    url, key, client, eval_tasks, folder, resume, config, and the fields of LearnConfig.

    Raises NotTraining, TooManyFailures, JournalMismatch, ConfigError, Away, Unreachable, Refused.

    >>> learn(lambda task: 1.0, [], url="http://127.0.0.1:8010")
    Traceback (most recent call last):
    flywheel.errors.ConfigError: no task in []: give at least one
    """
    return run_alone(alearn(workflow, tasks, **options), "flywheel.alearn")
