"""Settings of each algorithm, inside the section `trainer`: a section of its own that bears the algorithm's name."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from shared.config.base import NUMBER, Count, Finite, Flag, NonNegative, Positive, Share
from shared.config.surrogate import AlgorithmConfig, Bounds, RewardSignals, SurrogateConfig, require_ascending
from shared.config.taught import DistillConfig, HintConfig


class PPOConfig(SurrogateConfig):
    """Proximal policy optimization (Schulman et al. 2017) with a critic."""

    learns_from: ClassVar[frozenset[str]] = RewardSignals

    value_clip: NonNegative = 0.2
    """How far the critic's value may move from the old one within a batch; 0 turns value clipping off."""
    gamma: Share = 1.0
    """Discount for each token."""
    lam: Share = 0.95
    """λ of generalized advantage estimation."""
    value_coef: NonNegative = 0.5
    """Weight of the critic's loss."""
    normalize_advantages: Flag = True
    """Whiten advantages over the batch's tokens."""
    normalize_returns: Flag = True
    """The critic learns returns with a running mean of 0 and standard deviation of 1, whatever the rewards' size."""
    return_clip: Positive = 100.0
    """Bound on the magnitude of advantages and returns; as a default the largest reward that is accepted by default."""
    critic_learning_rate: Positive | None = None
    """Learning rate of the critic; null: ten times the policy's."""
    critic_warmup: Annotated[int, Field(ge=0, strict=True)] = 0
    """Updates at the beginning in which the critic alone learns."""


class ReinforcePPConfig(SurrogateConfig):
    """REINFORCE++ (Hu et al. 2025): clipped policy gradient with a global baseline, without a critic."""

    learns_from: ClassVar[frozenset[str]] = RewardSignals

    gamma: Share = 1.0
    """Discount for each token."""
    baseline_sequences: Count = 256
    """Sequences that the baseline is taken over: a smaller batch is completed with running moments of earlier ones."""


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning: likelihood of written answers."""

    learns_from: ClassVar[frozenset[str]] = frozenset({"correction", "demonstration"})

    @property
    def learned_again(self) -> frozenset[str]:
        return self.learns_from


class SPOConfig(SurrogateConfig):
    """SPO (Xu & Ding 2025): single samples, compared with what the policy earned before at the like."""

    learns_from: ClassVar[frozenset[str]] = RewardSignals

    bounds: Bounds | None = None
    """Lowest and highest reward of a trajectory: the tracker is a Beta distribution's; null: a Gaussian's."""
    shrinkage: Positive = 8.0
    """Attempts that an estimate must rest on until it counts as much as the next wider one."""
    half_life_kl: Positive | None = 0.06
    """KL divergence, nats for each token, of the trainer's policy from the samplers' after which what was seen counts
    half; null: divergence makes nothing forget."""
    half_life_updates: Positive | None = 200.0
    """Updates after which what was seen counts half; null: age makes nothing forget."""
    prompt_tokens: Count = 32
    """Trajectories that begin with the same so many tokens count as of one system prompt."""
    max_keys: Count = 4096
    """Tasks and system prompts that are remembered at most; those not seen for longest are forgotten."""
    baseline_sequences: Count = 256
    """Attempts over which advantages have mean 0 and deviation 1: a smaller batch is completed with running moments of
    earlier ones."""

    def check(self, key: str) -> None:
        super().check(key)
        require_ascending(f"{key}.bounds", self.bounds)
        if self.bounds is not None and self.normalize_rewards:
            raise ValueError(f"{key}.bounds and {key}.normalize_rewards are both set; remove one of them")


class GroupConfig(SurrogateConfig):
    """What algorithms share that compare the runs of a task with each other."""

    learns_from: ClassVar[frozenset[str]] = RewardSignals
    whole: ClassVar[Literal["trajectory", "task"]] = "task"

    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence at a token: the log-ratio, half its square, or the one that is never negative."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Where the KL penalty counts: in the reward after each token, or in the loss."""
    scale: Literal["group", "batch", "none"] = "group"
    """Advantages are divided by the standard deviation of their group, by that of all rewards, or by nothing."""
    group_size: Annotated[int, Field(ge=2, strict=True)] = 2
    """Rewarded runs of a task that are waited for before any of them is claimed."""
    group_timeout_s: Positive | None = 60.0
    """Seconds since something was said of a task's runs, after which they are claimed though they are fewer than
    `group_size`; null: never."""
    baseline_sequences: Count = 256
    """Attempts that the baseline of groups of one is taken over: a smaller batch is completed with running moments of
    earlier ones."""


