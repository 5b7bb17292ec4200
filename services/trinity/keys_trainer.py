"""Trinity's keys for the algorithm, the data and the trainer."""

from __future__ import annotations

from services.trinity import rows, workflow
from services.trinity import takes_trainer as takes
from services.trinity.key import Key, lost, moved, unneeded

_OPTIMIZER = "trainer.deepspeed.optimizer.params"
_ZERO = "trainer.deepspeed.zero_optimization"
_SCHEDULE = "the rate is constant after trainer.warmup_updates; name a schedule in trainer.deepspeed.scheduler"
_ORDER = "rows are claimed oldest first"
_PART = "a part of the algorithm; choose one that has it"
_LEDGER = "all rows are in one ledger"
_IMPORT = "import the rows with `flywheel import`, and name sft beside the algorithm in trainer.algorithms"
_WORKFLOW = "complete for Trinity's single chats; an environment of Trinity's is one of our examples; else you write it"
_REWARD = "for numbers; else you write it, with `flywheel.rewards`"
_ROW = "the workflow gets the row, and takes from it what it wants"
_PACKED = "always on: rows are packed up to trainer.max_tokens_per_micro_batch"
_STATES = "trainer.save_every says when a state is saved, always a whole one"
_FILES = "every version is safetensors as Hugging Face writes them"
_KEPT = "versions.max_versions bounds the folder of versions"
_ONE_GPU = "one GPU computes a whole sequence; see trainer.gradient_checkpointing"
_SAME_GPU = "one GPU computes a whole sequence here, too"

