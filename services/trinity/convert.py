"""Converts a configuration: finds each Trinity key in the table, and collects the resulting settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from services.trinity import algorithms, gpus, table, workflow
from services.trinity.key import Fate, Given, NoCounterpart, NotNeeded, Settings, refusal
from services.trinity.takes import ARGUMENTS, COLOCATED_SHARE, is_hub_name, words
from services.trinity.takes_trainer import SHUFFLED, kl, own_mean
from shared.config import ALGORITHMS, Config
from shared.errors import ConfigError

THEIR_DEFAULTS: dict[str, Any] = {  # Trinity's defaults that differ from ours
    "trainer.epochs": 1,
    "trainer.minibatches": 1,
    "trainer.learning_rate": 1e-6,
    "trainer.deepspeed.optimizer.params.weight_decay": 0.01,
    "trainer.ALGORITHM.lam": 1.0,
    "trainer.ppo.value_clip": 0.5,
    "trainer.ppo.critic_learning_rate": 1e-5,
    "model.lora.rank": 32,
    "model.lora.alpha": 32,
}
_SAMPLING: dict[str, Any] = {  # Trinity's too; without them our engine samples by the model's generation_config.json
    "learn.params.temperature": 1.0,
    "learn.params.top_p": 1.0,
    "learn.params.top_k": -1,
    "learn.params.repetition_penalty": 1.0,
}
_BATCHES = ("buffer.train_batch_size", "buffer.batch_size", "data.batch_size", "global_config.batch_size")
_TIMEOUT_S = 1800  # Trinity's explorer.max_timeout
_OF_AN_ADAPTER = ("model.lora.", "trainer.learning_rate")  # in other cases the defaults are the same, or unused
_TRAINED = (  # settings with these prefixes determine what is learned, and from what
    *("trainer.", "model.", "tasks", "learn.params.", "learn.runs_per_task", "learn.epochs", "learn.versions"),
    *(workflow.FILE, "examples.", "engine.max_model_len", "engine.dtype", f"{ARGUMENTS}."),
)
_OPEN = ("deepspeed", "params", "eval_params")  # sections that accept any key
_THEIRS = "Trinity's default, where ours is another"
_LOST_KL = "in the place of the KL term that is lost"
_NO_TASKS = "there is no task set: an agent in use brings its own tasks"
_SENT = "send it with each chat, or write it into the model's generation_config.json"
_PLAIN = (str, int, float, list, dict, type(None))  # types of values; YAML has others, which no key takes


@dataclass(frozen=True)
class Line:
    """The result for one key. ours: the path of its value."""

    key: str
    fate: Fate
    ours: str = ""
    remark: str = ""
    changes_training: bool = False


@dataclass
class Conversion:
    """The settings by our dotted keys, a line for each of Trinity's keys, and remarks."""

    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)
    given: Given = field(default_factory=Given)

    @property
    def lost(self) -> list[Line]:
        """The lines whose loss changes training."""
        return [line for line in self.lines if line.changes_training]

    def flywheel(self) -> dict[str, Any]:
        """Return the contents of flywheel.yaml."""
        ours = {path: value for path, value in self.settings.items() if path.partition(".")[0] in Config.model_fields}
        return _nested({path: value for path, value in ours.items() if not path.startswith(ARGUMENTS)}, self.arguments)

    def learn(self) -> dict[str, Any] | None:
        """Return the contents of learn.yaml, fields of the SDK's LearnConfig; None without a task set."""
        prefix = "learn."
        ours = {path[len(prefix) :]: value for path, value in self.settings.items() if path.startswith(prefix)}
        return _nested(ours, []) if "learn.name" in self.settings else None

    @property
    def example(self) -> str | None:
        """The folder of the example that corresponds to Trinity's workflow."""
        return workflow.example(self.given)

    def workflow(self) -> str:
        """Return the contents of workflow.py."""
        return workflow.text(self.given)

    @property
    def arguments(self) -> list[str]:
        """engine.extra_args: flags, and the values of those that have some."""
        given = {path: value for path, value in self.settings.items() if path.startswith(ARGUMENTS)}
        return [word for path, value in given.items() for word in words(path[len(ARGUMENTS) + 1 :], value)]


