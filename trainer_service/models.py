"""The models of a PPO trainer, from any Hugging Face causal-LM folder: policy, critic and frozen reference.

Shapes: T tokens of one packed row, K positions at which an action was sampled, V vocabulary.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from shared.errors import StartupError


def load_causal_lm(folder: Path) -> Any:
    """A causal LM in float32. Raises StartupError naming the folder and what is wrong with it."""
    disable_progress_bar()
    if not (folder / "config.json").exists():
        raise StartupError(f"{folder} is no model folder (no config.json in it); correct model.path")
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as exc:
        reason = str(exc).strip().split("\n")[0]
        raise StartupError(f"the model in {folder} cannot be loaded ({reason}); is it a whole causal LM?") from exc


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that one DeepSpeed engine steps both.

    The critic is a trunk of its own, a copy of the base's, with a linear head that begins at zero: values begin at 0.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.trunk = copy.deepcopy(policy.base_model)
        self.value_head = nn.Linear(policy.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids_1T: Tensor, position_ids_1T: Tensor, keep_K: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and values where actions were sampled: [K, V] float32 and [K] float32.

        Sequences are packed into one row: position ids begin at 0 with each, and attention does not cross them.
        """
        logits_KV = logits_at(self.policy, input_ids_1T, position_ids_1T, keep_K)
        hidden_1TD = self.trunk(input_ids=input_ids_1T, position_ids=position_ids_1T, use_cache=False).last_hidden_state
        values_K = self.value_head(hidden_1TD[0, keep_K]).squeeze(-1)
        return logits_KV, values_K.float()

    def critic_parameters(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *self.value_head.parameters()]


def logits_at(model: Any, input_ids_1T: Tensor, position_ids_1T: Tensor, keep_K: Tensor) -> Tensor:
    """Logits at the kept positions alone: [K, V] float32."""
    output = model(input_ids=input_ids_1T, position_ids=position_ids_1T, logits_to_keep=keep_K, use_cache=False)
    logits_KV: Tensor = output.logits[0].float()
    return logits_KV
