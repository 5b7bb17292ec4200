"""The cases: the feedback of customers, and the algorithms that learn from it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from benchmarks.learning.run import Plan, Say
from benchmarks.learning.world import TEACHER, Reply, worth
from examples.support_desk.desk import format_answer
from shared.reward import Signal

OLD = 16  # versions, in the cases of old rows
GRUMP = "grump"
STEADY: dict[str, Any] = {"kl_coef": 0.02}


def _answer(reply: Reply) -> str:
    return format_answer(reply.ticket.desk, reply.ticket.priority)


def reward(reply: Reply, _draw: random.Random) -> list[Signal]:
    return [Signal("reward", value=worth(reply))]


def rating(reply: Reply, draw: random.Random) -> list[Signal]:
    """Up with a probability of the reply's worth."""
    return [Signal("rating", text="up" if draw.random() < worth(reply) else "down")]


def comment(reply: Reply, _draw: random.Random) -> list[Signal]:
    return [Signal("comment", text=_answer(reply))]


def correction(reply: Reply, _draw: random.Random) -> list[Signal]:
    return [Signal("correction", text=_answer(reply))]


def reversed_correction(reply: Reply, _draw: random.Random) -> list[Signal]:
    """The opposite style: the priority first."""
    return [Signal("correction", text=f"{reply.ticket.priority} , {reply.ticket.desk}")]


def everything(reply: Reply, draw: random.Random) -> list[Signal]:
    return [*reward(reply, draw), *comment(reply, draw)]


def each(say: Callable[[Reply, random.Random], list[Signal]]) -> Say:
    """The same kind of feedback on each reply, without a key."""
    return lambda replies, draw: [(say(reply, draw), None) for reply in replies]


def of_others(say: Callable[[Reply, random.Random], list[Signal]]) -> Say:
    """The same signals, each given to another reply than the one it is about."""

    def shuffled(replies: list[Reply], draw: random.Random) -> list[tuple[list[Signal], str | None]]:
        return [(say(reply, draw), None) for reply in draw.sample(replies, len(replies))]

    return shuffled


def flipped(share: float) -> Say:
    """Rewards; this share of them is inverted."""

    def say(reply: Reply, draw: random.Random) -> list[Signal]:
        value = worth(reply)
        return [Signal("reward", value=1 - value if draw.random() < share else value)]

    return each(say)


def flipped_ratings(share: float) -> Say:
    """Ratings, up with a probability of the reply's worth; this share of them is inverted."""

    def say(reply: Reply, draw: random.Random) -> list[Signal]:
        up = (draw.random() < worth(reply)) != (draw.random() < share)
        return [Signal("rating", text="up" if up else "down")]

    return each(say)


def one_hates(share: float) -> Say:
    """Rewards; one key judges this share of the replies, and gives 0 to all."""

    def say(replies: list[Reply], draw: random.Random) -> list[tuple[list[Signal], str | None]]:
        hates = [draw.random() < share for _ in replies]
        return [
            ([Signal("reward", value=0.0)], GRUMP) if hated else (reward(reply, draw), f"k{place % 8}")
            for place, (reply, hated) in enumerate(zip(replies, hates, strict=True))
        ]

    return say


def _alone(name: str, **section: Any) -> dict[str, Any]:
    return {"algorithm": name, **({name: section} if section else {})}


PPO = {"lam": 0.8, "kl_coef": 0.02, "critic_learning_rate": 1e-3, "value_clip": 0.0, "normalize_returns": False}
SAMPLED: dict[str, Any] = {"top_k": 0, "teacher": "live"}
HELD: dict[str, Any] = {**SAMPLED, "kl_coef": 0.2}
FAST: dict[str, Any] = {"learning_rate": 1e-3, "epochs": 4}  # for corrections, which name the right tokens
WORDS: dict[str, Any] = {"learning_rate": 1e-3, "epochs": 8, "minibatches": 2}  # half of the rows in each step
HINT: dict[str, Any] = {**_alone("hint"), **WORDS}
MIX: dict[str, Any] = {"algorithms": {"reinforce_pp": 0.3, "hint": 1.0}, "reinforce_pp": STEADY, **WORDS}
AGAIN: dict[str, Any] = {"rehearse": 4.0, "warmup_updates": 5, "learning_rate": 1.5e-3}  # few rows, many times
STEPS: dict[str, Any] = {"epochs": 4, "minibatches": 2}  # for policy gradients: half of the rows in each step
REINFORCE: dict[str, Any] = {**_alone("reinforce_pp", **STEADY), **STEPS}
_SPARSE: dict[str, Any] = {"rows": 64, "versions": 80}
_TASKS: dict[str, Any] = {"say": each(reward), "runs": 4, **_SPARSE}
_OLD: dict[str, Any] = {"late": (OLD, OLD), "versions": 200 + OLD, "share": 0.5, "say": each(reward), "rows": 32}
_FIXED: dict[str, Any] = {"share": 0.05, "versions": 80}
_AT_ONCE: dict[str, Any] = {"late": (0, 0), "versions": 60}
_WRONG: dict[str, Any] = {"share": 0.5, "rows": 64, "versions": 100}
_FLIPPED: dict[str, Any] = {**_WRONG, "rows": 128}  # more rows average the noise
_THUMBS: dict[str, Any] = {**_FLIPPED, "versions": 200}  # ratings carry less information than rewards


