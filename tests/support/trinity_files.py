"""Configurations like Trinity-RFT's, newly written from the names and defaults of its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from services.trinity.convert import Conversion, convert
from services.trinity.read import read

EXPLORER = """
mode: serve
project: shop
name: desk
checkpoint_root_dir: /shared
model: {model_path: /models/base, max_model_len: 8192, max_response_tokens: 2048, temperature: 0.7}
algorithm: {algorithm_type: ppo}
cluster: {node_num: 1, gpu_per_node: 4}
explorer:
  rollout_model: {engine_num: 2, tensor_parallel_size: 2, enable_openai_api: true, enable_history: true,
                  enable_auto_tool_choice: true, tool_call_parser: hermes, dtype: bfloat16, seed: 42}
  service_status_check_interval: 10
  proxy_port: 8010
buffer:
  train_batch_size: 16
  trainer_input: {experience_buffer: {name: experiences, storage_type: sql}}
synchronizer: {sync_method: checkpoint, sync_interval: 1}
monitor: {monitor_type: tensorboard}
"""
TRAINER = """
mode: train
project: shop
name: desk
checkpoint_root_dir: /shared
model: {model_path: /models/base, max_model_len: 8192, max_response_tokens: 2048, temperature: 0.7}
algorithm: {algorithm_type: ppo}
cluster: {node_num: 1, gpu_per_node: 4}
buffer:
  train_batch_size: 32
  trainer_input: {experience_buffer: {name: experiences, storage_type: sql}}
trainer:
  save_interval: 16
  ulysses_sequence_parallel_size: 1
  save_hf_checkpoint: always
  max_checkpoints_to_keep: 5
  trainer_config: {trainer: {balance_batch: false, max_actor_ckpt_to_keep: 5, max_critic_ckpt_to_keep: 5}}
synchronizer: {sync_method: checkpoint, sync_interval: 1}
monitor: {monitor_type: tensorboard}
"""
REACT = """
model: {model_path: /models/base, max_model_len: 16384}
algorithm: {algorithm_type: grpo, advantage_fn: step_wise_grpo}
explorer:
  rollout_model: {enable_openai_client: true, enable_history: true, enable_auto_tool_choice: true,
                  tool_call_parser: hermes, reasoning_parser: deepseek_r1, enable_thinking: true}
