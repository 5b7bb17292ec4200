"""`flywheel demo`: builds a small model, starts `flywheel up`, and runs simulated customers against it, all locally.

Composition only: the desk, its customers, its agent and the plots are in examples/support_desk. While the processes
run, the demo only uses HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from examples import serving
from examples.support_desk import base_model
from examples.support_desk.customers import Customers, Voice, say_comment, say_correction, say_reward, say_thumbs
from examples.support_desk.report import draw_report, first_and_last_tenth
from examples.support_desk.view import Frame, View
from examples.tiny_model import Progress
from shared.errors import StartupError

EPISODES = 8200
CUSTOMERS_PER_S = 30.0
CUSTOMERS_AT_ONCE = 24
LIMIT_S = 285.0  # after the engine is ready; a slow machine stops before all episodes
MARKER = ".flywheel-demo"
ModelMaker = Callable[[Progress], Path]  # builds a model unless it is cached, and returns its folder
REPORT = Path("report.png")
LEARNING_RATES = {"full": 3.0e-4, "lora": 5.0e-4}
# the model has width 128: an adapter of the usual rank learns half as fast
VERSIONS = {"full": serving.FULL, "lora": {"kind": "lora", "lora": {"rank": 64, "alpha": 128}}}
_ALONE = {"group_timeout_s": 0.1}  # no ticket occurs twice: waiting for more runs of a task is useless
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "lam": 0.8,
        "kl_coef": 0.03,
        "entropy_coef": 0.01,
        "critic_learning_rate": 1.0e-3,
        "value_clip": 0.0,
        "normalize_returns": False,  # rewards are already between 0 and 1
    },
    "grpo": _ALONE,
    "rloo": _ALONE,
    "step_grpo": _ALONE,
    "hint": {"comment": base_model.WORDING},
    # three of four answers are wrong at first: tokens impossible for the teacher must not outweigh its preferences
    "distill": {"advantage_bound": 1.0},
}
VOICES = {"kto": say_thumbs, "sft": say_correction, "dpo": say_correction, "hint": say_comment}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and how."""

    algorithm: str = "ppo"
    kind: str = "full"
    seed: int = 0

    @property
    def voice(self) -> Voice:
        """How customers rate an answer."""
        return VOICES.get(self.algorithm, say_reward)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of the demo, as `--json` prints them."""

    reward_first: float
    reward_last: float
    versions: int
    reloads: int
    experiences: int
    seconds: float
    failed_chats: int


def run_demo(root: Path, json_output: bool, minutes: float | None, plan: Plan) -> int:
    """Run the command. Returns 0 if no chat failed, 1 if one did, 130 after Ctrl-C."""
    with View(quiet=json_output) as view:
        try:
            outcome = play_demo(root, view, plan=plan, minutes=minutes)
        except KeyboardInterrupt:
            view.say("stopped")
            return 130
        _summarise(view, outcome, REPORT)
    if json_output:
        print(json.dumps(as_json(outcome)), flush=True)  # noqa: T201
    return 0 if outcome.failed_chats == 0 else 1


def play_demo(
    root: Path,
    view: View,
    *,
    plan: Plan,
    minutes: float | None = None,
    episodes: int = EPISODES,
    voice: Voice | None = None,
    teacher: ModelMaker = base_model.teacher,
    with_trainer: bool = True,
    report: Path = REPORT,
) -> Outcome:
    """Build the model, start all processes, run the customers, draw the plot. Raises StartupError.

    minutes: duration, instead of a number of episodes. voice: replaces the plan's. teacher: builds the model that
    `distill` learns from.
    """
    serving.make_root(root, MARKER)
    url, file = write_config(root, *_make_models(view, plan.algorithm, teacher), plan)
    view.say(f"starting engine, explorer{' and trainer' if with_trainer else ''}; their log is {root}/flywheel.log")

    def waiting(seconds: int) -> None:
        view.say(f"the engine is starting and compiling its kernels: {seconds} s (usually 30 to 90)")

    started = time.monotonic()
    options = () if with_trainer else ("--without", "trainer")
    with serving.running(url, file, *options, waiting=waiting) as running:
        view.say(f"ready after {time.monotonic() - started:.0f} s; customers come in")
        goal = None if minutes else episodes
        return asyncio.run(_play(url, running, view, plan, goal, minutes, voice or plan.voice, report))


def _make_models(view: View, algorithm: str, make_teacher: ModelMaker) -> tuple[Path, Path | None]:
    """Build the model that learns, and the teacher if the algorithm needs one."""
    shown_quarter = -1

    def progress(what: str, done: float) -> None:
        nonlocal shown_quarter
        if int(done * 4) != shown_quarter:
            shown_quarter = int(done * 4)
            view.say(f"base model: {what} {done:4.0%}")

    teacher = make_teacher(progress) if algorithm == "distill" else None
    return (base_model.follower if algorithm == "hint" else base_model.base_model)(progress), teacher


def write_config(root: Path, model: Path, teacher: Path | None, plan: Plan) -> tuple[str, Path]:
    """Write the demo's configuration file. Returns the explorer's URL and the file."""
    section = SETTINGS.get(plan.algorithm, {}) | ({"path": str(teacher)} if teacher else {})
    trainer = {
        "algorithm": plan.algorithm,
        "batch_size": 64,
        "max_staleness_versions": 5,
        "publish_every": 1,
        "learning_rate": LEARNING_RATES[plan.kind],
        "max_tokens_per_micro_batch": 280,
        "seed": plan.seed,
        "epochs": 2,
        "minibatches": 4,
        **({plan.algorithm: section} if section else {}),
    }
    return serving.write_config(root, model, {"max_model_len": 256}, trainer, VERSIONS[plan.kind])


async def _play(
    url: str,
    processes: serving.Running,
    view: View,
    plan: Plan,
    goal: int | None,
    minutes: float | None,
    voice: Voice,
    report: Path,
) -> Outcome:
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        customers = Customers(url, seed=plan.seed, per_s=CUSTOMERS_PER_S, at_most=CUSTOMERS_AT_ONCE, voice=voice)
        started = time.monotonic()
        limit_s = minutes * 60 if minutes else LIMIT_S
        running = asyncio.create_task(customers.run(goal or sys.maxsize), name="customers")
        while not running.done():
            await asyncio.wait({running}, timeout=1.0)
            processes.require_alive()
            elapsed_s = time.monotonic() - started
            if elapsed_s > limit_s:
                customers.stop()
            with contextlib.suppress(StartupError):  # the explorer is busy or starts again: chats tell, and the end
                view.show(await _frame(http, customers, goal, elapsed_s, limit_s))
        await running
        seconds = time.monotonic() - started
        episodes = customers.books.episodes
        if not episodes:
            raise StartupError(f"no chat was answered: {customers.books.failures[-1:]}; see {processes.log}")
        status, versions = await _read(http, "/status"), (await _read(http, "/versions"))["versions"]
    served = [(v["version"], v["served_at"]) for v in versions if v["version"] > 0 and v["served_at"]]
    draw_report(report, episodes, served, "A support desk learns from its customers")
    first, last = first_and_last_tenth(episodes)
    for failure in customers.books.failures[:3]:
        view.say(f"failed: {failure}")
    return Outcome(
        reward_first=first,
        reward_last=last,
        versions=status["versions"]["published"],
        reloads=status["versions"]["reloads"],
        experiences=sum(status["rows"].values()),
        seconds=seconds,
        failed_chats=len(customers.books.failures),
    )


async def _read(http: httpx.AsyncClient, path: str) -> Any:
    """Return the explorer's answer. Raises StartupError."""
    try:
        return (await http.get(path)).raise_for_status().json()
    except httpx.HTTPError as exc:
        raise StartupError(f"the explorer does not answer GET {path} ({exc}); its log says why") from exc


