"""The one configuration file: what may stand in it, its defaults, and errors that name key, value and mend.

Owns every setting of every process. Environment variables override the file: `FLYWHEEL_` and the path with `__`
between, e.g. `FLYWHEEL_EXPLORER__PORT=8020`; their values are read as YAML.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]

ENV_PREFIX = "FLYWHEEL_"
ENV_NOT_SETTINGS = ("FLYWHEEL_LOG_PLAIN", "FLYWHEEL_TORTURE")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(_Section):
    """The model that is served and trained."""

    name: Name = "agent"
    """The name callers send as `model`; `name@VERSION` pins a version."""
    path: str
    """A Hugging Face causal-LM folder: config.json, safetensors, tokenizer. Relative to the configuration file."""
    kind: Literal["full", "lora"] = "full"
    """What a version holds: `full`, all weights; `lora`, an adapter over the base model."""


class KeyConfig(_Section):
    """One key that callers may present as `Authorization: Bearer KEY`."""

    key_env: Annotated[str, Field(min_length=1)] | None = None
    """The environment variable that holds the key. The key itself never stands in the file."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Instead of key_env: the key's SHA-256 in hexadecimal (printf %s KEY | sha256sum)."""
    role: Literal["chat", "feedback", "admin"]
    """chat: chat. feedback: feedback and commit. admin: everything. Any of them may read the status."""
    name: Name | None = None
    """How rows and signals name this key; null: key_env, or the first digits of sha256."""
    group: Name | None = None
    """Rows that this key's chats made, and rows that its feedback reaches; null: all."""
    requests_per_minute: Positive | None = None
    """More of them answer 429; null: no limit."""
    requests_at_once: Count | None = None
    """More of them in flight answer 429; null: no limit."""

    @property
    def label(self) -> str:
        return self.name or self.key_env or f"sha256-{(self.sha256 or '')[:12]}"

    @model_validator(mode="after")
    def _check_one_source(self) -> KeyConfig:
        if (self.key_env is None) == (self.sha256 is None):
            raise ValueError("explorer.keys: each key has either key_env or sha256; give one of them")
        return self


class EngineAddress(_Section):
    """Where one vLLM server listens."""

    name: Name
    """A short name for logs and metrics."""
    url: Annotated[str, Field(pattern=r"^https?://[^/]+$")]
    """Its address, e.g. http://127.0.0.1:8101"""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80


class ReloadConfig(_Section):
    """How the explorer takes up versions."""

    poll_interval_s: Positive = 1.0
    """How often the ledger is asked for a newer version."""
    drain_s: NonNegative = 5.0
    """How long an engine's running requests may finish before it is paused under them (they go on afterwards)."""
    timeout_s: Positive = 600.0
    """How long an engine may take to load a version."""


class RewardConfig(_Section):
    """How signals become a reward. The log keeps them raw; `flywheel rewards` brings a changed rule to old rows."""

    up: Finite = 1.0
    """What the rating "up" is worth. A reward that was said counts instead of a rating."""
    down: Finite = 0.0
    """What the rating "down" is worth."""
    metrics: dict[str, Finite] = {}
    """Weight of each metric that is added, by its name; others are kept and do not count."""
    clip: tuple[Finite, Finite] | None = None
    """Lowest and highest reward a row can have; null: as it comes."""
    accept: tuple[Finite, Finite] | None = None
    """Lowest and highest reward that a caller may say; anything else answers 400. null: any finite number."""


class ExplorerConfig(_Section):
    """The service that agents talk to."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs keys."""
    port: Port = 8010
    """Port to listen on."""
    workers: Count = 1
    """Processes that share the port; together they behave as one. Limits of keys count in each."""
    engines: Annotated[tuple[EngineAddress, ...], Field(min_length=1)] = (
        EngineAddress(name="e0", url="http://127.0.0.1:8101"),
    )
    """The vLLM servers behind the explorer."""
    keys: tuple[KeyConfig, ...] = ()
    """Keys and their roles; with none the explorer listens on loopback only."""
    open_feedback_from: tuple[str, ...] = ()
    """Networks (CIDR) whose feedback and commits need no key."""
    max_body_bytes: Count = 8 * 1024 * 1024
    """A larger request body answers 413."""
    body_timeout_s: Positive = 60.0
    """A request body that has not arrived by then answers 408."""
    engine_wait_s: NonNegative = 30.0
    """How long a chat waits while every engine is full or taking up a version, before it answers 503."""
    max_in_flight: Count | None = None
    """Chats at one engine at once; more of them wait. null: the engine queues them itself."""
    max_waiting: Count = 1000
    """Chats that may wait for an engine; more of them answer 503."""
    request_timeout_s: Positive = 600.0
    """How long one engine request may take."""
    max_messages: Count = 10_000
    """More messages in one chat answer 400."""
    store_text: Flag = True
    """Keep requests and replies as text beside their tokens, for reading and for supervised fine-tuning."""
    commit_every_s: Positive | None = None
    """Commit all rewarded rows this often; null: only when asked to."""
    expire_after_s: Positive | None = None
    """Rows without a reward are discarded when they are this old; null: never."""
    reload: ReloadConfig = ReloadConfig()
    """How versions come into service."""


