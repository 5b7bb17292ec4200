"""Conversions of values, beyond a change of name: of the experiment, the model, engines and explorers.

A take gets the value and the whole file; if several keys form one setting, each returns the complete setting.
"""

from __future__ import annotations

import json
import re
from typing import Any

from services.trinity.key import Given, NoCounterpart, NotNeeded, Settings, Take
from shared.config import DATABASES, refusal_of_argument

ROLLOUT = "explorer.rollout_model."
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_LAST_PORT = 65535
MOST_GPUS = 1024  # for one engine
COLOCATED_SHARE = 0.25  # of a GPU that engine and trainer share: Trinity lowers a larger one
ARGUMENTS = "engine.extra_args"
WITHOUT_NO = ("disable_log_stats", "aggregate_engine_logging", "data_parallel_multi_port_external_lb")
"""Arguments of vLLM that only enable something: they have no `--no-` form."""
PROCESSES = {
    "serve": "start `flywheel engine` and `flywheel explorer`",
    "train": "start `flywheel trainer`",
    "both": "start `flywheel up`",
    "colocate": "start `flywheel up`",
    "explore": "start `flywheel up --without trainer`",
    "bench": "start `python -m flywheel evaluate`",
}


def mode(value: Any, _given: Given) -> Settings:
    """Trinity's mode corresponds to the command that is started."""
    raise NotNeeded(PROCESSES.get(str(value), "start what you need: `flywheel --help`"))


def monitor(value: Any, given: Given) -> Settings:
    """Return the outputs for the trainer's figures besides the log."""
    if given.get("mode") in ("serve", "explore", "bench"):
        raise NotNeeded("GET /metrics has the explorer's figures")
    if value == "mlflow":
        return {"trainer.watch.mlflow": given.first("monitor.monitor_args.uri", default="http://localhost:5000")}
    if value == "wandb":
        return {"trainer.watch.wandb": given.first("project", "monitor.project", default="Trinity-RFT")}
    if value == "tensorboard":
        return {"trainer.watch.tensorboard": True}
    raise NoCounterpart("set tensorboard, wandb or mlflow in trainer.watch; figures are in the log and figures.jsonl")


def mlflow(_value: Any, given: Given) -> Settings:
    """Return MLflow's address if figures are sent there."""
    if given.get("monitor.monitor_type") != "mlflow":
        raise NotNeeded("with monitor_type: mlflow")
    return monitor("mlflow", given)


def root_dir(_value: Any, given: Given) -> Settings:
    """Return the folder of one experiment."""
    parts = (
        given.first("checkpoint_root_dir", default="./checkpoints"),
        given.first("project", "monitor.project", default="Trinity-RFT"),
        given.get("group") or "",
        given.first("name", "monitor.name", default="rft"),
    )
    return {"root_dir": "/".join(str(part).rstrip("/") for part in parts if part)}


def old_root_dir(value: Any, given: Given) -> Settings:
    """Return the checkpoint folder of the old layout."""
    return {"root_dir": value} if value else root_dir(value, given)


def is_hub_name(value: str) -> bool:
    """Whether a model is named as on a hub, and not by a folder."""
    return _HUB_NAME.fullmatch(value) is not None


def loopback(value: Any, _given: Given) -> Settings:
    """Restrict to loopback: Trinity listens on every address without a key, but we require keys for that."""
    return {"explorer.host": value if value in ("127.0.0.1", "localhost", "::1") else "127.0.0.1"}


def engines(_value: Any, given: Given) -> Settings:
    """Return the engines: consecutive ports, and GPUs for each if there are several."""
    port = given.whole(f"{ROLLOUT}base_port", default=8101, most=_LAST_PORT)
    ports = _LAST_PORT + 1 - port
    count = given.whole(f"{ROLLOUT}engine_num", "explorer.engine_num", default=1, most=ports)
    gpus = gpus_per_engine(given)
    found: list[dict[str, Any]] = [
        {"name": f"e{number}", "url": f"http://127.0.0.1:{port + number}"} for number in range(count)
    ]
    if count * gpus > 1:
        for number, engine in enumerate(found):
            engine["devices"] = list(range(number * gpus, (number + 1) * gpus))
    return {"explorer.engines": found}


def gpus_per_engine(given: Given) -> int:
    """Return the number of GPUs over which each engine shards the model."""
    sizes = (f"{ROLLOUT}tensor_parallel_size", "explorer.tensor_parallel_size")
    return given.whole(*sizes, default=1, most=MOST_GPUS)


def argument(flag: str, off: tuple[Any, ...] = ()) -> Take:
    """Return a take for an argument of vLLM, which is not needed for a value in `off`."""

    def take(value: Any, _given: Given) -> Settings:
        if value in (*off, "", {}):
            raise NotNeeded("as vLLM does by itself")
        return {f"{ARGUMENTS}.{flag}": value}

    return take