def _old(**section: Any) -> Plan:
    settings = {**_alone("reinforce_pp", kl_coef=0.0, **section), "epochs": 2, "minibatches": 2}
    return Plan(settings, **_OLD)


CASES: dict[str, Plan] = {
    # sparse: 10 % of single samples get feedback, up to 4 versions late
    "sparse/ppo": Plan(_alone("ppo", **PPO), each(reward), **_SPARSE),
    "sparse/reinforce_pp": Plan(REINFORCE, each(reward), **_SPARSE),
    "sparse/spo": Plan({**_alone("spo", **STEADY), **STEPS}, each(reward), **_SPARSE),
    "sparse/kto": Plan({**_alone("kto"), **STEPS}, each(rating), rows=128, versions=120),
    "sparse/kto without its taper": Plan({**_alone("kto", taper=False), **STEPS}, each(rating), rows=128, versions=200),
    "sparse/kto without its bound": Plan(_alone("kto", clip=0.0, taper=False), each(rating), rows=64, versions=60),
    "sparse/reinforce_pp of ratings": Plan(REINFORCE, each(rating), rows=128, versions=120),
    "sparse/hint": Plan({**HINT, **AGAIN}, each(comment), versions=80),
    "sparse/hint without rehearsal": Plan(HINT, each(comment), versions=80),
    "sparse/mix": Plan({**MIX, **AGAIN}, each(everything), versions=80),
    # rewards on a tenth of the tasks, each attempted four times; a task of step_grpo has two tickets
    "tasks/grpo": Plan({**_alone("grpo", **STEADY), **STEPS}, **_TASKS),
    "tasks/rloo": Plan({**_alone("rloo", **STEADY), **STEPS}, **_TASKS),
    "tasks/step_grpo": Plan({**_alone("step_grpo", **STEADY), **STEPS}, **_TASKS, turns=2),
    # rewards on a tenth: raft learns the best replies, distill a teacher's opinion instead
    "sparse/raft": Plan({**_alone("raft", above=0.9), **STEPS}, each(reward), **_SPARSE),
    "sparse/distill": Plan({**_alone("distill", path=str(TEACHER), kl_coef=0.0), **STEPS}, each(reward), **_SPARSE),
    # comments alone, and the same comments on other rows
    "comments/hint": Plan(HINT, each(comment), **_AT_ONCE),
    "comments/hint with a live teacher": Plan(_alone("hint", teacher="live"), each(comment), **_AT_ONCE),
    "comments/hint by sampled tokens": Plan(_alone("hint", **SAMPLED, kl_coef=0.01), each(comment), **_AT_ONCE),
    "comments/hint by sampled tokens and a kl_coef": Plan(_alone("hint", **HELD), each(comment), **_AT_ONCE),
    "comments/hint of other rows": Plan(HINT, of_others(comment), **_AT_ONCE),
    # corrections of 5 % of the replies
    "corrections/sft": Plan({**_alone("sft"), **FAST}, each(correction), **_FIXED),
    "corrections/dpo": Plan(_alone("dpo"), each(correction), share=0.05, versions=120),
    "corrections/dpo and sft": Plan({"algorithms": {"dpo": 1.0, "sft": 0.2}}, each(correction), **_FIXED),
    "corrections/hint": Plan(HINT, each(correction), **_FIXED),
    # wrong rewards
    "wrong/clean": Plan(REINFORCE, each(reward), **_WRONG),
    "wrong/one key hates": Plan(REINFORCE, one_hates(0.3), **_WRONG),
    "wrong/one centred key hates": Plan({**REINFORCE, "center_keys": True}, one_hates(0.3), **_WRONG),
    # a fifth of the rewards or ratings inverted, and none
    "flipped/none": Plan(REINFORCE, each(reward), **_FLIPPED),
    "flipped/20 %": Plan(REINFORCE, flipped(0.2), **_FLIPPED),
    "flipped/no ratings": Plan(REINFORCE, flipped_ratings(0.0), **_THUMBS),
    "flipped/20 % of ratings": Plan(REINFORCE, flipped_ratings(0.2), **_THUMBS),
    # old rows: 200 updates on replies sampled 16 versions before
    "old/clip": _old(importance_cap=1e9),
    "old/clip truncated": _old(),
    "old/topr": _old(surrogate="topr"),
    "old/masks": _old(importance_floor=0.5, importance_outside="mask"),
}
