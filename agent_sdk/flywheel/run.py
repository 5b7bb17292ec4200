"""Run: the chats of one attempt at a task, and their reward."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flywheel.addresses import origin_of
from flywheel.credit import Credit, check_credit, outcome_bodies
from flywheel.errors import ConfigError
from flywheel.feedback import Feedback, keyed, nothing_recorded, send_all
from flywheel.model import Model, path_url
from flywheel.reward import Reward, cut_comment
from flywheel.tasks import new_task_id
from flywheel.transport import Guard, current_pin, current_run
from flywheel.wire import Steps, feedback_body, get_run

if TYPE_CHECKING:
    from contextvars import Token

    from flywheel.async_client import AsyncClient
    from flywheel.client import Client, Explorer


class Run:
    """The chats of one attempt at a task, created by Client.run and AsyncClient.run. Leaving it sends the feedback.

    credit: "once": a run's reward counts once, where the trainer places it; "each": at each message; or a function from
    the reward and the message ids to a reward for each message. Rewards of single turns stay at their turns. If this
    process saw no reply of the run, for example of a program, a function is not called, and the reward counts once.

    >>> import flywheel
    >>> client = flywheel.Client("http://127.0.0.1:8010")
    >>> run = client.run(task_id="t-17", run_id="0")
    >>> run.reward(0.8, metrics={"steps": 4})
    >>> run.child("wolf-1").run_id
    '0/wolf-1'
    >>> run.path_url
    'http://127.0.0.1:8010/run/t-17/0/v1'
    """

    def __init__(self, explorer: Explorer, task_id: str | None, run_id: str | int | None, credit: Credit) -> None:
        check_credit(credit)
        self.task_id = new_task_id() if task_id is None else str(task_id)
        fresh = "0" if task_id is None else uuid.uuid4().hex[:12]  # a name may come again, and is another attempt then
        self.run_id = fresh if run_id is None else str(run_id)
        self.msg_ids: list[str] = []  # of replies that this process saw, in order
        self.unrecorded = 0  # replies that were not to be recorded, or have no id
        self.is_away = False  # set by the transport: no engine, or no explorer, answered the last chat
        self.guard: Guard | None = None
        self.pinned: Model | None = None  # replaces the trainee: with parameters, or a version of it
        self.is_recorded = True  # not if it begins in a shadow run
        self.attempts: list[tuple[str, Mapping[str, Any]]] = []  # of writing tools in a shadow run: name, arguments
        self._explorer = explorer
        self._credit = credit
        self._said: dict[str | None, dict[str, Any]] = {}  # by message; None: about the run
        self._children: list[Run] = []
        self._is_named = False  # a program may chat in this run, unseen by this process
        self._parent: Run | None = None
        self._tokens: list[Token[Any]] = []  # of the blocks in progress
        self._entered = 0  # number of its blocks so far
        self._is_left = False
        self._is_forgotten = False
        self._key = uuid.uuid4().hex
        self.origin = origin_of(explorer.url)  # the explorer: scheme://host:port
        self.trainee = explorer.name  # its name there
        self._obey()

    def _obey(self) -> None:
        """Take over the rules of the shadow run or evaluation in which it begins: nothing is recorded or rewarded."""
        outer, pin = current_run.get(), current_pin.get()
        if outer is not None and outer.guard is not None:
            self.guard, self.is_recorded, self._is_forgotten = outer.guard, False, True
        if pin is not None and pin.evaluated is not None:
            is_same = pin.origin == self.origin
            self.pinned = pin.evaluated if is_same else self._explorer.model().untrained()

    @property
    def model(self) -> Model:
        """The trainee; its chats are recorded as this run's."""
        return self._explorer.model(run=self) if self.pinned is None else self.pinned

    @property
    def is_trial(self) -> bool:
        """Whether this is a run of an evaluation: its chats belong to no run, and nothing is sent about it."""
        return self.pinned is not None and self.pinned.run is None

    @property
    def outcome(self) -> Reward | None:
        """The run's feedback so far."""
        said = self._said.get(None)
        return None if said is None else Reward(said.get("reward"), said.get("metrics", {}), said.get("comment"))

    @property
    def path_url(self) -> str:
        """An OpenAI base URL that names this run, for programs that can only set a base URL.

        Raises ConfigError in an evaluation, and for a run that began in a shadow run: a path cannot contain that its
        chats are unrecorded.
        """
        if self.is_trial or not self.is_recorded:
            where = "an evaluation" if self.is_trial else "a shadow run"
            raise ConfigError(f"run.path_url cannot set `store`, which {where} needs in each chat: use run.model")
        self._is_named = True
        return path_url(self._explorer.url, self.task_id, self.run_id)

    def untrained(self) -> Model:
        """Return the trainee for chats that are not recorded: another player, or a lookahead."""
        return self.model.untrained()

    def env(self) -> dict[str, str]:
        """Return the environment for an agent program: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL."""
        return self.model.env()

    def child(self, name: str) -> Run:
        """Return another run of the same task with its own rewards; it is left together with this one."""
        child = type(self)(self._explorer, self.task_id, f"{self.run_id}/{name}", self._credit)
        child.guard, child._parent, child._is_forgotten = self.guard, self, self._is_forgotten
        child.is_recorded = self.is_recorded
        child.pinned = None if self.pinned is None else replace(self.pinned, run=self.pinned.run and child)
        self._children.append(child)
        return child

    def note_reply(self, msg_id: str | None, recorded: bool) -> None:
        """Called by the transport at the start of a reply."""
        if msg_id is None or not recorded:
            self.unrecorded += 1
        else:
            self.msg_ids.append(msg_id)

    def reward(
        self,
        value: float | None = None,
        *,
        of: str | None = None,
        metrics: Mapping[str, float] | None = None,
        comment: str | None = None,
        correction: str | None = None,
    ) -> None:
        """Set the run's reward, or with `of` that of one reply. The last value counts.

        Raises ConfigError for a number that is not finite, and after the `with` block, at whose end all was sent.
        """
        if self._is_over:
            about = f"task_id={self.task_id!r}, run_id={self.run_id!r}" if of is None else repr(of)
            raise ConfigError(f"the run has been left, and nothing more is sent: call client.feedback({about}, …)")
        said = {"reward": value, "metrics": dict(metrics) if metrics else None, "comment": comment}
        said["correction"] = correction
        body = feedback_body(of or [], self.task_id, self.run_id, said)  # its numbers and texts fit JSON
        given = {name: body[name] for name in said if name in body}
        if given:
            self._said.setdefault(of, {}).update(given)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the context's run. Nothing is sent at the end, nor at that of a block inside."""
        self._enter()
        try:
            yield
        finally:
            self._leave()
            self._is_left = False  # what is said later is sent by the caller of this

    def _enter(self) -> None:
        outer, pin = current_run.get(), current_pin.get()
        leaves_shadow = outer is not None and outer.guard is not None and self.guard is None
        if leaves_shadow or (pin is not None and pin.evaluated is not None and self.pinned is None):
            raise ConfigError(
                f"run {self.run_id!r} of task {self.task_id!r} began outside of the shadow run or evaluation that "
                "enters it, and would record it: begin it inside, by client.run()"
            )
        if not self.is_trial:
            self._tokens.append(current_run.set(self))
            self._entered, self._is_left = self._entered + 1, False

    def _leave(self) -> None:
        for token in reversed(self._tokens):  # blocks of several threads may end in any order
            try:
                current_run.reset(token)
            except ValueError:  # of another context
                continue
            self._tokens.remove(token)
            break
        else:  # a generator may be closed in a context other than that of its entry
            self._tokens = self._tokens[:-1]
        self._is_left = self._entered > 0 and not self._tokens

    @property
    def _is_over(self) -> bool:
        """Whether the block of this run, or of the one that it is a child of, has ended: nothing more is sent."""
        return self._is_left if self._parent is None else self._parent._is_over

    @property
    def _is_sent(self) -> bool:
        """Whether the end of this block sends what was said: not inside another block, nor after a failure."""
        return not (self.is_trial or self._is_entered or self._is_forgotten)

    @property
    def _blocks(self) -> int:
        """Number of blocks of this run and of the one that it is a child of."""
        return self._entered + (0 if self._parent is None else self._parent._blocks)

    @property
    def _is_entered(self) -> bool:
        """Whether a block of this run, or of the one that it is a child of, is in progress."""
        return bool(self._tokens) or (self._parent is not None and self._parent._is_entered)

    def take(self, reward: Reward | None) -> None:
        """Set the result of a reward function, with at most 64 kB of its comment; None changes nothing."""
        if reward is not None:
            self.reward(reward.value, metrics=reward.metrics, comment=cut_comment(reward.comment))

    @property
    def chats(self) -> int:
        """Number of recorded replies that this process saw, including those of its children."""
        return len(self.msg_ids) + sum(child.chats for child in self._children)

    @property
    def is_unanswered(self) -> bool:
        """Whether no engine, or no explorer, answered the last chat of it or of one of its children."""
        return self.is_away or any(child.is_unanswered for child in self._children)

    @property
    def spoken(self) -> int:
        """Number of those in runs with feedback; a child is a run of its own."""
        own = len(self.msg_ids) if self._said else 0
        return own + sum(child.spoken for child in self._children)

    def forget(self) -> None:
        """Delete all feedback, and send none later, from what it left running: a failed run is not rewarded."""
        self._said.clear()
        self._is_forgotten = True
        for child in self._children:
            child.forget()

    def feedback(self) -> list[Feedback]:
        """Return what leaving sends: Idempotency-Keys and bodies; the outcome first, then the feedback about turns.

        A run whose chats all belong to its children sends no outcome, because it would have no target.
        """
        is_parent_alone = not (self.msg_ids or self._is_named) and any(child.chats for child in self._children)
        outcome: list[dict[str, Any]] = []
        if None in self._said and not is_parent_alone:
            about = self.task_id, self.run_id, self.msg_ids
            outcome = outcome_bodies(self._credit, *about, self._said[None])
        turns = [feedback_body(of, None, None, said) for of, said in self._said.items() if of is not None]
        found = keyed(f"{self._key}-{self._blocks}", outcome + turns)  # again in a later block: it may have more chats
        return found + [one for child in self._children for one in child.feedback()]

    def finish(self) -> Steps[None]:
        """Send the feedback. Raises NothingRecorded if the explorer knows no chat of this run."""
        feedback = self.feedback()
        if not (yield from send_all(feedback, self._explorer.retry_s)):
            raise nothing_recorded(self)
        if feedback or self.chats:
            return
        if (yield from get_run(self.task_id, self.run_id, self._explorer.retry_s)) == []:
            raise nothing_recorded(self)


class SyncRun(Run):
    """A run of a Client: `with client.run() as run:`."""

    def __enter__(self) -> SyncRun:
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if kind is None and self._is_sent:
            client: Client = self._explorer.owner
            client.drive(self.finish())


class AsyncRun(Run):
    """A run of an AsyncClient: `async with client.run() as run:`."""

    async def __aenter__(self) -> AsyncRun:
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if kind is None and self._is_sent:
            client: AsyncClient = self._explorer.owner
            await client.drive(self.finish())
