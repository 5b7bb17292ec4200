"""Section `model`: the model that is served and trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.base import Finite, Name, Positive, Section, require_distinct

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank accepts
_REFUSED = {
    "dora": "engines do not load DoRA",
    "use_dora": "engines do not load DoRA",
    "rslora": "set alpha to what rsLoRA would scale by",
    "use_rslora": "set alpha to what rsLoRA would scale by",
    "bias": "engines do not load biases of adapters",
    "lora_bias": "engines do not load biases of adapters",
    "modules_to_save": "engines load no whole modules beside an adapter; model.kind: full trains all weights",
}
_ENDS = ("lm_head", "embed_out", "embed_tokens", "wte", "wpe", "word_embeddings")


class LoraConfig(Section):
    """The adapter that `model.kind: lora` trains on the frozen base model."""

    rank: Annotated[int, Field(ge=1, le=_VLLM_RANKS[-1], strict=True)] = 16
    """Rank of the adapter. Engines reserve memory for the next of 1, 8, 16, 32, 64, 128, 256, 320 and 512."""
    alpha: Positive = 32.0
    """The adapter's product is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """The linear layers to adapt: all except the output layer, or a list of last parts of their names, such as
    `[q_proj, v_proj]`."""
    dropout: Finite = 0.0
    """Always 0: the policy that scores a batch must be the one that is trained on it."""

    @property
    def engine_rank(self) -> int:
        """The rank that engines are started with: the smallest one that vLLM accepts and that is large enough."""
        return next(rank for rank in _VLLM_RANKS if rank >= self.rank)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key in _REFUSED:
                raise ValueError(f"model.lora.{key}={given[key]!r} cannot be trained: {_REFUSED[key]}; remove it")
        return given

    @field_validator("targets", mode="before")
    @classmethod
    def _check_form(cls, given: Any) -> Any:
        is_list = isinstance(given, list | tuple) and given and all(isinstance(name, str) for name in given)
        if given != "all-linear" and not is_list:
            raise ValueError(
                f"model.lora.targets={given!r} names no layers; write all-linear, or a list such as [q_proj, v_proj]"
            )
        return given

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, targets: Any) -> Any:
        if isinstance(targets, tuple):
            require_distinct("model.lora.targets", targets)
            if ends := [name for name in targets if name.rpartition(".")[2] in _ENDS]:
                raise ValueError(
                    f"model.lora.targets: {ends[0]!r} is an embedding or the output layer, which engines do not adapt "
                    "as the trainer does; name layers between them, or set all-linear"
                )
        return targets

    @field_validator("dropout")
    @classmethod
    def _check_dropout(cls, dropout: float) -> float:
        if dropout != 0:
            raise ValueError(
                f"model.lora.dropout={dropout:g} would score each batch by another policy than it trains; set 0, and "
                "lower alpha or rank against overfitting"
            )
        return dropout


class ModelConfig(Section):
    """The model that is served and trained."""

    name: Name = "agent"
    """The name that callers send as `model`; `name@VERSION` pins a version."""
    path: str
    """A Hugging Face causal-LM folder: config.json, safetensors, tokenizer. Relative to the configuration file."""
    kind: Literal["full", "lora"] = "full"
    """What a version contains: `full`, all weights; `lora`, an adapter of the base model."""
    lora: LoraConfig = LoraConfig()
    """The adapter, with `kind: lora`."""

    @model_validator(mode="after")
    def _check_lora(self) -> ModelConfig:
        if self.kind == "full" and "lora" in self.model_fields_set:
            raise ValueError("model.lora is set, and model.kind is full; set model.kind: lora, or remove the section")
        return self
