"""Section `engine`: how vLLM is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.base import NUMBER, Count, Positive, Section

_SAMPLING = "rows say how they were sampled by the model's generation_config.json; write it there, or send it in chats"
_REFUSED: Mapping[str, str] = {
    "--generation-config": _SAMPLING,
    "--override-generation-config": _SAMPLING,
    "--logprobs-mode": "the trainer needs the logprobs that tokens were sampled by",
    "--model": "set model.path",
    "--served-model-name": "set model.name",
}


def refusal_of_argument(argument: str) -> str | None:
    """Why vLLM may not be given this argument, or what to do instead; None: it may."""
    return _REFUSED.get(re.split(r"[=.]", argument, maxsplit=1)[0].replace("_", "-"))  # as vLLM reads a name


class EngineConfig(Section):
    """How `flywheel engine` starts vLLM."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' type in the engine; auto: as the model's config.json says."""
    max_model_len: Count | None = None
    """Longest prompt and reply together, tokens; null: the model's own."""
    kv_cache_gb: Count = 1
    """KV cache on a CPU, whole GB. (On a GPU: gpu_share.)"""
    gpu_share: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    """The part of a GPU's memory that each engine takes, so that a trainer or another engine has room beside it; null:
    vLLM's default of 0.9."""
    tool_parser: str | None = None
    """vLLM's --tool-call-parser; set, tools are on."""
    start_timeout_s: Positive = 900.0
    """How long the engine may take from start to warm."""
    host: str | None = None
    """Address that an engine listens on; null: the address of its url in explorer.engines."""
    admin_token: Annotated[str, Field(min_length=16, pattern=r"^[!-~]+$")] | None = Field(default=None, repr=False)
    """What explorers show to engines that they administer; null: a file in root_dir holds one, made at the first start.
    Best given as FLYWHEEL_ENGINE__ADMIN_TOKEN, to engines and explorers alike."""
    staging_dir: str | None = None
    """A folder on the engine's own disk, to which the next version is copied while the engine serves, so that only
    reading it from there remains for the pause; null: versions are loaded from root_dir. Relative to the configuration
    file. Has room for keep_staged + 1 versions of each engine."""
    keep_staged: Annotated[int, Field(ge=2, strict=True)] = 2
    """Versions that stay in staging_dir: the last ones asked for. The next delta is applied to one of them."""
    max_loras: Annotated[int, Field(ge=2, strict=True)] = 4
    """With model.kind: lora, how many versions an engine computes at once; requests for one more wait. Each takes
    memory: the newest, those before it while their last requests end, and pins."""
    max_cpu_loras: Count | None = None
    """With model.kind: lora, how many versions an engine serves: the newest, the one that it takes up, and the pins
    that were used last; null: twice max_loras."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for vLLM's server, as on its command line; those that learning depends on are refused."""

    @property
    def versions_held(self) -> int:
        """How many adapters an engine holds."""
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
