"""The algorithms of Trinity and TRL, with ours for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.trinity.key import Given

DEFAULT = "ppo"


@dataclass(frozen=True)
class Algorithm:
    """Our counterpart of an algorithm, and the differences; without a counterpart, what to do.

    parts: components of theirs. surrogate: setting of ours. defaults: their defaults that differ from ours.
    """

    ours: str = ""
    note: str = ""
    parts: tuple[str, ...] = ()
    surrogate: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GROUP = ("grpo", "grpo_verl", "step_wise_grpo", "ppo")
_BY_TASK = Algorithm(note="choose grpo: both compare the runs of a task")
_MIXED = Algorithm(note="import the expert data, and name grpo and sft with weights in trainer.algorithms")
TRINITY: dict[str, Algorithm] = {
    "ppo": Algorithm("ppo", parts=("ppo",)),
    "grpo": Algorithm("grpo", parts=_GROUP),
    "grpo_verl": Algorithm("grpo", "the same algorithm in another place of Trinity", _GROUP),
    "dapo": Algorithm("grpo", "set clip_high above clip; groups of equal rewards teach nothing in either", _GROUP),
    "reinforceplusplus": Algorithm("reinforce_pp", parts=("reinforceplusplus", "ppo")),
    "rloo": Algorithm("rloo", parts=("rloo", "ppo")),
    "multi_step_grpo": Algorithm("grpo", "whole runs are compared, and each call has its run's advantage", _GROUP),
    "sft": Algorithm("sft", parts=("sft",)),
    "dpo": Algorithm("dpo", parts=("dpo",)),
    "raft": Algorithm("raft", "without `above`, only the better half of a batch is learned", ("sft",),
                      defaults={"above": -1e9}),
    "on_policy_distill": Algorithm(note="choose distill, and say in trainer.distill where the teacher is"),
    "cpt": Algorithm(note="train on plain text elsewhere, and serve the result as model.path"),
    "opmd": Algorithm(note="choose grpo with surrogate: opmd, which is another form of mirror descent"),
    "asymre": _BY_TASK,
    "sppo": _BY_TASK,
    "rec": _BY_TASK,
    "topr": Algorithm(note="choose reinforce_pp with surrogate: topr, which tapers whole sequences as the paper does"),
    "cispo": Algorithm("grpo", "with surrogate: cispo", ("grpo", "cispo"), "cispo", {"clip_high": 0.28}),
    "gspo": Algorithm("grpo", "with surrogate: gspo", ("grpo", "gspo"), "gspo",
                      {"clip": 3e-4, "clip_high": 4e-4}),
    "sapo": Algorithm(note="choose grpo: the same advantages, with a hard clip"),
    "mix": _MIXED,
    "mix_chord": _MIXED,
    "gigpo": Algorithm(note="choose step_grpo: advantages by step, from whole runs alone"),
    "jsd": Algorithm(note="choose distill, whose divergence is the reverse KL"),
}  # fmt: skip

_JUDGED = Algorithm("dpo", "a judge sends `preferred_over` while the agent is in use")
_TEACHER = Algorithm("distill", "the teacher must have the student's tokenizer")
TRL: dict[str, Algorithm] = {
    "SFTTrainer": Algorithm("sft", "conversations come by `flywheel import`, or as corrections"),
    "DPOTrainer": Algorithm("dpo", "pairs come as `preferred_over`, or as corrections"),
    "KTOTrainer": Algorithm("kto", "ratings, up and down"),
    "GRPOTrainer": Algorithm("grpo", "num_generations is learn's runs_per_task"),
    "RLOOTrainer": Algorithm("rloo", "num_generations is learn's runs_per_task"),
    "DistillationTrainer": _TEACHER,
    "RewardTrainer": Algorithm(note="no reward model is trained; send what one says as a reward"),
    "AsyncGRPOTrainer": Algorithm("grpo", "rollouts and updates run beside each other in any case"),
    "AsyncDistillationTrainer": _TEACHER,
    "ServerDistillationTrainer": _TEACHER,
    "GKDTrainer": Algorithm("distill", "on sampled replies alone"),
    "IWOPDTrainer": Algorithm(note="choose distill, which weighs all tokens alike"),
    "GOLDTrainer": Algorithm(note="choose distill with a teacher that has the student's tokenizer"),
    "OnlineDPOTrainer": _JUDGED,
    "SDPOTrainer": Algorithm("hint", "privileged context is a comment, a correction or the user's next message"),
    "SDFTTrainer": Algorithm("hint", "the demonstration is a correction"),
    "CPOTrainer": Algorithm(note="choose dpo"),
    "ORPOTrainer": Algorithm(note="choose dpo, with sft beside it in trainer.algorithms"),
    "TPOTrainer": Algorithm(note="choose dpo, with sft beside it in trainer.algorithms"),
    "A2POTrainer": Algorithm(note="choose grpo"),
    "GMPOTrainer": Algorithm(note="choose grpo"),
}

WITHOUT_KL = ("sft", "cpt", "raft", "dapo", "asymre", "sppo", "on_policy_distill", "jsd", "mix", "mix_chord")
WITHOUT_ENTROPY = ("sft", "raft", "asymre", "sppo")


def theirs(given: Given) -> str:
    """Return Trinity's name of the algorithm, in lower case as Trinity reads it."""
    return str(given.first("algorithm.algorithm_type", "trainer.algorithm_type", default="ppo")).lower()


def ours(given: Given) -> str:
    """Return the algorithm for flywheel.yaml: the counterpart, or our default if there is none."""
    return counterpart(given).ours or DEFAULT


def counterpart(given: Given) -> Algorithm:
    """Return the entry for Trinity's algorithm; an empty one if Trinity has no such algorithm."""
    return TRINITY.get(theirs(given), Algorithm())