class EngineConfig(_Section):
    """How `flywheel engine` starts vLLM."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' type in the engine; auto: as the model's config.json says."""
    max_model_len: Count | None = None
    """Longest prompt and reply together, tokens; null: the model's own."""
    kv_cache_gb: Count = 1
    """KV cache on a CPU, whole GB. (On a GPU vLLM takes a share of the device: extra_args.)"""
    tool_parser: str | None = None
    """vLLM's --tool-call-parser; set, tools are on."""
    start_timeout_s: Positive = 900.0
    """How long the engine may take from start to warm."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for vLLM's server, as on its command line."""


class PPOConfig(_Section):
    """Proximal policy optimization (Schulman et al. 2017) with a critic."""

    clip: Positive = 0.2
    """ε of the clipped surrogate objective."""
    value_clip: NonNegative = 0.2
    """How far the critic's value may move from the old one within a batch; 0 turns value clipping off."""
    epochs: Count = 2
    """Passes over each batch."""
    minibatches: Count = 2
    """Optimizer steps in each pass."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount for each token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """λ of generalized advantage estimation."""
    kl_coef: NonNegative = 0.01
    """β of the per-token KL penalty towards the base model."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    value_coef: NonNegative = 0.5
    """Weight of the critic's loss."""
    normalize_advantages: Flag = True
    """Whiten advantages over the batch's tokens."""
    importance_cap: Positive = 2.0
    """Upper bound of the truncated importance weight from the sampler's policy to the trainer's."""
    critic_learning_rate: Positive | None = None
    """Learning rate of the critic; null: the policy's."""