ALGORITHM: tuple[Key, ...] = (
    moved("{algorithm,trainer}.algorithm_type", "trainer.algorithm", "see the table of algorithms", takes.algorithm),
    moved("algorithm.repeat_times", "learn.runs_per_task", "in shadow traffic TrainingRunner's repeat_time"),
    moved("algorithm.optimizer.lr", "trainer.learning_rate"),
    moved("algorithm.optimizer.clip_grad", "trainer.max_grad_norm", "unless trainer.grad_clip is set",
          takes.clip_grad),
    moved("algorithm.optimizer.betas", f"{_OPTIMIZER}.betas"),
    moved("algorithm.optimizer.weight_decay", f"{_OPTIMIZER}.weight_decay"),
    lost("algorithm.optimizer.optimizer_type", "name it in trainer.deepspeed.optimizer", ("adam", "adamw"),
         changes_training=True),
    lost("algorithm.optimizer.{lr_scheduler_type,warmup_style}", _SCHEDULE, ("constant",), changes_training=True),
    moved("algorithm.optimizer.lr_warmup_steps", "trainer.warmup_updates", take=takes.warmup),
    lost("algorithm.optimizer.lr_warmup_steps_ratio", "set trainer.warmup_updates, a number of updates", (0, 0.0),
         changes_training=True),
    unneeded("algorithm.optimizer.min_lr_ratio", "belongs to a schedule that falls"),
    lost("algorithm.sample_strategy", _ORDER, ("default", "warmup", "staleness_control"), changes_training=True),
    moved("algorithm.sample_strategy_args.max_staleness", "trainer.max_staleness_versions", "versions, not steps",
          takes.staleness),
    lost("algorithm.sample_strategy_args.**", _ORDER, changes_training=True),
    moved("algorithm.advantage_fn_args.{gamma,lam}", "trainer.ALGORITHM.*"),
    unneeded("algorithm.advantage_fn_args.epsilon", "keeps a division from 0"),
    lost("algorithm.advantage_fn_args.**", _PART, (False, "group"), changes_training=True),
    moved("algorithm.{advantage_fn,policy_loss_fn}", "trainer.algorithm", _PART, takes.same_as_algorithm),
    moved("algorithm.policy_loss_fn_args.{clip_range,clip_range_low}", "trainer.ALGORITHM.clip"),
    moved("algorithm.policy_loss_fn_args.clip_range_high", "trainer.ALGORITHM.clip_high"),
    moved("algorithm.policy_loss_fn_args.clip_ratio_c", "trainer.ALGORITHM.dual_clip"),
    moved("algorithm.policy_loss_fn_args.{beta,label_smoothing}", "trainer.ALGORITHM.*"),
    moved("algorithm.loss_agg_mode", "trainer.ALGORITHM.mean", "token-mean: tokens; seq-mean-token-mean: sequences",
          takes.loss_mean),
    unneeded("algorithm.policy_loss_fn_args.loss_agg_mode",
             "Trinity replaces it by algorithm.loss_agg_mode, which is token-mean if it is not set"),
    lost("algorithm.policy_loss_fn_args.{enable_sequence_masking,fallback_to_policy_gradient}", _PART, (False,),
         changes_training=True),
    unneeded("algorithm.policy_loss_fn_args.delta_sequence_masking", "with enable_sequence_masking"),
    lost("algorithm.policy_loss_fn_args.**", _PART, changes_training=True),
    moved("algorithm.kl_penalty_fn", "trainer.ALGORITHM.kl", "with kl_in: reward", takes.kl_term("reward")),
    moved("algorithm.kl_loss_fn", "trainer.ALGORITHM.kl", "with kl_in: loss, where there is no penalty in the reward",
          takes.kl_term("loss")),
    moved("algorithm.kl_penalty_fn_args.kl_coef", "trainer.ALGORITHM.kl_coef", take=takes.kl_coef("reward")),
    moved("algorithm.kl_loss_fn_args.kl_coef", "trainer.ALGORITHM.kl_coef", take=takes.kl_coef("loss")),
    lost("algorithm.{kl_penalty_fn_args,kl_loss_fn_args}.adaptive", "the coefficient stays as it is", (False,),
         changes_training=True),
    unneeded("algorithm.{kl_penalty_fn_args,kl_loss_fn_args}.{target_kl,horizon}", "with adaptive"),
    lost("algorithm.entropy_loss_fn", _PART, ("default", "none"), changes_training=True),
    moved("algorithm.entropy_loss_fn_args.entropy_coef", "trainer.ALGORITHM.entropy_coef",
          "unless entropy_loss_fn is none", takes.entropy),
    moved("algorithm.rollout_correction.rollout_is_threshold", "trainer.ALGORITHM.importance_cap"),
    lost("algorithm.rollout_correction.**", "weights are truncated for each token; see importance_cap",
         changes_training=True),
    lost("algorithm.enable_router_replay", "experts are chosen anew in training", (False,), changes_training=True),
    unneeded("algorithm.bypass_old_logprobs", "both are used: the sampler's logprobs weigh, the trainer's clip"),
)  # fmt: skip

_FORMAT = "format.{prompt_type,prompt_key,response_key,system_prompt_key,messages_key,tools_key,image_key,video_key,\
workflow_key,reward_fn_key,chosen_key,rejected_key,enable_concatenated_multi_turn,chat_template,enable_thinking,\
solution_key,reward_key,label_key}"
_TASKSET = "buffer.explorer_input.{taskset,tasksets.*}."
_EVAL = "buffer.explorer_input.eval_tasksets.*."
_ANY = "buffer.explorer_input.{taskset,tasksets.*,eval_tasksets.*}."
_ROWS = "buffer.{trainer_input.experience_buffer,train_dataset}."

