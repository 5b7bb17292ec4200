"""Trinity's keys for the experiment, the model, engines and explorers."""

from __future__ import annotations

from services.trinity import gpus, takes
from services.trinity.key import Key, lost, moved, unneeded
from services.trinity.takes import argument

_AUTOMATIC = "Trinity sets it by itself"
_RAY = "there is no Ray; processes are started by `flywheel up`, or one by one"
_WIRE = "the engine's OpenAI API is always on, and every chat is recorded"
_SAMPLING = "the caller's own parameters count; without learn send it with each chat, or write it into the model's \
generation_config.json"
_ROPE = "write it into the model's config.json, which engine and trainer read"
_OWN_CODE = "models with code of their own are not trained"
_TEMPLATE = "--chat-template"

WHOLE: tuple[Key, ...] = (
    moved("mode", "the command", "which processes are started", takes.mode),
    moved("{checkpoint_root_dir,project,group,name}", "root_dir", "ROOT/PROJECT/GROUP/NAME", takes.root_dir),
    moved("monitor.{project,name}", "root_dir", "old layout", takes.root_dir),
    moved("model.checkpoint_path", "root_dir", "old layout", takes.old_root_dir),
    unneeded("{checkpoint_job_dir,ray_namespace}", _AUTOMATIC),
    lost("continue_from_checkpoint", "to begin anew, name another root_dir", (True,), changes_training=True),
    unneeded("ignore_validator_suggestions", "nothing is suggested"),
    lost("stages.**", "write a file for each stage, and start them one after the other", changes_training=True),
    moved("log.level", "log_level", take=lambda value, _given: {"log_level": str(value).upper()}),
    unneeded("log.{group_by_node,save_dir}", "each process logs to its standard error"),
    moved("monitor.monitor_type", "trainer.watch", "its package must be installed where the trainer runs",
          takes.monitor),
    moved("monitor.monitor_args.uri", "trainer.watch.mlflow", take=takes.mlflow),
    unneeded("monitor.monitor_args.**", "set the variables of wandb or mlflow where the trainer runs"),
    unneeded("monitor.{detailed_stats,enable_ray_timeline,cache_dir,cache_root_dir,job_dir}",
             "GET /metrics, `flywheel status` and the log show the same"),
    moved("cluster.gpu_per_node", "trainer.devices", "those that engines leave, and in trainer.ranks their number",
          gpus.trainer),
    moved("cluster.node_num", "trainer.devices", "on one machine", gpus.machines),
    unneeded("cluster.{total_gpu_num,rollout_gpu_num,auxiliary_model_gpu_num,explorer_gpu_num,trainer_gpu_num,"
             "trainer_node_num,trainer_gpu_num_per_node}", _AUTOMATIC),
    unneeded("cluster.ray_address", _RAY),
)  # fmt: skip

MODEL: tuple[Key, ...] = (
    moved("model.model_path", "model.path", "a folder: download what a hub names; clients name it `agent` "
          "(model.name), and any other name is answered by 404"),
    lost("model.critic_model_path", "the critic begins as a copy of the model", changes_training=True),
    moved("model.{max_model_len,max_token_len}", "engine.max_model_len"),
    moved(
        "model.max_prompt_tokens", "engine.max_model_len", "with max_response_tokens, in the place of max_model_len",
        takes.max_model_len,
    ),
    moved("model.max_response_tokens", "learn.params.max_tokens", _SAMPLING, takes.sampling("max_tokens")),
    moved("model.min_response_tokens", "learn.params.min_tokens", _SAMPLING),
    moved("model.temperature", "learn.params.temperature", _SAMPLING, takes.sampling("temperature")),
    moved("model.top_p", "learn.params.top_p", _SAMPLING, takes.sampling("top_p")),
    moved("model.top_k", "learn.params.top_k", _SAMPLING, takes.sampling("top_k")),
    moved("model.repetition_penalty", "learn.params.repetition_penalty", _SAMPLING),
    unneeded("model.{logprobs,enable_prompt_truncation}", "as the OpenAI API does, in Trinity, too"),
    moved("model.{custom_chat_template,chat_template_path}", "engine.extra_args", take=argument(_TEMPLATE)),
    moved("model.enable_thinking", "engine.extra_args", take=takes.thinking),
    lost("model.trust_remote_code", _OWN_CODE, (False,), changes_training=True),
    lost("model.{rope_scaling,rope_theta}", _ROPE, changes_training=True),
    moved("model.lora_configs.*.lora_rank", "model.lora.rank", "with model.kind: lora", takes.lora("rank")),
    moved("model.lora_configs.*.lora_alpha", "model.lora.alpha", "with model.kind: lora", takes.lora("alpha")),
    moved("model.lora_configs.*.target_modules", "model.lora.targets", "with kind: lora", takes.lora("targets")),
    unneeded("model.lora_configs.*.{name,base_model_name,is_dummy,lora_dtype}", "follows from the base model"),
    lost("model.lora_configs.*.{path,exclude_modules}", "a new adapter begins at 0", changes_training=True),
    moved("model.fully_sharded_loras", "engine.extra_args", take=argument("--fully-sharded-loras", (False,))),
    moved("model.max_cpu_loras", "engine.extra_args", take=argument("--max-cpu-loras")),
    lost("model.tinker.enable", "the trainer runs on your own machines", (False,), changes_training=True),
    unneeded("model.tinker.{rank,seed,train_mlp,train_attn,train_unembed,base_url}", "settings of a hosted trainer"),
    lost("model.external_model.enable", "only an engine that gives token ids is trained", (False,),
         changes_training=True),
    unneeded("model.external_model.{base_url_env,api_key_env,model_name}", "settings of a hosted model"),
)  # fmt: skip

