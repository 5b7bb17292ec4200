"""Sections `trainer.breaker` and `trainer.watch`: when training stops by itself, and where its figures go."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from shared.config.base import NUMBER, Count, Flag, NonNegative, Port, Positive, Section

Share = Annotated[float, Field(gt=0, lt=1), NUMBER]


class BreakerConfig(Section):
    """Bounds on what an update measures. Beyond one, nothing is published until `flywheel trainer --resume`."""

    change_of_update: Share | None = 0.52
    """How much one update may change a token's probability: one less the square of the smaller over the larger, before
    and after, as a mean over tokens; null: no bound, here and below."""
    kl_of_update: Positive | None = 20.0
    """How far one update may move the policy, nats for each token."""
    kl_to_base: Positive | None = 50.0
    """How far the policy may be from the base model, nats for each token. It is measured where an algorithm loads the
    base model: dpo, kto, and others with a kl_coef above 0. Elsewhere it is not watched."""
    min_entropy: Positive | None = 1e-6
    """Mean entropy of the policy's next token below which it has collapsed, nats."""
    max_entropy: Positive | None = 8.0
    """Mean entropy of the policy's next token above which it only guesses, nats."""
    policy_grad_norm: Positive | None = 1e4
    """Norm of the policy's gradient before it is clipped."""
    critic_grad_norm: Positive | None = 1e6
    """Norm of the critic's gradient before it is clipped."""
    logprob_gap: Positive | None = 1.0
    """Mean distance between engine's and trainer's logprobs of rows that the same weights sampled, nats."""
    outside_cut: Share | None = 0.1
    """Share of these tokens that the trainer finds outside of what top-p, top-k or min-p let the engine sample."""
    reward_drop: Positive | None = 1.5
    """How far the mean reward of the last versions may be below that of those before, in standard deviations over both;
    2 is the most there can be."""
    reward_versions: Count = 8
    """How many versions' rewards each of the two means is taken over."""
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
    """Where the trainer's figures go, besides the log: one record for each update."""

    jsonl: Flag = True
    """Append each record to figures.jsonl in the trainer's folder."""
    jsonl_mb: Positive = 64.0
    """Size, MB, at which the file is renamed to figures.1.jsonl; the one of that name before is deleted."""
    port: Port | None = None
    """Port of the trainer's own Prometheus endpoint; null: none."""
    host: str = "127.0.0.1"
    """Address of that endpoint. It shows figures to anyone who reaches it, and no text of a prompt."""
    tensorboard: Flag = False
    """Write event files to tensorboard/ in the trainer's folder; needs the package tensorboard."""
    wandb: str | None = None
    """Project of Weights & Biases that figures are sent to; needs the package wandb. null: none."""
    mlflow: str | None = None
    """Tracking URI of MLflow that figures are sent to; needs the package mlflow or mlflow-skinny. null: none."""
    timeout_s: NonNegative = 5.0
    """How long an orderly end waits for figures that are still to be sent."""