BUFFER: tuple[Key, ...] = (
    moved("buffer.train_batch_size", "trainer.batch_size"),
    moved("{buffer,data,global_config}.batch_size", "trainer.batch_size",
          "times repeat_times, unless train_batch_size is set", takes.batch_size),
    moved("{buffer,data,global_config}.total_epochs", "learn.epochs", "unless total_steps or mode train is set",
          takes.epochs),
    moved("{buffer,trainer}.total_steps", "learn.versions", "divided by publish_every; epochs are then enough for it",
          takes.steps),
    unneeded("buffer.{explorer_output.**,tokenizer_path,cache_dir,pad_token_id,max_retry_times,max_retry_interval,"
             "read_batch_size,explore_batch_size}", _LEDGER),
    moved(_TASKSET + "path", "learn TASKS", "a .jsonl or .csv file; write the rows of another into one",
          takes.task_file("tasks")),
    moved(_EVAL + "path", "learn --eval", "a .jsonl or .csv file", takes.task_file("eval_tasks")),
    unneeded(_ANY + "{split,subset_name}", "of the rows that the file of tasks holds"),
    unneeded(_ANY + "{name,storage_type,index,is_eval,batch_size,total_epochs,total_steps,ray_namespace,"
             "max_retry_times,max_retry_interval,enable_progress_bar,algorithm_type,task_type,schema_type}",
             "tasks are a file"),
    unneeded(_ANY + _FORMAT, _ROW),
    moved(_TASKSET + "format.system_prompt", workflow.PROMPT, "of a single chat", workflow.prompt),
    lost(_EVAL + "format.system_prompt", "write it into your workflow's messages"),
    lost(_ANY + "format.reply_prefix", "write it into your workflow's messages"),
    moved("buffer.explorer_input.{taskset.,tasksets.*.,}default_workflow_type", workflow.FILE, _WORKFLOW,
          workflow.workflow),
    moved("buffer.explorer_input.{taskset.,tasksets.*.,}default_reward_fn_type", workflow.REWARD, _REWARD,
          workflow.reward),
    moved("buffer.explorer_input.eval_tasksets.*.default_workflow_type", workflow.FILE, "the same for held-out tasks",
          workflow.same("default_workflow_type")),
    moved("buffer.explorer_input.{taskset.,tasksets.*.,eval_tasksets.*.,}default_eval_workflow_type", workflow.FILE,
          "the same for held-out tasks", workflow.same("default_workflow_type")),
    moved("buffer.explorer_input.eval_tasksets.*.default_reward_fn_type", workflow.REWARD,
          "the same for held-out tasks", workflow.same("default_reward_fn_type")),
    Key(_TASKSET + "workflow_args.**", note=workflow.ARGUMENTS, off=(False,), changes_training=True,
        take=workflow.argument),
    Key(_TASKSET + "workflow_args.format_score_coef", note="as the other arguments, with with_think", off=(),
        changes_training=True, take=workflow.coefficient),
    Key(_TASKSET + "reward_fn_args.**", note=workflow.ARGUMENTS, off=(False,), changes_training=True,
        take=workflow.argument_of_reward),
    lost(_EVAL + "{workflow_args,reward_fn_args}.**", workflow.BIND),
    moved(_TASKSET + "rollout_args.{temperature,top_p,top_k}", "learn.params.*"),
    moved(_TASKSET + "rollout_args.max_tokens", "learn.params.max_tokens"),
    moved(_EVAL + "rollout_args.{temperature,top_p,top_k}", "learn.eval_params.*"),
    moved(_EVAL + "rollout_args.max_tokens", "learn.eval_params.max_tokens"),
    moved(_EVAL + "{rollout_args.n,repeat_times,eval_repeat_times}", "learn.eval_runs"),
    moved(_EVAL + "eval_temperature", "learn.eval_params.temperature"),
    unneeded(_TASKSET + "{rollout_args.n,repeat_times}", "algorithm.repeat_times counts"),
    unneeded(_ANY + "rollout_args.logprobs", "every token's is recorded"),
    Key(_TASKSET + "{data_selector,task_selector}.selector_type", note=takes.SHUFFLED, off=("shuffle", "random"),
        changes_training=True, take=takes.order),
    moved(_TASKSET + "{data_selector,task_selector}.seed", "learn.seed"),
    unneeded(_EVAL + "{data_selector,task_selector}.{selector_type,seed}", "an evaluation runs every task"),
    unneeded(_ANY + "{data_selector,task_selector}.{feature_keys,kwargs.**}", "with selector_type"),
    moved(_ROWS + "path", "database_url", "with storage_type sql", takes.database),
    unneeded(_ROWS + "{name,storage_type,capacity,max_read_timeout,max_retry_times,max_retry_interval,split,"
             "subset_name,enable_progress_bar,schema_type,index,batch_size,tokenizer_path,total_epochs,total_steps,"
             "ray_namespace,algorithm_type,data_selector.**}", _LEDGER),
    Key(_ROWS + "format.{prompt_type,prompt_key,response_key,system_prompt_key,system_prompt,messages_key,tools_key,"
        "chosen_key,rejected_key}", note=rows.COLUMN, off=(), take=rows.column),
    Key(_ROWS + "format.enable_concatenated_multi_turn", note=rows.EACH_REPLY, off=(False,), changes_training=True,
        take=rows.multi_turn),
    lost(_ROWS + "format.{image_key,video_key}", "texts alone are trained on"),
    lost(_ROWS + "format.{chat_template,enable_thinking}", "set the engine's in engine.extra_args before the import"),
    unneeded(_ROWS + "format.{workflow_key,reward_fn_key,reply_prefix,solution_key,reward_key,label_key}",
             "for tasks, not for rows"),
    lost(_ROWS + "replay_buffer.enable", "a row is trained on once", (False,), changes_training=True),
    unneeded(_ROWS + "replay_buffer.{priority_fn,reuse_cooldown_time,priority_fn_args.**}", "with enable"),
    lost("buffer.trainer_input.{auxiliary_buffers,sft_warmup_dataset}.**", _IMPORT, changes_training=True),
    unneeded("data_processor.experience_pipeline.{save_input,input_save_path}", "the ledger keeps every row"),
    lost("data_processor.**", "process tasks before learn, and rewards in the workflow", changes_training=True),
    lost("{service,data_juicer}.**", "with data_processor"),
    moved("data.dataset_path", "learn TASKS", "old layout; a .jsonl or .csv file", takes.task_file("tasks")),
    unneeded("data.{train_split,eval_split,subset_name,load_kwargs.**}", "of the rows that the file of tasks holds"),
    unneeded("data." + _FORMAT, _ROW),
    moved("data.default_workflow_type", workflow.FILE, _WORKFLOW, workflow.workflow),
    moved("data.default_reward_fn_type", workflow.REWARD, _REWARD, workflow.reward),
    unneeded("data.{dj_config_path,dj_process_desc,agent_model_name,agent_model_config.**,clean_strategy,"
             "min_size_ratio,min_priority_score,priority_weights.**,data_dist,db_url,max_retry_times,"
             "max_retry_interval,data_workflow_url,source_data_path}", "old layout; process tasks before learn"),
)  # fmt: skip