_MODEL_OF = "explorer.rollout_model."
_EITHER = "explorer.{rollout_model.,}"  # the old layout has these keys one level higher

ENGINE: tuple[Key, ...] = (
    moved(_EITHER + "{engine_num,tensor_parallel_size}", "explorer.engines", "a url for each, and its GPUs",
          takes.engines),
    moved(_MODEL_OF + "base_port", "explorer.engines", "ports from 8101 on without it", takes.engines),
    moved(_MODEL_OF + "pipeline_parallel_size", "engine.extra_args", take=argument("--pipeline-parallel-size", (1,))),
    moved(_MODEL_OF + "data_parallel_size", "engine.extra_args", take=argument("--data-parallel-size", (1,))),
    moved(_MODEL_OF + "enable_expert_parallel", "engine.extra_args", take=argument("--enable-expert-parallel",
                                                                                   (False,))),
    moved(_EITHER + "gpu_memory_utilization", "engine.gpu_share", "with mode colocate at most 0.25, as in Trinity",
          takes.gpu_share),
    moved(_EITHER + "dtype", "engine.dtype", take=takes.dtype),
    moved(_EITHER + "seed", "engine.extra_args", take=argument("--seed")),
    moved(_EITHER + "enforce_eager", "engine.extra_args", take=argument("--enforce-eager", (False,))),
    unneeded(_EITHER + "enable_prefix_caching", "always on: a reload empties the cache"),
    moved(_EITHER + "enable_chunked_prefill", "engine.extra_args", take=takes.chunked_prefill),
    moved(_MODEL_OF + "max_model_len", "engine.max_model_len"),
    moved(_MODEL_OF + "tool_call_parser", "engine.tool_parser", take=takes.tool_parser),
    unneeded(_MODEL_OF + "enable_auto_tool_choice", "on with engine.tool_parser"),
    moved(_MODEL_OF + "reasoning_parser", "engine.extra_args", take=argument("--reasoning-parser")),
    moved(_EITHER + "chat_template", "engine.extra_args", take=argument(_TEMPLATE)),
    moved(_MODEL_OF + "enable_thinking", "engine.extra_args", take=takes.thinking),
    lost(_MODEL_OF + "extra_engine_args.{generation_config,override_generation_config.**}", _SAMPLING,
         changes_training=True),
    lost(_MODEL_OF + "extra_engine_args.logprobs_mode", "logprobs are those that tokens were sampled by",
         ("processed_logprobs",), changes_training=True),
    unneeded(_MODEL_OF + "extra_engine_args.{model,served_model_name}", "model.path and model.name say it"),
    *(moved(f"{_MODEL_OF}extra_engine_args.{name}", "engine.extra_args",
            take=argument(f"--{name.replace('_', '-')}", (False,))) for name in takes.WITHOUT_NO),
    moved(_MODEL_OF + "extra_engine_args.**", "engine.extra_args", take=takes.engine_argument),
    moved(_MODEL_OF + "enable_log_requests", "engine.extra_args", take=argument("--enable-log-requests", (False,))),
    unneeded(_MODEL_OF + "{enable_openai_api,enable_openai_client,enable_history,use_v1,api_key,name}", _WIRE),
    unneeded("explorer.use_v1", _WIRE),
    lost(_EITHER + "engine_type", "engines are vLLM's", ("vllm", "vllm_async"), changes_training=True),
    lost(_MODEL_OF + "trust_remote_code", _OWN_CODE, (False,), changes_training=True),
    lost(_MODEL_OF + "ignore_eos", "send it with each chat", (False,), changes_training=True),
    lost(_MODEL_OF + "enable_multimodal", "texts alone are trained on", (False,), changes_training=True),
    moved("explorer.{temperature,top_p,top_k}", "learn.params.*", _SAMPLING),
    unneeded(_EITHER + "{logprobs,bundle_indices}", _AUTOMATIC),
    unneeded(
        _MODEL_OF + "{model_path,gpu_per_engine,temperature,top_p,top_k,max_prompt_tokens,max_response_tokens,"
        "min_response_tokens,enable_prompt_truncation,repetition_penalty,nnodes,node_rank,weight_sync_buffer_size,"
        "enable_return_routed_experts,engine_id,ray_namespace,ray_actor_name,sync_method,checkpoint_job_dir,"
        "cuda_visible_devices,enable_lora,enable_runtime_lora_updating,lora_modules,lora_kwargs,rope_scaling,"
        "rope_theta,external_model_config.**}", _AUTOMATIC),
)  # fmt: skip

