"""Section `trainer`: the service that trains."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.algorithms import (
    ALGORITHMS,
    AUTO,
    CHOICES,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    PPOConfig,
    RAFTConfig,
    ReinforcePPConfig,
    RLOOConfig,
    SFTConfig,
    SPOConfig,
    StepGRPOConfig,
)
from shared.config.base import NUMBER, Count, Devices, FileName, Flag, NonNegative, Positive, Section
from shared.config.deepspeed import check_deepspeed
from shared.config.surrogate import AlgorithmConfig, Kind, SurrogateConfig
from shared.config.taught import DistillConfig, HintConfig, TaughtConfig
from shared.config.watch import BreakerConfig, WatchConfig

_WITH_ADVANTAGES = [
    name
    for name, kind in ALGORITHMS.items()
    if issubclass(kind, SurrogateConfig) and not issubclass(kind, TaughtConfig)
]  # from rewards


class TrainerConfig(Section):
    """The service that trains."""

    name: FileName = "trainer"
    """Owner of leases and saved state; a restarted trainer with this name continues from its own state."""
    algorithm: str = "ppo"
    """The algorithm; auto: chosen by the signals that callers send. See docs/algorithms/index.md."""
    algorithms: dict[str, NonNegative] = Field(default_factory=dict)
    """Several algorithms instead of one, with the weights of their losses: {reinforce_pp: 1.0, sft: 0.2}."""
    batch_size: Count = 64
    """Rows in one update."""
    batch_timeout_s: Positive | None = None
    """Claim a smaller batch after READY rows have waited this long; null: always wait for a full batch. The time starts
    again after each batch and each start."""
    max_share_per_key: Annotated[float, Field(gt=0, le=1), NUMBER] = 1.0
    """Largest share of `batch_size`, and of each algorithm's gradient, that comes from the signals of one key, so that
    no key steers the model alone; 1: no limit. Of the gradient, each of n keys in a batch may have 1/n."""
    center_keys: Flag = False
    """Compare rewards with the mean reward of their key, so that a strict and a lenient key agree about the same reply,
    and a key that always gives the same reward has no effect. For algorithms with advantages."""
    max_trajectory_rows: Count = 1000
    """Rows of one run or conversation that are claimed together, even if the batch exceeds its size. A longer one is
    claimed in parts, oldest first, and each part is trained on separately. Of a task whose runs are compared, the
    oldest whole runs that fit are claimed together."""
    max_staleness_versions: Count | None = None
    """Discard rows that were sampled by a version further behind the newest one; null: none."""
    publish_every: Count = 1
    """Updates between two versions."""
    save_every: Count = 1
    """Versions between two saved states. Rows stay leased until a state contains them; after a crash, the versions
    since the last state are withdrawn, and their rows are trained on again."""
    ranks: Count = 1
    """Processes on this machine that train one model together: one for each GPU."""
    devices: Devices | None = None
    """GPUs that the trainer may use, by number; null: all."""
    rank_timeout_s: Positive = 600.0
    """How long ranks wait for each other in a computation before the job ends; must exceed the longest save."""
    epochs: Count = 2
    """Passes over each batch."""
    minibatches: Count = 2
    """Optimizer steps in each pass, with about equally many tokens each."""
    learning_rate: Positive | None = None
    """Learning rate of the policy; null: 1e-6, with `model.kind: lora` 1e-4. deepspeed.optimizer.params.lr overrides
    it."""
    warmup_updates: Annotated[int, Field(ge=0, strict=True)] = 0
    """Number of first updates over which the learning rates rise to their values."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of forward and backward passes; the optimizer's weights and moments are always float32. auto: bf16 on a
    GPU that supports it, else float32."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more time."""
    max_grad_norm: Positive = 1.0
    """Maximum norm of the policy's and of the critic's gradient; each is clipped separately."""
    max_tokens_per_micro_batch: Count = 4096
    """Token budget of one forward pass; a longer sequence gets its own pass."""
    max_trajectory_tokens: Count | None = None
    """Maximum number of tokens of a row, prompt and reply together; longer rows are quarantined when they are claimed.
    null: the model's context."""
    poll_interval_s: Positive = 0.5
    """Seconds between two queries for ready rows."""
    min_free_disk_gb: NonNegative = 1.0
    """Free space, GiB, that must remain on the disks after the next version and its state; otherwise the trainer
    reports it, and publishes nothing until there is space again."""
    lease_s: Positive = 600.0
    """How long a claimed batch stays leased without a heartbeat of its trainer."""
    cpu_threads: Count | None = None
    """PyTorch threads on a CPU; null: all cores except one for each engine on this machine."""
    rehearse: Annotated[float, Field(ge=0, le=4), NUMBER] = 0.0
    """Rows of earlier batches to add to each batch, as a share of its rows: rows with written answers (corrections,
    demonstrations), which sft learns again, and rows with words, which hint learns again."""
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    """Seed of the order of minibatches."""
    breaker: BreakerConfig = BreakerConfig()
    """Bounds at which training stops by itself."""
    watch: WatchConfig = WatchConfig()
    """Outputs for the figures of updates."""
    ppo: PPOConfig = PPOConfig()
    """Settings of PPO."""
    reinforce_pp: ReinforcePPConfig = ReinforcePPConfig()
    """Settings of REINFORCE++."""
    sft: SFTConfig = SFTConfig()
    """Settings of supervised fine-tuning."""
    spo: SPOConfig = SPOConfig()
    """Settings of SPO."""
    grpo: GRPOConfig = GRPOConfig()
    """Settings of GRPO."""
    rloo: RLOOConfig = RLOOConfig()
    """Settings of RLOO."""
    step_grpo: StepGRPOConfig = StepGRPOConfig()
    """Settings of GRPO by turn."""
    raft: RAFTConfig = RAFTConfig()
    """Settings of reward-ranked fine-tuning."""
    dpo: DPOConfig = DPOConfig()
    """Settings of direct preference optimization."""
    kto: KTOConfig = KTOConfig()
    """Settings of Kahneman-Tversky optimization."""
    hint: HintConfig = HintConfig()
    """Settings of learning from words."""
    distill: DistillConfig = DistillConfig()
    """Settings of distillation."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Merged over our DeepSpeed configuration: its keys except those of precision, batch sizes and clipping, e.g.
    zero_optimization: {stage: 2}."""

    @property
    def parts(self) -> dict[str, float]:
        """The algorithms in use with their weights above 0; for `auto`, all that may be chosen."""
        named = self.algorithms or (CHOICES if self.algorithm == AUTO else {self.algorithm: 1.0})
        return {name: weight for name, weight in named.items() if weight > 0}

    @property
    def learns_from(self) -> frozenset[Kind]:
        """The kinds of signals that an algorithm in use learns from."""
        return frozenset().union(*(self.settings_of(name).learned for name in self.parts))

    @property
    def learns_again(self) -> frozenset[Kind]:
        """The kinds of signals that an algorithm in use learns from again in later batches."""
        return frozenset().union(*(self.settings_of(name).learned_again for name in self.parts))

    @property
    def together(self) -> Literal["trajectory", "task"]:
        """What a batch must not split: the largest unit of the algorithms in use."""
        return "task" if any(self.settings_of(name).together == "task" for name in self.parts) else "trajectory"

    def settings_of(self, algorithm: str) -> AlgorithmConfig:
        """Return the section of an algorithm."""
        section: AlgorithmConfig = getattr(self, algorithm)
        return section

    @field_validator("algorithms", mode="before")
    @classmethod
    def _check_weights(cls, given: Any) -> Any:
        if given == {}:
            raise ValueError("trainer.algorithms={} names no algorithm; name some with weights, or remove the key")
        for name, weight in given.items() if isinstance(given, dict) else ():
            if isinstance(weight, bool | str):
                raise ValueError(
                    f"trainer.algorithms.{name}={weight!r} is no weight; write a number without quotes, such as 0.2"
                )
        return given

    @model_validator(mode="after")
    def _check_devices(self) -> TrainerConfig:
        if self.devices is not None and len(self.devices) < self.ranks:
            raise ValueError(
                f"trainer.ranks={self.ranks} is more than the GPUs in trainer.devices={list(self.devices)}; name one "
                "for each rank"
            )
        return self

    @model_validator(mode="after")
    def _check_deepspeed(self) -> TrainerConfig:
        check_deepspeed(self.deepspeed)
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> TrainerConfig:
        zero = self.deepspeed.get("zero_optimization")
        parted = isinstance(zero, dict) and zero.get("stage") == 3
        if parted and "hint" in self.parts and self.hint.teacher != "live":
            raise ValueError(
                f"trainer.hint.teacher={self.hint.teacher} needs whole weights, and ZeRO 3 parts them; set "
                "trainer.deepspeed.zero_optimization.stage to 2, or trainer.hint.teacher to live"
            )
        return self

    @model_validator(mode="after")
    def _check_algorithms(self) -> TrainerConfig:
        if self.algorithms and "algorithm" in self.model_fields_set:
            raise ValueError("trainer.algorithm and trainer.algorithms are both set; remove one of them")
        where = "trainer.algorithms" if self.algorithms else "trainer.algorithm"
        known = ALGORITHMS if self.algorithms else [AUTO, *ALGORITHMS]
        for name in self.algorithms or [self.algorithm]:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
                raise ValueError(f"{where}: no algorithm is named {name!r}; {hint}")
        if not self.parts:
            raise ValueError(f"trainer.algorithms={self.algorithms}: all weights are 0; give one a weight above 0")
        for name in ALGORITHMS:
            self.settings_of(name).check(f"trainer.{name}")
            if name in self.model_fields_set and name not in self.parts:
                raise ValueError(
                    f"trainer.{name} is set, and the algorithm in use is {', '.join(self.parts)}; remove the section, "
                    f"or name {name} in {where}"
                )
        return self

    @model_validator(mode="after")
    def _check_use(self) -> TrainerConfig:
        for name in self.parts:
            self.settings_of(name).check_in_use(f"trainer.{name}")
        if not self.learns_from:
            raise ValueError(
                "trainer.hint.comment and trainer.hint.correction are null, and a next message alone makes no row "
                "ready; set one of them, or name an algorithm besides hint"
            )
        if self.rehearse and not self.learns_again:
            raise ValueError(
                f"trainer.rehearse={self.rehearse:g}: sft and hint alone learn again, hint with a top_k above 0 and "
                "a wording for comments or corrections; name one in trainer.algorithms, or set rehearse to 0"
            )
        if self.center_keys and not set(_WITH_ADVANTAGES) & self.parts.keys():
            raise ValueError(
                f"trainer.center_keys=true is for algorithms with advantages of rewards, and in use is "
                f"{', '.join(self.parts)}; name one of {', '.join(_WITH_ADVANTAGES)}, or set it to false"
            )
        if self.center_keys and "spo" in self.parts and self.spo.bounds is not None:
            raise ValueError("trainer.center_keys moves rewards out of trainer.spo.bounds; remove one of them")
        if self.warmup_updates and "scheduler" in self.deepspeed:
            raise ValueError("trainer.warmup_updates and trainer.deepspeed.scheduler are both set; remove one of them")
        if "ppo" in self.parts and self.ppo.critic_learning_rate is not None and "scheduler" in self.deepspeed:
            raise ValueError(
                "trainer.ppo.critic_learning_rate is set, and trainer.deepspeed.scheduler sets the critic's rate, too; "
                "remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_base(self) -> TrainerConfig:
        bound, parts = self.breaker.kl_to_base, {name: self.settings_of(name) for name in self.parts}
        asked = bound is not None and "kl_to_base" in self.breaker.model_fields_set
        if asked and not any(settings.loads_base for settings in parts.values()):
            fixes = [f"set trainer.{name}.kl_coef above 0" for name, one in parts.items() if hasattr(one, "kl_coef")]
            fixes = fixes or ["name an algorithm in trainer.algorithms that does"]
            raise ValueError(
                f"trainer.breaker.kl_to_base={bound:g} would not be watched: {', '.join(parts)} as configured does not "
                f"load the base model, which the distance is to; {', '.join(fixes)} or remove the key"
            )
        return self