_VERL = "trainer.trainer_config."
_ACTOR = _VERL + "actor_rollout_ref.actor."
_IGNORED = "Trinity ignores it"

TRAINER: tuple[Key, ...] = (
    moved("trainer.name", "trainer.name"),
    lost("trainer.trainer_type", "the trainer runs on your own machines", ("verl",), changes_training=True),
    lost("trainer.trainer_strategy", f"ZeRO shards over trainer.ranks; set {_ZERO}.stage", ("fsdp", "fsdp2")),
    moved("trainer.save_interval", "trainer.save_every", "versions, not updates", takes.save_every),
    moved("trainer.{grad_clip,actor_grad_clip}", "trainer.max_grad_norm"),
    moved("trainer.{max_token_len_per_gpu,ppo_max_token_len_per_gpu}", "trainer.max_tokens_per_micro_batch"),
    moved("trainer.critic_warmup", "trainer.ppo.critic_warmup", take=takes.critic("critic_warmup")),
    moved("trainer.max_checkpoints_to_keep", "versions.max_versions", take=takes.keep),
    moved("{trainer,trainer.trainer_config.actor_rollout_ref.actor.fsdp_config}.param_offload",
          f"{_ZERO}.offload_param", "in the machine's memory", takes.offload("offload_param")),
    moved("{trainer,trainer.trainer_config.actor_rollout_ref.actor.fsdp_config}.optimizer_offload",
          f"{_ZERO}.offload_optimizer", "in the machine's memory", takes.offload("offload_optimizer")),
    unneeded("trainer.{grad_offload,offload_policy}", "gradients go with the optimizer"),
    lost("trainer.ulysses_sequence_parallel_size", _ONE_GPU, (1,), same=_SAME_GPU),
    unneeded("trainer.{use_dynamic_bsz,use_remove_padding,balance_batch,fix_actor_microbatch_loss_scale}", _PACKED),
    unneeded("trainer.{save_hf_checkpoint,save_strategy}", _FILES),
    unneeded("trainer.enable_preview", "`flywheel export` writes what was sampled"),
    lost("trainer.megatron.**", f"set {_ZERO}.stage", (1, True, None)),
    lost("trainer.trust_remote_code", "models with code of their own are not trained", (False,)),
    lost("trainer.trainer_config_path", "write verl's keys below trainer.trainer_config", changes_training=True),
    lost("trainer.{sft_warmup_steps,sft_warmup_iteration}", _IMPORT, (0,), changes_training=True),
    lost("trainer.get_exp_strategy", _ORDER, ("FIFO",), changes_training=True),
    moved(_ACTOR + "ppo_epochs", "trainer.epochs"),
    unneeded(_VERL + "{actor_rollout_ref.actor,critic}.ppo_mini_batch_size", f"{_IGNORED}: a pass has one step"),
    unneeded(_ACTOR + "{clip_ratio,clip_ratio_low,clip_ratio_high}",
             f"{_IGNORED}: algorithm.policy_loss_fn_args has the range"),
    unneeded(_ACTOR + "entropy_coeff", f"{_IGNORED}: algorithm.entropy_loss_fn_args has the coefficient"),
    unneeded(_VERL + "{actor_rollout_ref.actor,critic}.grad_clip", f"{_IGNORED} with verl 0.8: set trainer.grad_clip"),
    moved(_ACTOR + "optim.clip_grad", "trainer.max_grad_norm"),
    moved(_ACTOR + "optim.lr", "trainer.learning_rate"),
    moved(_ACTOR + "optim.weight_decay", f"{_OPTIMIZER}.weight_decay"),
    moved(_VERL + "critic.optim.lr", "trainer.ppo.critic_learning_rate",
          take=takes.critic("critic_learning_rate")),
    moved(_VERL + "critic.cliprange_value", "trainer.ppo.value_clip", take=takes.critic("value_clip")),
    lost(_VERL + "critic.ppo_epochs", "the critic takes the policy's steps"),
    unneeded(_VERL + "trainer.critic_warmup", f"{_IGNORED} with verl 0.8: set trainer.critic_warmup"),
    moved(_VERL + "actor_rollout_ref.model.enable_gradient_checkpointing", "trainer.gradient_checkpointing"),
    unneeded(_VERL + "algorithm.{gamma,lam}", f"{_IGNORED}: algorithm.advantage_fn_args has them"),
    unneeded(_VERL + "trainer.balance_batch", _PACKED),
    unneeded(_VERL + "trainer.{max_actor_ckpt_to_keep,max_critic_ckpt_to_keep}", _KEPT),
    unneeded(_VERL + "{actor_rollout_ref.actor,critic}.checkpoint.**", _STATES),
    unneeded(_VERL + "actor_rollout_ref.{hybrid_engine,model.use_remove_padding,actor.use_dynamic_bsz,"
             "ref.fsdp_config.**,actor.fsdp_config.**}", _PACKED),
    unneeded(_VERL + "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{ppo_max_token_len_per_gpu,"
             "ppo_micro_batch_size_per_gpu,log_prob_micro_batch_size_per_gpu,forward_micro_batch_size_per_gpu}",
             _PACKED),
    lost(_VERL + "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.ulysses_sequence_parallel_size", _ONE_GPU,
         (1,), same=_SAME_GPU),
    lost(_VERL + "**", "look for it in docs/trainer.md; verl's other keys are not read", changes_training=True),
)  # fmt: skip

KEYS = (*ALGORITHM, *BUFFER, *TRAINER)