synchronizer: {sync_style: dynamic_by_explorer, sync_interval: 2}
"""

_TASKS = "buffer.explorer_input.taskset."
_EVAL = "buffer.explorer_input.eval_tasksets"
_ROWS = "buffer.trainer_input.experience_buffer."
_ACTOR = "trainer.trainer_config.actor_rollout_ref.actor."
_EXPERTS = "buffer.trainer_input.auxiliary_buffers.experts."
_BASE: dict[str, Any] = {
    "project": "examples",
    "name": "one",
    "checkpoint_root_dir": "${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}",
    "model.model_path": "${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-1.5B-Instruct}",
    "model.max_model_len": 4096,
    "model.max_response_tokens": 1024,
    "cluster.node_num": 1,
    "cluster.gpu_per_node": 8,
    "buffer.total_epochs": 1,
    "buffer.batch_size": 32,
    "explorer.runner_per_model": 8,
    "explorer.eval_interval": 50,
    "explorer.rollout_model.engine_num": 2,
    "explorer.rollout_model.tensor_parallel_size": 1,
    "explorer.rollout_model.enforce_eager": True,
    "explorer.rollout_model.enable_prefix_caching": False,
    "explorer.rollout_model.seed": 42,
    "synchronizer.sync_method": "nccl",
    "synchronizer.sync_interval": 2,
    "synchronizer.sync_timeout": 1200,
    "trainer.save_interval": 100,
    "trainer.grad_clip": 1.0,
}
_WITH_TASKS: dict[str, Any] = {
    **_BASE,
    _TASKS + "name": "tasks",
    _TASKS + "storage_type": "file",
    _TASKS + "path": "tasks.jsonl",
    _TASKS + "split": "train",
    _TASKS + "format.prompt_key": "question",
    _TASKS + "format.response_key": "answer",
    _TASKS + "rollout_args.temperature": 1.0,
    "buffer.explorer_input.default_workflow_type": "math_workflow",
    _ROWS + "name": "rows",
    _ROWS + "storage_type": "queue",
}
_GRPO = {**_WITH_TASKS, "algorithm.algorithm_type": "grpo", "algorithm.repeat_times": 8, "algorithm.optimizer.lr": 1e-5}
_OLD: dict[str, Any] = {
    "data.total_epochs": 20,
    "data.batch_size": 4,
    "data.dataset_path": "scripts/tasks",
    "data.train_split": "train",
    "data.eval_split": "",
    "data.format.prompt_key": "game_file",
    "model.model_path": "/models/base",
    "model.max_prompt_tokens": 4096,
    "model.max_response_tokens": 16384,
    "model.checkpoint_path": "checkpoints/games",
    "cluster.gpu_per_node": 8,
    "buffer.max_retry_times": 3,
    "buffer.train_dataset.storage_type": "queue",
    "buffer.train_dataset.path": "sqlite:///games.db",
    "explorer.engine_type": "vllm_async",
    "explorer.engine_num": 2,
    "explorer.tensor_parallel_size": 2,
    "explorer.runner_num": 32,
    "explorer.repeat_times": 8,
    "explorer.temperature": 1.0,
    "explorer.enable_chunked_prefill": True,
    "explorer.gpu_memory_utilization": 0.7,
    "explorer.backend": "nccl",
    "synchronizer.sync_method": "nccl",
    "synchronizer.sync_interval": 8,
    "trainer.trainer_type": "verl",
    "trainer.algorithm_type": "grpo",
    "trainer.trainer_config_path": "train.yaml",
    "monitor.project": "games",
    "monitor.name": "one",
}

KINDS: dict[str, dict[str, Any]] = {
    "ppo": {**_WITH_TASKS, "algorithm.algorithm_type": "ppo", "algorithm.repeat_times": 5,
            "trainer.trainer_config.critic.cliprange_value": 0.5, _ACTOR + "checkpoint.save_contents": ["model"]},
    "ppo_megatron": {**_WITH_TASKS, "algorithm.algorithm_type": "ppo", "trainer.trainer_strategy": "megatron",
                     "trainer.megatron.tensor_model_parallel_size": 2},
    "grpo": _GRPO,
    "grpo_eval": {**_GRPO, _EVAL: [{"name": "held-out", "path": "held_out.jsonl", "split": "test", "repeat_times": 4,
                                    "rollout_args": {"top_p": 0.8, "top_k": 20}}]},
    "grpo_lora": {**_GRPO, "model.lora_configs": [{"name": "lora", "lora_rank": 32, "lora_alpha": 32}]},
    "grpo_frozen_lake": {**_GRPO, _TASKS + "workflow_args.max_steps": 10, "model.temperature": 0.7,
                         "algorithm.policy_loss_fn_args.clip_range_low": 0.2,
                         "algorithm.policy_loss_fn_args.clip_range_high": 0.28,
                         "algorithm.policy_loss_fn_args.loss_agg_mode": "seq-mean-token-sum",
                         "algorithm.kl_loss_fn_args.kl_coef": 0.0, _ACTOR + "fsdp_config.param_offload": True},
    "grpo_ruler": {**_GRPO, "explorer.auxiliary_models": [{"model_path": "/models/judge", "engine_num": 1}]},
    "grpo_task_pipeline": {**_GRPO, "data_processor.task_pipeline.operators": [{"name": "filter"}],
                           "service.data_juicer.auto_start": True},
    "grpo_dynamic_tasks": {**_GRPO, _TASKS + "data_selector.selector_type": "difficulty_based",
                           _TASKS + "data_selector.feature_keys": ["rate"]},
    "multi_step_grpo": {**_GRPO, "algorithm.algorithm_type": "multi_step_grpo",
                        "explorer.rollout_model.enable_openai_api": True},
    "dapo": {**_GRPO, "algorithm.algorithm_type": "dapo", "algorithm.policy_loss_fn_args.clip_range_high": 0.28,
             _TASKS + "format.system_prompt": "Solve it.", _TASKS + "reward_fn_args.penalty_factor": 1.0},
    "rloo": {**_GRPO, "algorithm.algorithm_type": "rloo"},
    "reinforceplusplus": {**_GRPO, "algorithm.algorithm_type": "reinforceplusplus"},
    "opmd": {**_GRPO, "algorithm.algorithm_type": "opmd", "algorithm.policy_loss_fn_args.tau": 1.0},
    "cispo": {**_GRPO, "algorithm.algorithm_type": "cispo"},
    "mix": {**_GRPO, "algorithm.algorithm_type": "mix", "algorithm.sample_strategy_args.expert_data_ratio": 0.25,
            _EXPERTS + "storage_type": "file", _EXPERTS + "path": "/data/experts"},
    "on_policy_distill": {**_GRPO, "algorithm.algorithm_type": "on_policy_distill",
                          "algorithm.advantage_fn_args.kl_coef": 1.0},
    "dpo": {**_BASE, "mode": "train", "algorithm.algorithm_type": "dpo", "algorithm.kl_loss_fn": "k1",
            "algorithm.optimizer.warmup_style": "cosine", "algorithm.optimizer.betas": [0.9, 0.95],
            "buffer.train_batch_size": 64, _ROWS + "storage_type": "file", _ROWS + "path": "/data/pairs",
            _ROWS + "format.chosen_key": "chosen", "trainer.total_steps": 200},
    "sft": {**_BASE, "mode": "train", "algorithm.algorithm_type": "sft", "buffer.train_batch_size": 64,
            _ROWS + "storage_type": "file", _ROWS + "path": "/data/demonstrations"},
    "sft_then_grpo": {**_GRPO, "stages": [{"stage_name": "sft", "mode": "train"}, {"stage_name": "grpo"}]},
    "tinker": {**_GRPO, "model.tinker.enable": True, "trainer.trainer_type": "tinker"},
    "vlm": {**_GRPO, "explorer.rollout_model.enable_multimodal": True, _TASKS + "format.image_key": "images"},
    "bench": {**_GRPO, "mode": "bench", "explorer.bench_on_latest_checkpoint": True},
    "old_alfworld": {**_OLD, "data.default_workflow_type": "alfworld_workflow"},
    "old_webshop": {**_OLD, "data.default_workflow_type": "webshop_workflow", "data.format.prompt_key": "task_id"},
}  # fmt: skip


def as_yaml(keys: dict[str, Any]) -> str:
    """A YAML file with these values, given by dotted keys."""
    tree: dict[str, Any] = {}
    for path, value in keys.items():
        *parents, leaf = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return yaml.safe_dump(tree)


def converted(text: str, **environ: str) -> Conversion:
    """The conversion of a file with this text, written into the working folder."""
    Path("trinity.yaml").write_text(text, encoding="utf-8")
    return convert(read([Path("trinity.yaml")], environ)[0])
