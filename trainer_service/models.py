"""The models of a trainer, from any Hugging Face causal-LM folder: policy, critic and frozen reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from shared.errors import ConfigError, StartupError, first_line
from trainer_service import attention, head
from trainer_service.logprobs import Scores, score
from trainer_service.packing import MicroBatch

_CONVERTED = ("fp8", "mxfp4")  # quantized weights that Transformers converts when it loads them


def load_prepared(folder: Path) -> Any:
    """Load a causal LM for packed rows, in float32. Raises ConfigError, StartupError."""
    model = load_causal_lm(folder)
    prepare(model)
    return model


def load_causal_lm(folder: Path) -> Any:
    """Load a causal LM in float32, as Transformers computes it.

    Weights in 8-bit floats or MXFP4 are converted; other quantized weights cannot be trained. Raises ConfigError if
    the folder is none of a model, StartupError with the reason if the model cannot be loaded.
    """
    disable_progress_bar()
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is no model folder (no config.json in it); correct model.path")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _convert_weights(config, folder)
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as exc:
        reason = first_line(exc)
        raise StartupError(f"the model in {folder} cannot be loaded ({reason}); is it a whole causal LM?") from exc
    if missing := sorted(found["missing_keys"]):  # Transformers would begin with random weights
        raise StartupError(
            f"the model in {folder} lacks weights ({missing[0]}, {len(missing)} in all); is it a whole causal LM?"
        )
    return model


def _convert_weights(config: Any, folder: Path) -> None:
    """Have quantized weights converted when the model is loaded. Raises StartupError if they cannot be."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    if (method := quantization.get("quant_method")) not in _CONVERTED:
        raise StartupError(
            f"the model in {folder} is quantized ({method}), and the trainer needs whole weights; name the folder of "
            "the model that it was made from"
        )
    quantization["dequantize"] = True


def prepare(model: Any) -> None:
    """Install our attention and the chunked scoring head in a causal LM, if its code supports them.

    Its parameters and their names do not change. `self_test.check_rows` tests whether its logprobs change.
    """
    attention.use(model)
    head.install(model)


@torch.no_grad()
def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the model's parameters to a dtype. Buffers stay: rounded rotary frequencies would change positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def checkpoint_layers(model: Any, **options: Any) -> None:
    """Recompute the model's layers in the backward pass, without dropout. options: of PyTorch's `checkpoint`.

    Only layers in training mode are recomputed, and their code applies dropout then; so the rates are set to 0.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    for settings in (model.config.get_text_config(), *model.modules()):
        for name, value in vars(settings).items():
            if "drop" in name and isinstance(value, float):
                setattr(settings, name, 0.0)


def tie_equal_embeddings(model: Any) -> None:
    """Tie equal input and output embeddings: versions store them separately, but a tied model trains one parameter."""
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and torch.equal(head.weight, inputs.weight):
        head.weight = inputs.weight


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a model's files by their names there. A tied weight has several names."""
    weights: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    kept = model.state_dict(keep_vars=True)
    return weights | {name: tensor for name, tensor in kept.items() if name not in weights}


class Actor(nn.Module):
    """The policy as the module that is trained."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def train(self, mode: bool = True) -> Actor:
        """Keep dropout off: the forward passes before the first step and the steps must use the same policy.

        Only layers that are recomputed in the backward pass get the training mode, because they check it.
        """
        super().train(False)
        for layer in self.modules():
            layer.training = mode and bool(getattr(layer, "gradient_checkpointing", False))
        return self

    def forward(self, micro: MicroBatch, **wanted: Any) -> Scores:
        """Return scores of the micro-batch's actions. wanted: see `head.Question`.

        Sequences are packed into one row; attention does not cross their boundaries.
        """
        wanted.pop("values", None)
        return score_actions(self.policy, micro, **wanted)


class ValueHead(nn.Linear):
    """Maps a hidden state to one value, computed in float32 with any weights. The initial weights are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_KD: Tensor) -> Tensor:
        """[K]"""
        wide = torch.promote_types(hidden_KD.dtype, torch.float32)
        return F.linear(hidden_KD.to(wide), self.weight.to(wide), self.bias.to(wide)).squeeze(-1)


class ActorCritic(Actor):
    """Policy and critic as one module, so that one DeepSpeed engine updates both.

    The critic has its own trunk, a copy of the policy's, and a head.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.trunk = copy.deepcopy(policy.base_model)
        self.value_head = ValueHead(policy.config.get_text_config().hidden_size)

    def forward(self, micro: MicroBatch, *, values: bool = True, **wanted: Any) -> Scores:
        """Like the actor's; with `values` also those of the critic."""
        scores = super().forward(micro, **wanted)
        if values:
            hidden_KD = hidden_states(self.trunk, micro)
            scores["values"] = self.value_head(hidden_KD)
        return scores

    def critic_parameters(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *self.value_head.parameters()]


def score_actions(model: Any, micro: MicroBatch, **wanted: Any) -> Scores:
    """Return a causal LM's scores of the micro-batch's actions, without values. wanted: see `head.Question`."""
    layer = model.get_output_embeddings()
    if isinstance(layer, head.ScoringHead):
        question = head.Question(micro.actions_K, micro.sampling, **wanted)
        return layer.score(hidden_states(model.base_model, micro), question)
    logits_KV = _as_row(model(**inputs(model, micro)).logits, micro)[micro.keep_K]
    wide_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
    return score(wide_KV, micro.actions_K, micro.sampling, **wanted)


def hidden_states(trunk: Any, micro: MicroBatch) -> Tensor:
    """Return the last hidden states at the positions that predict actions: [K, hidden size]."""
    return _as_row(trunk(**inputs(trunk, micro)).last_hidden_state, micro)[micro.keep_K]


def inputs(model: Any, micro: MicroBatch) -> dict[str, Any]:
    """Return the keywords of a model's call for a micro-batch."""
    if micro.apart:
        ids_BT = pad_sequence(list(torch.split(micro.input_ids_1T[0], micro.layout.lengths)), batch_first=True)
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        return {"input_ids": ids_BT, "position_ids": positions_BT, "use_cache": False}
    row = {"input_ids": micro.input_ids_1T, "position_ids": micro.position_ids_1T, "use_cache": False}
    if model.config._attn_implementation != attention.NAME:
        assert not micro.layout.folded, "only our attention computes folded rows"
        return row
    return {**row, **micro.layout.kwargs(micro.input_ids_1T.device)}


def _as_row(made_BTX: Tensor, micro: MicroBatch) -> Tensor:
    """Return a model's outputs for the tokens of a micro-batch, one after another: [T, X].

    Padding follows the sequences, so that none of their tokens attends to it.
    """
    if not micro.apart:
        return made_BTX[0]
    return torch.cat([made_TX[:length] for made_TX, length in zip(made_BTX, micro.layout.lengths, strict=True)])