class TrainerConfig(_Section):
    """The service that learns."""

    name: Name = "trainer"
    """Who holds leases and state; a restarted trainer of this name goes on from its own."""
    algorithm: Literal["ppo"] = "ppo"
    """The algorithm."""
    batch_size: Count = 64
    """Rows in one update."""
    batch_timeout_s: Positive | None = None
    """After this long with at least one READY row a smaller batch is taken; null: always wait for a whole one."""
    max_share_per_key: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest part of a batch whose rewards one key has set, so that one angry key cannot steer the model; 1: all."""
    max_staleness_versions: Count | None = None
    """Rows sampled by a version further behind the newest one are discarded instead of trained on; null: none are."""
    publish_every: Count = 1
    """Updates between two versions."""
    learning_rate: Positive = 1e-6
    """Learning rate of the policy (DeepSpeed's optimizer section overrides it)."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    max_tokens_per_micro_batch: Count = 4096
    """Token budget of one forward pass; a longer sequence goes alone."""
    poll_interval_s: Positive = 0.5
    """How often the ledger is asked for rows."""
    lease_s: Positive = 600.0
    """How long a claimed batch stays with a trainer that is not heard of."""
    cpu_threads: Count | None = None
    """Threads of PyTorch on a CPU; null: all cores but one for each engine on this machine."""
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    """Seed of the critic's head and of minibatch order."""
    ppo: PPOConfig = PPOConfig()
    """Settings of PPO."""
    deepspeed: dict[str, Any] = {}
    """Merged over our DeepSpeed configuration: any of its keys, e.g. zero_optimization: {stage: 2}."""


class Config(_Section):
    """The whole file."""

    root_dir: str = "./flywheel-data"
    """Shared folder: versions/ and the trainer's private state. Relative to the configuration file."""
    database_url: str | None = None
    """The ledger; null: SQLite in root_dir; postgresql://user:pw@host/db"""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """How much is logged."""
    model: ModelConfig
    explorer: ExplorerConfig = ExplorerConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def root(self) -> Path:
        return Path(self.root_dir)

    @property
    def ledger_url(self) -> str:
        """SQLAlchemy's URL of the ledger."""
        return ledger_url(self.database_url or f"sqlite:///{self.root / 'ledger.sqlite3'}")

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        explorer = self.explorer
        if not explorer.keys and not is_loopback(explorer.host):
            raise ValueError(
                f"explorer.host={explorer.host!r} is not loopback and explorer.keys is empty, so anyone could chat and "
                "steer the model; set explorer.keys, or explorer.host: 127.0.0.1"
            )
        for what, values in (
            ("name", [engine.name for engine in explorer.engines]),
            ("url", [engine.url for engine in explorer.engines]),
        ):
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ValueError(
                    f"explorer.engines: {what} {sorted(twice)[0]!r} stands twice; give each engine its own"
                )
        for key, bounds in (("clip", self.reward.clip), ("accept", self.reward.accept)):
            if bounds is not None and bounds[0] >= bounds[1]:
                raise ValueError(
                    f"reward.{key}={list(bounds)!r}: the lower bound comes first and is smaller; swap them"
                )
        labels = [key.label for key in explorer.keys]
        if len(labels) != len(set(labels)):
            twice_ = next(label for label in labels if labels.count(label) > 1)
            raise ValueError(f"explorer.keys: {twice_!r} stands twice; give each key its own name")
        for network in explorer.open_feedback_from:
            try:
                ipaddress.ip_network(network)
            except ValueError as exc:
                raise ValueError(
                    f"explorer.open_feedback_from={network!r} is not a network; write e.g. 10.0.0.0/8"
                ) from exc
        if self.database_url is not None and not self.database_url.startswith(
            ("postgresql://", "postgres://", "postgresql+psycopg://", "sqlite:///")
        ):
            scheme = self.database_url.split(":", 1)[0]
            raise ValueError(
                f"database_url={scheme + '://…'!r} is not supported; write postgresql://user:pw@host/db or sqlite:///FILE"
            )
        return self


def ledger_url(url: str) -> str:
    """A database's URL as SQLAlchemy wants it, with our driver for PostgreSQL."""
    for prefix in ("postgresql://", "postgres://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    return url


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_config(file: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read and check the whole configuration.

    Relative paths are taken from the file's folder, so that every process agrees wherever it is started.

    Raises:
        ConfigError: one line that names the key, the value and the mend.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"config file {str(path)!r} cannot be read ({exc.strerror}); name one with -c FILE") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"config file {str(path)!r} is not UTF-8 text; write it as YAML in UTF-8") from exc
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(exc, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"config file {str(path)!r} is not YAML{where}: {problem}; mend that line") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {str(path)!r} holds a {type(tree).__name__}; write keys such as `model:`")
    _apply_environment(tree, os.environ if environ is None else environ)
    try:
        config = Config.model_validate(tree)
    except ValidationError as exc:
        raise ConfigError(_explain(exc)) from None
    return _resolve_paths(config, path.resolve().parent)


def _apply_environment(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in ENV_NOT_SETTINGS:
            continue
        *parents, leaf = variable.removeprefix(ENV_PREFIX).lower().split("__")
        if not parents and leaf not in Config.model_fields:
            raise ConfigError(f"environment variable {variable} names no setting; unset it, or see the README's list")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"environment variable {variable}: {part!r} is no section; set it in the file")
        try:
            node[leaf] = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            raise ConfigError(f"environment variable {variable}={text!r} is not a YAML value; quote it") from exc


def _explain(error: ValidationError) -> str:
    """The first error as one line: key, value, reason, mend."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    value = first["input"]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return message
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known here: " + ", ".join(known)
        return f"{key}={value!r}: no such key; {hint}"
    if first["type"] == "missing":
        return f"{key} is missing; add it to the configuration file"
    if first["type"] == "literal_error":
        return f"{key}={value!r}: must be {first['ctx']['expected']}; choose one of them"
    return f"{key}={value!r}: {message[:1].lower()}{message[1:]}; correct it"


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    section: Any = Config
    for part in path:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        if not hasattr(annotation, "model_fields"):
            annotation = annotation.__args__[0]
        section = annotation
    return sorted(section.model_fields)


def _resolve_paths(config: Config, base: Path) -> Config:
    model = config.model.model_copy(update={"path": str(base / Path(config.model.path).expanduser())})
    update: dict[str, Any] = {"root_dir": str(base / Path(config.root_dir).expanduser()), "model": model}
    url = config.database_url
    if url is not None and url.startswith("sqlite:///") and not url.startswith("sqlite:////"):
        update["database_url"] = f"sqlite:///{base / url.removeprefix('sqlite:///')}"
    return config.model_copy(update=update)