def convert(given: Given) -> Conversion:
    """Convert a configuration. Raises ConfigError if no key is one of Trinity's, or a value has an unreadable type."""
    if not any(table.find(name) for name in given):
        raise ConfigError("no key of the file is one of Trinity's; name Trinity's YAML file")
    done = Conversion(given=given)
    if given.has_tasks:
        done.settings["learn.name"] = str(given.first("name", "monitor.name", default="rft"))
    for name, value in given.items():
        if not all(isinstance(one, _PLAIN) for one in (value, *(value if isinstance(value, list) else ()))):
            raise refusal(name, value)
        try:
            done.lines.append(_line(done, name, value, given))
        except (TypeError, ValueError, AttributeError, ArithmeticError) as exc:
            raise refusal(name, value) from exc
    _add_defaults(done, given)
    if is_hub_name(str(done.settings.get("model.path"))):
        done.remarks.append(f"model.path is {done.settings['model.path']}: download it, and name its folder")
    return done


def _line(done: Conversion, name: str, value: Any, given: Given) -> Line:
    key = table.find(name)
    if key is None and value in (None, {}, []) and table.is_section(name):
        return Line(name, Fate.NOT_NEEDED, remark="empty")
    if key is None:
        near = table.nearest(name)
        remark = "no key of Trinity 0.6" + (f"; did you mean {near}?" if near else "; correct or remove it")
        return Line(name, Fate.NO_COUNTERPART, remark=remark, changes_training=True)
    try:
        settings = _our_settings(done, name, key.settings(name, value, given), given)
    except NotNeeded as reason:
        return Line(name, Fate.NOT_NEEDED, remark=str(reason))
    except NoCounterpart as reason:
        return Line(name, Fate.NO_COUNTERPART, remark=str(reason), changes_training=reason.changes_training)
    for path, setting in settings.items():
        done.settings[path] = setting
        done.source.setdefault(path, name)
    last = {path.rpartition(".")[2] for path in settings}
    fate = Fate.KEPT if name.rpartition(".")[2] in last else Fate.RENAMED
    return Line(name, fate, ", ".join(path.replace(f"{ARGUMENTS}.", f"{ARGUMENTS} ") for path in settings), key.note)


def _our_settings(done: Conversion, name: str, settings: Settings, given: Given) -> Settings:
    """Return the settings with the algorithm's name filled in. Raises NotNeeded or NoCounterpart for others."""
    ours = {path.replace("ALGORITHM", algorithms.ours(given)): value for path, value in settings.items()}
    for path, value in ours.items():
        if path.startswith(("learn.", workflow.FILE, "examples.")) and not given.has_tasks:
            if path.startswith("learn.params.") and given.get("mode") != "train":
                raise NoCounterpart(_SENT, changes_training=path.endswith(".temperature") and value != 1.0)
            raise NotNeeded(_NO_TASKS)
        if given.has_tasks:
            workflow.require_no_own(path, given)
        if not exists(path):
            if not value:
                raise NotNeeded("off")
            raise NoCounterpart(f"Flywheel has no {path}; go without it", changes_training=path.startswith("trainer."))
        if path in done.settings and done.settings[path] != value:
            mend = "write the rows of both into one file" if path == "tasks" else "choose one of them"
            raise NoCounterpart(
                f"{path} is set by {done.source.get(path, path)} already; {mend}",
                changes_training=path.startswith(_TRAINED),
            )
    return ours


def exists(path: str) -> bool:
    """Whether one of our keys exists; a test of the table checks learn's keys against the SDK."""
    section, *parts = path.split(".")
    if section not in Config.model_fields:
        return True
    node: Any = Config.model_fields[section].annotation
    for part in parts:
        fields = getattr(node, "model_fields", None)
        if fields is None or part not in fields:
            return fields is None
        node = ALGORITHMS.get(part) or fields[part].annotation
        if part in _OPEN:
            return True
    return True


