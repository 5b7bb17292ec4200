"""Sections `trainer.breaker` and `trainer.watch`: when training stops by itself, and outputs for its figures."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from shared.config.base import NUMBER, Count, Flag, NonNegative, Port, Positive, Section

Share = Annotated[float, Field(gt=0, lt=1), NUMBER]


class BreakerConfig(Section):
    """Bounds on the figures of an update. If one is crossed, nothing is published until `flywheel trainer --resume`."""

    change_of_update: Share | None = 0.52
    """Maximum change of tokens' probabilities by one update, as a mean over tokens: one minus the square of the smaller
    over the larger of the probabilities before and after; null: no bound, here and below."""
    kl_of_update: Positive | None = 20.0
    """Maximum KL divergence of one update's policy from the one before, nats per token."""
    kl_to_base: Positive | None = 50.0
    """Maximum KL divergence of the policy from the base model, nats per token. It is measured if an algorithm loads the
    base model: dpo, kto, and others with a kl_coef above 0. Otherwise it is not checked."""
    min_entropy: Positive | None = 1e-6
    """Mean entropy of the policy's next token below which it has collapsed, nats."""
    max_entropy: Positive | None = 8.0
    """Mean entropy of the policy's next token above which it only guesses, nats."""
    policy_grad_norm: Positive | None = 1e4
    """Maximum norm of the policy's gradient before clipping."""
    critic_grad_norm: Positive | None = 1e6
    """Maximum norm of the critic's gradient before clipping."""
    logprob_gap: Positive | None = 1.0
    """Maximum mean distance between engine's and trainer's logprobs of rows sampled by the same weights, nats."""
    outside_cut: Share | None = 0.1
    """Maximum share of these tokens that are, for the trainer, outside what top-p, top-k or min-p allow to sample."""
    reward_drop: Positive | None = 1.5
    """Maximum drop of the mean reward from earlier to the last versions, in standard deviations over both; the largest
    possible value is 2."""
    reward_versions: Count = 8
    """Number of versions in each of the two means."""
    reward_rows: Count = 64
    """Rewards that each of the two means needs before they are compared."""

    @model_validator(mode="after")
    def _check_entropy(self) -> BreakerConfig:
        low, high = self.min_entropy, self.max_entropy
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"trainer.breaker.min_entropy={low:g} is not below max_entropy={high:g}; correct one of them"
            )
        return self


class WatchConfig(Section):
    """Outputs for the trainer's figures besides the log: one record for each update."""

    jsonl: Flag = True
    """Append each record to figures.jsonl in the trainer's folder."""
    jsonl_mb: Positive = 64.0
    """Size, MB, at which the file is renamed to figures.1.jsonl, which replaces the previous one."""
    port: Port | None = None
    """Port of the trainer's own Prometheus endpoint; null: none."""
    host: str = "127.0.0.1"
    """Address of that endpoint. It shows figures to anyone who can reach it, but no prompt text."""
    tensorboard: Flag = False
    """Write event files to tensorboard/ in the trainer's folder; needs the package tensorboard."""
    wandb: str | None = None
    """Project of Weights & Biases for the figures; needs the package wandb. null: none."""
    mlflow: str | None = None
    """Tracking URI of MLflow for the figures; needs the package mlflow or mlflow-skinny. null: none."""
    timeout_s: NonNegative = 5.0
    """How long a regular shutdown waits for figures that are not sent yet."""
