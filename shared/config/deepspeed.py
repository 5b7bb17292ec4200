"""The keys that `trainer.deepspeed` accepts: DeepSpeed's own, except those that the trainer sets."""

from __future__ import annotations

import difflib
from typing import Any

_INSTEAD = {
    **dict.fromkeys(("bf16", "fp16", "amp"), "trainer.precision: bf16 or float32"),
    "gradient_clipping": "trainer.max_grad_norm",
    "gradient_accumulation_steps": "trainer.minibatches and trainer.max_tokens_per_micro_batch",
    "train_micro_batch_size_per_gpu": "trainer.max_tokens_per_micro_batch",
    "train_batch_size": "trainer.batch_size",
    "activation_checkpointing": "trainer.gradient_checkpointing",
}
_SECTIONS = ("optimizer", "scheduler", "zero_optimization", "data_types", "flops_profiler")
_OTHERS = (
    "communication_data_type", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "dump_state",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "comms_logger", "tensorboard", "wandb", "csv_monitor", "aio",
)  # fmt: skip
_UNSAVED = ("adafactor", "asgd", "muon", "nadam")  # optimizers whose values do not all have their weight's shape
_LIKE = 0.8  # similarity above which an unknown key is a typing error: DeepSpeed has more keys than these


def check_deepspeed(keys: dict[str, Any]) -> None:
    """Raise ValueError for keys that the trainer sets, values that are no sections, and likely typing errors."""
    for key, value in keys.items():
        name = f"trainer.deepspeed.{key}"
        if key in _INSTEAD:
            raise ValueError(f"{name} is not taken; set {_INSTEAD[key]}")
        if key in _SECTIONS:
            _require_section(name, value)
            if key in ("optimizer", "scheduler") and "params" in value:
                _require_section(f"{name}.params", value["params"])
            if key == "optimizer" and str(value.get("type")).lower() in _UNSAVED:
                raise ValueError(
                    f"{name}.type={value['type']}: a saved state cannot contain what it keeps for a weight; name "
                    "another one, such as AdamW"
                )
        elif key not in _OTHERS and (near := difflib.get_close_matches(key, _SECTIONS + _OTHERS, 1, _LIKE)):
            raise ValueError(f"{name} is no key of DeepSpeed's; did you mean {near[0]!r}?")


def _require_section(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r}: must be a section with keys of its own; remove it, or give it some")
