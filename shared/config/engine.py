"""Section `engine`: how vLLM is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.base import NUMBER, Count, Positive, Section, matches

_SAMPLING = "rows say how they were sampled by the model's generation_config.json; write it there, or send it in chats"
_REFUSED: Mapping[str, str] = {
    "--generation-config": _SAMPLING,
    "--override-generation-config": _SAMPLING,
    "--logprobs-mode": "the trainer needs the logprobs that tokens were sampled by",
    "--tool-strict-level": "rows would not say which tokens it constrains; send tools with strict: true instead",
    "--model": "set model.path",
    "--served-model-name": "set model.name",
}
_TOKEN = matches("[!-~]+", "printable ASCII characters without spaces")


def refusal_of_argument(argument: str) -> str | None:
    """Return why vLLM must not get this argument, and what to do instead; None: it may."""
    return _REFUSED.get(re.split(r"[=.]", argument, maxsplit=1)[0].replace("_", "-"))  # vLLM normalizes names like this


class EngineConfig(Section):
    """How `flywheel engine` starts vLLM."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in the engine; auto: as in the model's config.json."""
    max_model_len: Count | None = None
    """Maximum length of prompt and reply together, in tokens; null: the model's own."""
    kv_cache_gb: Count = 1
    """Size of the KV cache on a CPU, whole GB. (On a GPU: gpu_share.)"""
    gpu_share: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    """Share of a GPU's memory that each engine uses, to leave room for a trainer or another engine; null: vLLM's
    default of 0.9."""
    tool_parser: str | None = None
    """vLLM's --tool-call-parser; setting it enables tools."""
    start_timeout_s: Positive = 900.0
    """Time limit of an engine's start, until it is warm."""
    host: str | None = None
    """Address that an engine listens on; null: the address of its url in explorer.engines."""
    admin_token: Annotated[str, Field(min_length=16), _TOKEN] | None = Field(default=None, repr=False)
    """Token that explorers send to engines that they administer; null: a file in root_dir, created at the first start.
    Set it preferably as FLYWHEEL_ENGINE__ADMIN_TOKEN, for engines and explorers alike."""
    staging_dir: str | None = None
    """A folder on the engine's own disk. The next version is copied there while the engine serves, so that the pause
    only includes reading it from there; null: versions are loaded from root_dir. Relative to the configuration file.
    Needs space for keep_staged + 1 versions of each engine."""
    keep_staged: Annotated[int, Field(ge=2, strict=True)] = 2
    """Number of versions to keep in staging_dir: the last requested ones. The next delta applies to one of them."""
    max_loras: Annotated[int, Field(ge=2, strict=True)] = 4
    """With model.kind: lora, number of versions that an engine computes at once; requests for others wait, and so does
    the proof of a new one. Each uses memory: the newest, older ones until their last requests end, and pins. So many
    versions can share the chats."""
    max_cpu_loras: Count | None = None
    """With model.kind: lora, number of versions that an engine serves: the newest, the one that it is loading, those
    with shares of the chats, and the most recently used pins; null: twice max_loras."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for vLLM's server, as on its command line; those that training depends on are rejected."""

    @property
    def versions_held(self) -> int:
        """Number of adapters that an engine can hold."""
        return 2 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @field_validator("extra_args")
    @classmethod
    def _check_arguments(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            if reason := refusal_of_argument(argument):
                raise ValueError(f"engine.extra_args may not hold {argument!r}: {reason}")
        return arguments

    @model_validator(mode="after")
    def _check_loras(self) -> EngineConfig:
        if self.versions_held < max(3, self.max_loras):
            raise ValueError(
                f"engine.max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}, or leaves no room "
                f"for a pin; set at least {max(3, self.max_loras)}"
            )
        return self