class GRPOConfig(GroupConfig):
    """GRPO (Shao et al. 2024): the runs of a task, compared with their mean."""


class RLOOConfig(GroupConfig):
    """RLOO (Ahmadian et al. 2024): the runs of a task, each compared with the mean of the others."""

    scale: Literal["group", "batch", "none"] = "none"
    """Advantages are divided by the standard deviation of their group, by that of all rewards, or by nothing."""


class StepGRPOConfig(GroupConfig):
    """GRPO by turn: each turn of a task's runs, compared with the same turn of the others."""


class RAFTConfig(AlgorithmConfig):
    """Reward-ranked fine-tuning (Dong et al. 2023): likelihood of the best sampled replies."""

    learns_from: ClassVar[frozenset[str]] = RewardSignals

    quantile: Annotated[float, Field(ge=0, lt=1), NUMBER] = 0.5
    """Of the batch's rewards: replies from this one on are learnt, but never those of the lowest reward."""
    above: Finite | None = None
    """Replies with a reward above this are learnt, whatever else is in the batch; null: the quantile decides."""

    @model_validator(mode="after")
    def _check_bar(self) -> RAFTConfig:
        if self.above is not None and "quantile" in self.model_fields_set:
            raise ValueError("trainer.raft.quantile and trainer.raft.above are both set; remove one of them")
        return self


class DPOConfig(AlgorithmConfig):
    """Direct preference optimization (Rafailov et al. 2023)."""

    learns_from: ClassVar[frozenset[str]] = frozenset({"preferred_over", "correction"})

    beta: Positive = 0.1
    """β: how much it costs to move away from the base model."""
    clip: NonNegative = 0.2
    """A preference moves no token further within a batch than to 1 + ε times its probability, or to as small a part of
    it; 0: it is not bounded."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), NUMBER] = 0.0
    """The share of preferences that are taken to be the wrong way round (conservative DPO)."""
    best_over_worst: Flag = False
    """Prefer the best run of a task to its worst, too. Rewards are then learned from, and tasks are claimed whole."""

    @property
    def loads_base(self) -> bool:
        return True

    @property
    def learned(self) -> frozenset[str]:
        return self.learns_from | RewardSignals if self.best_over_worst else self.learns_from

    @property
    def together(self) -> Literal["trajectory", "task"]:
        return "task" if self.best_over_worst else "trajectory"


class KTOConfig(AlgorithmConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024): from ratings alone."""

    learns_from: ClassVar[frozenset[str]] = frozenset({"rating"})

    beta: Positive = 0.1
    """β: how much it costs to move away from the base model."""
    clip: NonNegative = 0.2
    """A rating moves no token further within a batch than to 1 + ε times its probability, or to as small a part of it;
    0: it is not bounded."""
    largest_weight: Annotated[float, Field(ge=1, allow_inf_nan=False), NUMBER] = 5.0
    """The rarer rating weighs more, so that ups and downs weigh alike; at most so many times as much as in equal parts;
    1: all weigh the same."""
    taper: Flag = True
    """A reply that is rated down weighs as many times less as it has become less likely since it was sampled; false: it
    weighs the same."""

    @property
    def loads_base(self) -> bool:
        return True


ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "ppo": PPOConfig,
    "reinforce_pp": ReinforcePPConfig,
    "sft": SFTConfig,
    "spo": SPOConfig,
    "grpo": GRPOConfig,
    "rloo": RLOOConfig,
    "step_grpo": StepGRPOConfig,
    "raft": RAFTConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "hint": HintConfig,
    "distill": DistillConfig,
}
AUTO = "auto"
"""Names no algorithm: the trainer chooses some of CHOICES by what is said."""
CHOICES = {"grpo": 1.0, "reinforce_pp": 1.0, "kto": 1.0, "hint": 0.5, "sft": 0.2, "dpo": 0.2}
"""What `algorithm: auto` chooses from, with the weights of their losses. All of them train the policy alone."""
