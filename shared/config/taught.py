"""Settings of the algorithms that learn from a teacher's opinion of each token."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from shared.config.base import NUMBER, Count, Finite, NonNegative, Positive
from shared.config.surrogate import RewardSignals, SurrogateConfig

Wording = Annotated[str, Field(pattern=r"^[^{}]*\{text\}[^{}]*$", max_length=2000)]


class TaughtConfig(SurrogateConfig):
    """What they share."""

    advantage_bound: Positive = 2.0
    """c: the teacher moves no token by more than this, in nats."""
    mean: Literal["tokens"] = "tokens"
    """What losses are means over: all tokens that the teacher teaches."""

    def check_in_use(self, key: str) -> None:
        for name in ("outlier_bound", "normalize_rewards"):
            if name in self.model_fields_set:
                raise ValueError(f"{key}.{name} is set, and no reward is learnt from here; remove it")


class HintConfig(TaughtConfig):
    """Words as a teacher: the policy that has read what was said of a reply teaches the one that has not."""

    learns_from: ClassVar[frozenset[str]] = frozenset({"comment", "correction"})

    comment: Wording | None = "An earlier answer to the conversation below got this feedback: {text}"
    """What the teacher reads of a comment, with {text} in its place; null: comments are not used."""
    correction: Wording | None = "This would have been a right answer to the conversation below: {text}"
    """What the teacher reads of a correction; null: corrections are not used."""
    next_message: Wording | None = "To an earlier answer to the conversation below the user replied: {text}"
    """What the teacher reads of the user's next message in the same conversation; null: next messages are not used."""
    top_k: Annotated[int, Field(ge=0, strict=True)] = 20
    """Learn the teacher's distribution over so many of its likeliest tokens and all others as one class, instead of the
    sampled token's advantage; 0: the sampled token alone."""
    teacher: Literal["live", "average", "version"] = "average"
    """Who reads the words: the policy that the batch begins with; a running average of its weights; the policy of the
    version that was published last. Under ZeRO 3 only the first."""
    teacher_decay: Annotated[float, Field(gt=0, le=1), NUMBER] = 0.999
    """What an update leaves of the average; 1: all: the teacher stays the policy with which the trainer began."""
    kl_coef: NonNegative = 0.0
    """β of the per-token KL penalty towards the base model; with 0 the base model is not loaded."""
    max_hint_tokens: Count = 512
    """Tokens of all words of one turn together; what is longer is cut."""
    least_effect: NonNegative = 0.01
    """Words that change a turn's tokens by less than this, as a mean in nats, are left out."""
    neutral_reward: Finite | Literal["auto"] | None = "auto"
    """Words are left out where the teacher finds a turn with a reward above this less likely, or one with a reward
    below it likelier; auto: by the mean and the range of the rewards seen; null: never."""

    @property
    def learned(self) -> frozenset[str]:
        return frozenset(kind for kind in self.learns_from if getattr(self, kind) is not None)

    @property
    def learned_again(self) -> frozenset[str]:
        return self.learned if self.top_k else frozenset()

    def check_in_use(self, key: str) -> None:
        super().check_in_use(key)
        if self.comment is None and self.correction is None and self.next_message is None:
            raise ValueError(
                f"{key}: comment, correction and next_message are all null, so that nothing is learnt; give one of "
                "them a wording with {text}"
            )
        if "teacher_decay" in self.model_fields_set and self.teacher != "average":
            raise ValueError(f"{key}.teacher_decay is set, and {key}.teacher={self.teacher}; remove it, or set average")


class DistillConfig(TaughtConfig):
    """Distillation on the policy's own samples (Agarwal et al. 2024): another model says how likely each token is."""

    learns_from: ClassVar[frozenset[str]] = RewardSignals | {"comment", "correction", "preferred_over"}

    path: str | None = None
    """The teacher's folder: it is loaded beside the policy."""
    url: str | None = None
    """Instead of a folder: the teacher's server, without /v1; it must give prompt_logprobs, as vLLM does."""
    model: str | None = None
    """The teacher's name at its server; null: the first one that the server lists."""
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """The environment variable with the server's key; null: it wants none."""
    timeout_s: Positive = 60.0
    """How long one answer of the server may take; then it is asked again."""
    requests_in_flight: Count = 8
    """Requests that the server is sent at once."""

    def check_in_use(self, key: str) -> None:
        super().check_in_use(key)
        if (self.path is None) == (self.url is None):
            raise ValueError(
                f"{key}: path={self.path!r} and url={self.url!r}; set one of them, to where the teacher is"
            )
        if self.url is not None and not _is_address(self.url):
            raise ValueError(f"{key}.url={self.url!r} is no address; write http://HOST:PORT, without /v1")


def _is_address(url: str) -> bool:
    """Whether it says how to speak to which server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