def engine_argument(_value: Any, given: Given) -> Settings:
    """Return all extra_engine_args that engines accept; a section's keys use vLLM's dots."""
    prefix = f"{ROLLOUT}extra_engine_args."
    extra = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    named = {_flag(name): value for name, value in extra.items() if value is not None and name not in WITHOUT_NO}
    return {f"{ARGUMENTS}.{flag}": value for flag, value in named.items() if refusal_of_argument(flag) is None}


def _flag(name: str) -> str:
    """Convert a name of vLLM's to an argument; the part after the first dot is a JSON key, and does not change."""
    head, dot, rest = name.partition(".")
    return f"--{head.replace('_', '-')}{dot}{rest}"


def words(flag: str, value: Any) -> list[str]:
    """Return an argument's words on the command line: a list as separate words; true as the flag, false as its no form.

    A JSON key, which has a dot in its name, gets JSON instead.
    """
    if "." not in flag and isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if "." not in flag and isinstance(value, list):
        return [flag, *map(_text, value)]
    return [flag, _text(value)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def is_on(value: Any) -> bool:
    """Whether a switch is on; Trinity reads one in quotes, too."""
    return bool(value) and str(value).lower() not in ("false", "off", "no", "n", "0")


def chunked_prefill(value: Any, _given: Given) -> Settings:
    """vLLM's default is on."""
    if is_on(value):
        raise NotNeeded("as vLLM does by itself")
    return {f"{ARGUMENTS}.--enable-chunked-prefill": False}


def thinking(value: Any, _given: Given) -> Settings:
    """Set the default of a chat template's argument, which a chat may override."""
    return {f"{ARGUMENTS}.--default-chat-template-kwargs": json.dumps({"enable_thinking": is_on(value)})}


def tool_parser(value: Any, given: Given) -> Settings:
    """Trinity needs two keys for tools, we need one."""
    if not given.get(f"{ROLLOUT}enable_auto_tool_choice"):
        raise NotNeeded("enable_auto_tool_choice is off")
    return {"engine.tool_parser": value}


def max_model_len(_value: Any, given: Given) -> Settings:
    """Return the sum of the longest prompt and the longest reply, as Trinity does if no total is given."""
    if given.first("model.max_model_len", f"{ROLLOUT}max_model_len") is not None:
        raise NotNeeded("engine.max_model_len bounds prompt and reply together")
    names = ("model.max_prompt_tokens", "model.max_response_tokens")
    if any(given.get(name) is None for name in names):
        raise NotNeeded("a reply's bound is the caller's, and the rest is the prompt's")
    return {"engine.max_model_len": sum(given.whole(name, default=0) for name in names)}


def gpu_share(value: Any, given: Given) -> Settings:
    """Return the engine's part of its GPU."""
    return {"engine.gpu_share": min(float(value), COLOCATED_SHARE) if given.get("mode") == "colocate" else value}


def dtype(value: Any, _given: Given) -> Settings:
    """Return our name of the engine's weight type."""
    return {"engine.dtype": {"half": "float16", "float": "float32"}.get(str(value), value)}


def sampling(name: str) -> Take:
    """Return a take for a sampling parameter of the model, unless the task set has its own."""

    def take(value: Any, given: Given) -> Settings:
        own = (f"buffer.explorer_input.{tasks}.rollout_args.{name}" for tasks in ("taskset", "tasksets.0"))
        if given.first(*own) is not None:
            raise NotNeeded("the task set's rollout_args count")
        return {f"learn.params.{name}": value}

    return take


def database_url(value: Any, _given: Given) -> Settings:
    """Return a database's address if we support it."""
    if not value:
        raise NotNeeded("SQLite in root_dir")
    if not str(value).startswith(DATABASES):
        raise NoCounterpart("the ledger is PostgreSQL or SQLite; set database_url, or leave it out")
    return {"database_url": value}


def publish_every(_value: Any, given: Given) -> Settings:
    """Return the updates between two versions: the trainer's interval, or else the common one."""
    names = ("trainer_sync_interval", "sync_interval", "sync_iteration_interval")
    return {"trainer.publish_every": given.whole(*(f"synchronizer.{name}" for name in names), default=1)}


def eval_every(value: Any, given: Given) -> Settings:
    """Return the versions between two evaluations; Trinity counts steps."""
    return {"learn.eval_every_versions": max(1, int(value) // publish_every(value, given)["trainer.publish_every"])}


def at_once(value: Any, given: Given) -> Settings:
    """Return the runs in flight over all engines."""
    return {"learn.at_once": int(value) * len(engines(value, given)["explorer.engines"])}


def lora(setting: str) -> Take:
    """Return a take for a setting of the adapter; Trinity trains one as soon as it is configured."""
    return lambda value, _given: {"model.kind": "lora", f"model.lora.{setting}": value}
