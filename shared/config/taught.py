"""Settings of the algorithms in which a teacher scores each token."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from shared.config.base import NUMBER, Count, Finite, NonNegative, Positive, Variable, matches
from shared.config.surrogate import SCORES, Kind, SurrogateConfig

_FORM = matches(r"[^{}]*\{text\}[^{}]*", "a text with {text} in it once, and without other braces")
Wording = Annotated[str, Field(max_length=2000), _FORM]


class TaughtConfig(SurrogateConfig):
    """Common settings of these algorithms."""

    advantage_bound: Positive = 2.0
    """c: bound on a token's advantage from the teacher, in nats."""
    mean: Literal["tokens"] = "tokens"
    """What losses average over: all tokens that the teacher scores."""

    def check_in_use(self, key: str) -> None:
        super().check_in_use(key)
        for name in ("outlier_bound", "normalize_rewards"):
            if name in self.model_fields_set:
                raise ValueError(f"{key}.{name} is set, and no reward is learnt from here; remove it")


class HintConfig(TaughtConfig):
    """Words as a teacher: the policy with words about a reply in its prompt teaches the policy without them."""

    learns_from: ClassVar[frozenset[Kind]] = frozenset({"comment", "correction"})

    comment: Wording | None = "An earlier answer to the conversation below got this feedback: {text}"
    """The teacher's text for a comment, which replaces {text}; null: comments are not used."""
    correction: Wording | None = "This would have been a right answer to the conversation below: {text}"
    """The teacher's text for a correction; null: corrections are not used."""
    next_message: Wording | None = "To an earlier answer to the conversation below the user replied: {text}"
    """The teacher's text for the user's next message in the same conversation; null: next messages are not used."""
    top_k: Annotated[int, Field(ge=0, strict=True)] = 20
    """Number of the teacher's most likely tokens whose distribution is learned, with all others as one class; 0: learn
    from the sampled token's advantage instead."""
    teacher: Literal["live", "average", "version"] = "average"
    """The policy that reads the words: the one at the start of the batch; a running average of its weights; that of the
    last published version. Under ZeRO 3 only the first."""
    teacher_decay: Annotated[float, Field(gt=0, le=1), NUMBER] = 0.999
    """Weight of the old average in each update; 1: the teacher stays the policy that the trainer started with."""
    kl_coef: NonNegative = 0.0
    """β of the per-token KL penalty towards the base model; with 0 the base model is not loaded."""
    max_hint_tokens: Count = 512
    """Maximum number of tokens of all words about one turn; longer texts are truncated."""
    least_effect: NonNegative = 0.01
    """Leave out words whose mean effect on a turn's tokens is below this, in nats."""
    neutral_reward: Finite | Literal["auto"] | None = "auto"
    """Leave out words if the teacher makes a turn with a reward above this less likely, or one with a reward below it
    more likely; auto: by the mean and the range of recent rewards; null: never."""

    @property
    def learned(self) -> frozenset[Kind]:
        return frozenset(kind for kind in self.learns_from if getattr(self, kind) is not None)

    @property
    def learned_again(self) -> frozenset[Kind]:
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
    """Distillation on the policy's own samples (Agarwal et al. 2024): another model scores each token."""

    learns_from: ClassVar[frozenset[Kind]] = SCORES | {"comment", "correction", "preferred_over"}

    path: str | None = None
    """The teacher's folder, which is loaded next to the policy."""
    url: str | None = None
    """Instead of a folder: the teacher's server, without /v1; it must return prompt_logprobs, as vLLM does."""
    model: str | None = None
    """The teacher's name at its server; null: the first one that the server lists."""
    key_env: Variable | None = None
    """Environment variable with the server's key; null: the server needs none."""
    timeout_s: Positive = 60.0
    """Time limit of one request to the server, after which it is repeated."""
    requests_in_flight: Count = 8
    """Number of concurrent requests to the server."""

    def check_in_use(self, key: str) -> None:
        super().check_in_use(key)
        if (self.path is None) == (self.url is None):
            found = "neither of path and url is set" if self.url is None else "both of path and url are set"
            raise ValueError(f"{key}: {found}; set one of them, to where the teacher is")
        for name in ("model", "key_env", "timeout_s", "requests_in_flight"):
            if self.url is None and name in self.model_fields_set:
                raise ValueError(f"{key}.{name} is set, and {key}.url is not; it is for a server alone; remove it")
        if self.url is not None and not _is_address(self.url):
            raise ValueError(
                f"{key}.url is no address; write http://HOST:PORT, without /v1, user, password and options"
            )


def _is_address(url: str) -> bool:
    """Whether it names a scheme and a server, and holds no password: logs show it."""
    try:
        parts = urlsplit(url)
        is_plain = not ("@" in url or parts.query or parts.fragment)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and is_plain
    except ValueError:
        return False