def _add_defaults(done: Conversion, given: Given) -> None:
    """Add Trinity's defaults that differ from ours, so that training does not change silently."""
    if "explorer.host" not in done.settings and given.get("mode") != "train":
        done.settings["explorer.host"] = "127.0.0.1"
    if "explorer.host" in done.settings:
        done.remarks.append(
            f"explorer.host is {done.settings['explorer.host']}: Trinity listens on 0.0.0.0 without a key; to listen "
            "on another address, give explorer.keys"
        )
    reads_file = given.has_tasks and given.get("mode") != "bench" and workflow.example(given) is None
    if reads_file and not any(name.endswith("_selector.selector_type") for name in given):
        done.remarks.append(f"Trinity's default is the order of the file: {SHUFFLED}")
    if any(name.startswith("model.lora_configs.") for name in given):
        done.settings.setdefault("model.kind", "lora")
    for path, value in _of_learn(given).items() if given.has_tasks else ():
        if path not in done.settings:
            done.settings[path] = value
            done.remarks.append(f"{path} is {value}: {_THEIRS}")
    if given.get("mode") in gpus.WITHOUT_TRAINER:
        return
    if gpus.is_unknown(given):
        done.remarks.append(gpus.UNKNOWN)
    ours = algorithms.ours(given)
    of_algorithm = {
        f"trainer.ALGORITHM.{name}": value for name, value in algorithms.counterpart(given).defaults.items()
    }
    shared = {"engine.gpu_share": COLOCATED_SHARE} if given.get("mode") == "colocate" else {}
    kl_term = kl(None, given)
    kl_lost = any(line.key.startswith("algorithm.kl_") for line in done.lost)
    for template, value in {**THEIR_DEFAULTS, **shared, **of_algorithm, **own_mean(given), **kl_term}.items():
        path = template.replace("ALGORITHM", ours)
        foreign = path.startswith("trainer.ppo.") and ours != "ppo"
        foreign |= path.startswith(_OF_AN_ADAPTER) and done.settings.get("model.kind") != "lora"
        foreign |= path.endswith(".clip_high") and "algorithm.policy_loss_fn_args.clip_range" in given  # it sets both
        if not foreign and exists(path) and path not in done.settings:
            done.settings[path] = value
            why = _LOST_KL if kl_lost and template in kl_term else _THEIRS
            done.remarks.append(f"{path} is {value}: {why}")


def _of_learn(given: Given) -> dict[str, Any]:
    """Return Trinity's defaults for learn.yaml, and for the trainer's batch, which follows from the tasks of a step."""
    if workflow.example(given) is not None:
        return {**_SAMPLING, "learn.runs_per_task": 1}
    bound = _reply_bound(given)
    defaults = {**_SAMPLING, "learn.timeout_s": _TIMEOUT_S, **({"learn.params.max_tokens": bound} if bound else {})}
    if any(name.startswith("buffer.explorer_input.eval_tasksets.") for name in given):
        names = {path.rpartition(".")[2]: value for path, value in _SAMPLING.items()}
        params = {name: given.first(f"model.{name}", default=value) for name, value in names.items()}
        if (tokens := given.first("model.max_response_tokens", default=bound)) is not None:
            params["max_tokens"] = tokens
        defaults |= {f"learn.eval_params.{name}": value for name, value in params.items()}
    if given.get("mode") not in gpus.WITHOUT_TRAINER and given.first(*_BATCHES) is None:
        defaults["trainer.batch_size"] = given.whole("algorithm.repeat_times", "explorer.repeat_times", default=1)
    return defaults


def _reply_bound(given: Given) -> int | None:
    """Return the tokens of a reply that Trinity derives from the model's length; None: it derives none."""
    length = given.whole("model.max_model_len", default=0)
    if not length or given.get("model.max_response_tokens") is not None:
        return None
    rest = length - given.whole("model.max_prompt_tokens", default=length - length // 2)
    return rest if rest > 0 else None


def _nested(settings: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in [*settings.items(), *([(ARGUMENTS, arguments)] if arguments else [])]:
        *parents, leaf = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


def counts(lines: list[Line]) -> Iterator[tuple[Fate, list[Line]]]:
    """Yield the lines of each fate."""
    for fate in Fate:
        yield fate, [line for line in lines if line.fate is fate]
