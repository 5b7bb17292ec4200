"""The keys that `trainer.deepspeed` accepts: DeepSpeed's own, except those that the trainer sets."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

_INSTEAD = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp"), "trainer.precision: bf16 or float32"),
    "gradient_clipping": "trainer.max_grad_norm",
    "gradient_accumulation_steps": "trainer.minibatches and trainer.max_tokens_per_micro_batch",
    "train_micro_batch_size_per_gpu": "trainer.max_tokens_per_micro_batch",
    "train_batch_size": "trainer.batch_size",
    "activation_checkpointing": "trainer.gradient_checkpointing",
}
_SECTIONS = ("optimizer", "scheduler", "zero_optimization", "data_types", "flops_profiler")
_OTHERS = (
    "aio", "autotuning", "checkpoint", "comet", "comms_logger", "communication_data_type", "compile", "csv_monitor",
    "data_efficiency", "data_parallel_size", "dataloader_drop_last", "datastates_ckpt", "disable_allgather",
    "disable_python_gc", "dump_state", "expert_parallel", "gradient_allreduce_op", "gradient_predivide_factor",
    "hybrid_engine", "log_level", "managed_gradient_accumulation", "memory_breakdown", "pipeline",
    "prescale_gradients", "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print",
    "tensor_parallel", "tensorboard", "timers", "torch_autocast", "use_data_before_expert_parallelism",
    "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)  # fmt: skip
_REMOVED = (  # DeepSpeed refuses them itself, and says what to do instead
    "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula",
    "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients",
)  # fmt: skip
_OF_A_PART = {"optimizer": ("type", "params", "legacy_fusion"), "scheduler": ("type", "params")}
PLACES = {
    "zero_optimization": (
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm",
        "load_from_fp32_weights", "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow",
        "sub_group_size", "cpu_offload_param", "cpu_offload_use_pin_memory", "cpu_offload", "prefetch_bucket_size",
        "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params",
        "allgather_sequential", "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters",
        "legacy_stage1", "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size",
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
        "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
    ),
    "optimizer.params": (
        "lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad", "bias_correction", "fused",
        "torch_adam", "adam_w_mode",
    ),
    "scheduler.params": (
        "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "warmup_min_ratio", "cos_min_ratio",
        "total_num_steps", "cycle_min_lr", "cycle_max_lr", "cycle_first_step_size", "lr_range_test_min_lr",
        "lr_range_test_step_size",
    ),
}  # fmt: skip
"""Keys that are often written one level too high, by the section that they belong under; those of ZeRO are complete."""
_UNSAVED = ("adafactor", "asgd", "muon", "nadam")  # optimizers whose values do not all have their weight's shape


def check_deepspeed(keys: dict[str, Any]) -> None:
    """Raise ValueError for keys that the trainer sets, values that are no sections, and unknown keys.

    DeepSpeed ignores unknown keys at the top, in `optimizer` and in `scheduler`; it checks the other sections itself.
    """
    for key, value in keys.items():
        name = f"trainer.deepspeed.{key}"
        if key in _INSTEAD:
            raise ValueError(f"{name} is not taken; set {_INSTEAD[key]}")
        if key not in _REMOVED:
            _require_known(name, key, _SECTIONS + _OTHERS)
        if key in _SECTIONS:
            _require_section(name, value)
        if key in _OF_A_PART:
            for inner in value:
                _require_known(f"{name}.{inner}", inner, _OF_A_PART[key])
            if "params" in value:
                _require_section(f"{name}.params", value["params"])
        if key == "optimizer" and str(value.get("type")).lower() in _UNSAVED:
            raise ValueError(
                f"{name}.type={value['type']}: a saved state cannot contain what it keeps for a weight; name "
                "another one, such as AdamW"
            )


def _require_known(name: str, key: Any, known: Sequence[str]) -> None:
    if key in known:
        return
    for section, its in PLACES.items():
        if key in its:
            raise ValueError(f"{name} belongs under trainer.deepspeed.{section}; move it there")
    near = difflib.get_close_matches(str(key), known, 1)
    what_to_do = f"did you mean {near[0]!r}?" if near else "correct or remove it"
    raise ValueError(f"{name} is no key of DeepSpeed's; {what_to_do}")


def _require_section(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r}: must be a section with keys of its own; remove it, or give it some")
