"""Settings of each algorithm: a section with the algorithm's name, inside the section `trainer`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from shared.config.base import NUMBER, Bounds, Count, Finite, Flag, NonNegative, Positive, Share, require_ascending
from shared.config.surrogate import SCORES, AlgorithmConfig, Kind, SurrogateConfig
from shared.config.taught import DistillConfig, HintConfig


class PPOConfig(SurrogateConfig):
    """Proximal policy optimization (Schulman et al. 2017) with a critic."""

    learns_from: ClassVar[frozenset[Kind]] = SCORES

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
    """Scale the returns that the critic learns to a running mean of 0 and standard deviation of 1."""
    return_clip: Positive = 100.0
    """Bound on the magnitude of advantages and returns; the default is the largest reward accepted by default."""
    critic_learning_rate: Positive | None = None
    """Learning rate of the critic; null: ten times the policy's."""
    critic_warmup: Annotated[int, Field(ge=0, strict=True)] = 0
    """Number of first updates in which only the critic learns."""


class ReinforcePPConfig(SurrogateConfig):
    """REINFORCE++ (Hu et al. 2025): clipped policy gradient with a global baseline, without a critic."""

    learns_from: ClassVar[frozenset[Kind]] = SCORES

    gamma: Share = 1.0
    """Discount for each token."""
    baseline_sequences: Count = 256
    """Sequences in the baseline: a smaller batch is completed with running moments of earlier ones."""


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning: likelihood of written answers."""

    learns_from: ClassVar[frozenset[Kind]] = frozenset({"correction", "demonstration"})

    @property
    def learned_again(self) -> frozenset[Kind]:
        return self.learns_from


class SPOConfig(SurrogateConfig):
    """SPO (Xu & Ding 2025): single samples, compared with earlier scores of similar attempts."""

    learns_from: ClassVar[frozenset[Kind]] = SCORES

    bounds: Bounds | None = None
    """Lowest and highest reward of a trajectory, for a Beta tracker; null: a Gaussian tracker."""
    shrinkage: Positive = 8.0
    """Number of attempts at which an estimate weighs as much as the next wider one."""
    half_life_kl: Positive | None = 0.06
    """KL divergence, nats per token, of the trainer's policy from the samplers', after which earlier attempts count
    half; null: divergence does not reduce their weight."""
    half_life_updates: Positive | None = 200.0
    """Updates after which earlier attempts count half; null: age does not reduce their weight."""
    prompt_tokens: Count = 32
    """Trajectories with the same number of equal first tokens belong to one system prompt."""
    max_keys: Count = 4096
    """Largest number of stored tasks and system prompts; those not seen for longest are deleted."""
    baseline_sequences: Count = 256
    """Attempts over which advantages have mean 0 and deviation 1: a smaller batch is completed with running moments of
    earlier ones."""

    def check(self, key: str) -> None:
        super().check(key)
        require_ascending(f"{key}.bounds", self.bounds)
        if self.bounds is not None and self.normalize_rewards:
            raise ValueError(f"{key}.bounds and {key}.normalize_rewards are both set; remove one of them")


class GroupConfig(SurrogateConfig):
    """Common settings of algorithms that compare the runs of a task with each other."""

    learns_from: ClassVar[frozenset[Kind]] = SCORES

    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence at a token: the log-ratio, half its square, or the one that is never negative."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Whether the KL penalty is part of the reward after each token, or of the loss."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divisor of advantages: the standard deviation of their group, that of all rewards, or none."""
    group_size: Annotated[int, Field(ge=2, strict=True)] = 2
    """Rewarded runs of a task to wait for before any of them is claimed."""
    group_timeout_s: Positive | None = 60.0
    """Seconds after the last signal about a task's runs, after which they are claimed even if they are fewer than
    `group_size`; null: never."""
    baseline_sequences: Count = 256
    """Attempts in the baseline of groups of one: a smaller batch is completed with running moments of earlier ones."""

    @property
    def together(self) -> Literal["trajectory", "task"]:
        return "task"


class GRPOConfig(GroupConfig):
    """GRPO (Shao et al. 2024): the runs of a task, compared with their mean."""


class RLOOConfig(GroupConfig):
    """RLOO (Ahmadian et al. 2024): the runs of a task, each compared with the mean of the others."""

    scale: Literal["group", "batch", "none"] = "none"
    """Divisor of advantages: the standard deviation of their group, that of all rewards, or none."""


class StepGRPOConfig(GroupConfig):
    """GRPO by turn: each turn of a task's runs, compared with the same turn of the others."""


class RAFTConfig(AlgorithmConfig):
    """Reward-ranked fine-tuning (Dong et al. 2023): likelihood of the best sampled replies."""

    learns_from: ClassVar[frozenset[Kind]] = SCORES

    quantile: Annotated[float, Field(ge=0, lt=1), NUMBER] = 0.5
    """Quantile of the batch's rewards from which replies are learned, except those with the lowest reward."""
    above: Finite | None = None
    """Learn replies with a reward above this, independent of the rest of the batch; null: `quantile` decides."""

    @model_validator(mode="after")
    def _check_bar(self) -> RAFTConfig:
        if self.above is not None and "quantile" in self.model_fields_set:
            raise ValueError("trainer.raft.quantile and trainer.raft.above are both set; remove one of them")
        return self


class DPOConfig(AlgorithmConfig):
    """Direct preference optimization (Rafailov et al. 2023)."""

    learns_from: ClassVar[frozenset[Kind]] = frozenset({"preferred_over", "correction"})

    beta: Positive = 0.1
    """β: cost of moving away from the base model."""
    clip: NonNegative = 0.2
    """ε: within a batch, a preference multiplies the probability of a token by at most 1 + ε, or divides it by at most
    that; 0: no bound."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), NUMBER] = 0.0
    """Share of preferences that are assumed to be reversed (conservative DPO)."""
    best_over_worst: Flag = False
    """Also prefer the best run of a task to its worst. Rewards are then learned from, and tasks are claimed whole."""

    @property
    def loads_base(self) -> bool:
        return True

    @property
    def learned(self) -> frozenset[Kind]:
        return self.learns_from | SCORES if self.best_over_worst else self.learns_from

    @property
    def together(self) -> Literal["trajectory", "task"]:
        return "task" if self.best_over_worst else "trajectory"


class KTOConfig(AlgorithmConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024): learns from ratings alone."""

    learns_from: ClassVar[frozenset[Kind]] = frozenset({"rating"})

    beta: Positive = 0.1
    """β: cost of moving away from the base model."""
    clip: NonNegative = 0.2
    """ε: within a batch, a rating multiplies the probability of a token by at most 1 + ε, or divides it by at most
    that; 0: no bound."""
    largest_weight: Annotated[float, Field(ge=1, allow_inf_nan=False), NUMBER] = 5.0
    """Largest weight of the rarer rating. It weighs more than the other one, so that ups and downs have equal total
    weight; 1: all ratings weigh the same."""
    taper: Flag = True
    """Reduce the weight of a reply that is rated down by the factor by which it has become less likely since it was
    sampled."""

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
"""No algorithm: the trainer chooses some of CHOICES by the signals it receives."""
CHOICES = {"grpo": 1.0, "reinforce_pp": 1.0, "kto": 1.0, "hint": 0.5, "sft": 0.2, "dpo": 0.2}
"""The choices of `algorithm: auto`, with the weights of their losses. None of them trains a critic."""
