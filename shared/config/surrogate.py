"""Common settings of algorithms: the signals that they learn from, and the keys of surrogate objectives."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from shared.config.base import NUMBER, Bounds, Count, Flag, NonNegative, Positive, Section, require_ascending

Kind = Literal["reward", "rating", "metric", "comment", "correction", "preferred_over", "demonstration"]
"""A kind of signal. `demonstration`: the reply was written, not sampled; only `flywheel import` writes this kind."""
SCORES: frozenset[Kind] = frozenset(("reward", "rating", "metric"))
"""The kinds that the rule turns into a reward."""


class AlgorithmConfig(Section):
    """Settings of one algorithm."""

    learns_from: ClassVar[frozenset[Kind]]
    """The kinds of signals that it learns from."""

    @property
    def loads_base(self) -> bool:
        """Whether it needs logprobs of the base model."""
        return False

    def check(self, key: str) -> None:
        """Raise ValueError for settings that contradict each other. key: of this section."""

    def check_in_use(self, key: str) -> None:
        """Raise ValueError for settings with which the algorithm cannot be used. key: of this section."""

    @property
    def learned(self) -> frozenset[Kind]:
        """The kinds of signals that it learns from with these settings."""
        return self.learns_from

    @property
    def learned_again(self) -> frozenset[Kind]:
        """The kinds of signals that it learns from again in later batches: those independent of sampled tokens."""
        return frozenset()

    @property
    def together(self) -> Literal["trajectory", "task"]:
        """What a batch must not split."""
        return "trajectory"


class SurrogateConfig(AlgorithmConfig):
    """Common settings of all algorithms with a surrogate objective."""

    surrogate: Literal["clip", "cispo", "gspo", "topr", "opmd"] = "clip"
    """How an advantage becomes a loss: PPO's clipped ratio; a capped weight (CISPO); the ratio of whole sequences
    (GSPO); tapered failures (TOPR); mirror descent (OPMD)."""
    clip: Positive = 0.2
    """ε of the clipped surrogate objective."""
    clip_high: Positive | None = None
    """ε above 1, for tokens that become more likely (clip-higher); null: the value of `clip`."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False), NUMBER] | None = 3.0
    """Largest effective ratio where the advantage is negative (dual clip); null: no bound."""
    mirror_coef: Positive = 0.1
    """τ of `opmd`: cost of changing a sequence's log-probability."""
    mean: Literal["tokens", "sequences", "constant"] = "tokens"
    """What losses average over: all tokens; sequences, each the mean over its tokens; sequences, each the sum over its
    tokens divided by `mean_tokens`."""
    mean_tokens: Count = 1024
    """Divisor of a sequence's sum with `mean: constant`."""
    kl_coef: NonNegative = 0.01
    """β of the per-token KL penalty towards the base model; with 0 the base model is not loaded."""
    kl: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence at a token: the log-ratio, half its square, or the one that is never negative."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Whether the KL penalty is part of the reward after each token, or of the loss."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    outlier_bound: Positive | None = 10.0
    """Bound on the distance of a turn's return from the batch's median, as a multiple of the median distance; null: no
    bound."""
    normalize_rewards: Flag = False
    """Divide rewards by the running standard deviation of turns' returns, so that `kl_coef` does not depend on their
    scale."""
    importance: Literal["token", "sequence"] = "token"
    """Whether tokens or whole sequences have importance weights, from the sampler's policy to the trainer's."""
    importance_cap: Positive = 2.0
    """Upper bound of importance weights."""
    importance_floor: NonNegative = 0.0
    """Lower bound of importance weights."""
    importance_outside: Literal["truncate", "mask"] = "truncate"
    """Whether weights outside their bounds are truncated, or their tokens are left out."""
    geometric_mask: Bounds | None = None
    """Leave out sequences whose geometric mean of token weights is outside these two numbers; null: none."""

    @property
    def loads_base(self) -> bool:
        return self.kl_coef > 0

    def check(self, key: str) -> None:
        if self.kl_coef and (self.kl, self.kl_in) == ("k1", "loss"):
            raise ValueError(
                f"{key}.kl=k1 with kl_in=loss has a gradient that is 0 on average; set kl: k2 or k3, or kl_in: reward"
            )
        if self.importance_floor >= self.importance_cap:
            raise ValueError(
                f"{key}.importance_floor={self.importance_floor:g} is not below "
                f"{key}.importance_cap={self.importance_cap:g}; lower it"
            )
        require_ascending(f"{key}.geometric_mask", self.geometric_mask)

    def check_in_use(self, key: str) -> None:
        super().check_in_use(key)
        for name, other, value in (("mirror_coef", "surrogate", "opmd"), ("mean_tokens", "mean", "constant")):
            given = getattr(self, other)
            if name in self.model_fields_set and given != value:
                raise ValueError(f"{key}.{name} is set, and {key}.{other}={given}; it is for {value} alone; remove it")