async def _frame(
    http: httpx.AsyncClient, customers: Customers, goal: int | None, elapsed_s: float, limit_s: float | None
) -> Frame:
    status = await _read(http, "/status")
    trainers = status["trainers"]
    return Frame(
        episodes=customers.books.episodes,
        goal=goal,
        failures=len(customers.books.failures),
        elapsed_s=elapsed_s,
        limit_s=limit_s,
        version=status["versions"]["serving"],
        lag_versions=status["lag_versions"],
        rows=status["rows"],
        trainer_step=trainers[0]["step"] if trainers else 0,
    )


def as_json(outcome: Outcome) -> dict[str, float]:
    rounded = {"reward_first": round(outcome.reward_first, 4), "reward_last": round(outcome.reward_last, 4)}
    return {**asdict(outcome), **rounded, "seconds": round(outcome.seconds, 1)}


def _summarise(view: View, outcome: Outcome, report: Path) -> None:
    view.say(
        f"\nreward {outcome.reward_first:.2f} → {outcome.reward_last:.2f} (first and last tenth of the episodes)\n"
        f"{outcome.versions} versions published, {outcome.reloads} taken into service while chats went on, "
        f"{outcome.failed_chats} failed chats\n"
        f"{outcome.experiences} experiences in {outcome.seconds:.0f} s; the picture: {report}"
    )