EXPLORER: tuple[Key, ...] = (
    moved("explorer.proxy_port", "explorer.port"),
    moved("explorer.listen_address", "explorer.host", "127.0.0.1: other addresses need explorer.keys", takes.loopback),
    moved("explorer.service_status_check_interval", "explorer.reload.poll_interval_s"),
    moved("explorer.db_url", "database_url", take=takes.database_url),
    unneeded("explorer.{name,min_running_model_num}", "chats are served as long as one engine is ready"),
    moved("explorer.max_timeout", "learn.timeout_s"),
    moved("explorer.max_retry_times", "learn.retries"),
    moved("explorer.runner_per_model", "learn.at_once", "times the engines", takes.at_once),
    moved("explorer.runner_num", "learn.at_once", "old layout"),
    moved("explorer.repeat_times", "learn.runs_per_task", "old layout"),
    moved("explorer.eval_interval", "learn.eval_every_versions", "versions, not steps", takes.eval_every),
    moved("{trainer,global_config}.eval_interval", "learn.eval_every_versions", "old layout", takes.eval_every),
    unneeded("explorer.{eval_on_startup,bench_on_latest_checkpoint}", "the first and the last version are evaluated"),
    lost("explorer.env_vars.**", "set them where the agent runs"),
    lost("explorer.auxiliary_models.**", "a Model of the agent's own: `flywheel.Model.of(URL, NAME)`"),
    lost("explorer.over_rollout.ratio", "every run is waited for", (0, 0.0), changes_training=True),
    unneeded("explorer.over_rollout.{wait_after_min,return_partial_tasks}", "with over_rollout.ratio"),
    lost("explorer.dynamic_timeout.enable", "learn.timeout_s is one for all tasks", (False,)),
    unneeded("explorer.dynamic_timeout.{warmup_min_steps,ratio}", "with dynamic_timeout.enable"),
    unneeded(
        "explorer.{runner_prepare_concurrency,runner_prepare_max_retries,concurrent_mode,max_repeat_times_per_runner,"
        "runner_state_report_interval,max_inflight_batches,use_ray,backend,max_pending_requests,max_waiting_steps}",
        "learn runs workflows in one process, as many at once as learn.at_once"),
)  # fmt: skip

SYNCHRONIZER: tuple[Key, ...] = (
    unneeded("synchronizer.sync_method", "versions come by the shared folder, and are proven before they serve"),
    unneeded("synchronizer.{sync_style,sync_offset}", "the trainer starts when a batch of rows is ready"),
    moved("synchronizer.{sync_interval,trainer_sync_interval,sync_iteration_interval}", "trainer.publish_every",
          take=takes.publish_every),
    unneeded("synchronizer.{explorer_sync_interval,wait_for_checkpoint}", "an engine takes each new version up"),
    moved("synchronizer.sync_timeout", "explorer.reload.timeout_s"),
    unneeded("synchronizer.{group_name,explorer_world_size,ray_namespace,master_address,master_port,backend}", _RAY),
)  # fmt: skip

KEYS = (*WHOLE, *MODEL, *ENGINE, *EXPLORER, *SYNCHRONIZER)
