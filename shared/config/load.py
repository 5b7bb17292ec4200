"""Reads the configuration: YAML, environment variables, and paths relative to the file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shared.config.explain import explain
from shared.config.whole import Config, sqlite_url
from shared.errors import ConfigError

ENV_PREFIX = "FLYWHEEL_"
ENV_NOT_SETTINGS = ("FLYWHEEL_LOG_PLAIN", "FLYWHEEL_TORTURE", "FLYWHEEL_URL", "FLYWHEEL_KEY")  # the last two: the SDK's
ENV_MODEL = "FLYWHEEL_MODEL"  # our section `model`; a model name in it belongs to the SDK
ENV_PLAIN_TEXT = ("FLYWHEEL_DATABASE_URL", "FLYWHEEL_ENGINE__ADMIN_TOKEN")  # not YAML: they may contain any character
_SERVICE_LINK = re.compile(  # what Kubernetes sets in each pod for a Service whose name begins with ours
    r"FLYWHEEL(_[A-Z0-9]+)*_((SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*|PORT_\d+_[A-Z]+(_[A-Z]+)?)=.*|PORT=\w+://.*)"
)
_QUOTED = re.compile(r"'(?P<safe><[^']*|\\?[^'])'|'[^']*'")  # in YAML's messages; what is not safe may be secret


class _NamedTwice(yaml.MarkedYAMLError):
    """A section contains a key twice."""

    def __init__(self, key: str, mark: yaml.Mark) -> None:
        super().__init__(problem=f"{key} stands there twice", problem_mark=mark)
        self.key = key


class _Loader(yaml.SafeLoader):
    """YAML without duplicate keys in a section, since one of two values would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        named: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in named:
                raise _NamedTwice(key.value, key.start_mark)
            named.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as exc:
            problem = "a value is no date or number, and looks like one"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from exc


def load_config(file: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read and check the whole configuration.

    Relative paths are resolved against the file's folder, so that all processes agree wherever they are started.

    Raises:
        ConfigError: one line that names the key, the value and the remedy.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"config file {str(path)!r} cannot be read ({exc.strerror}); name one with -c FILE") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"config file {str(path)!r} is not UTF-8 text; write it as YAML in UTF-8") from exc
    try:
        tree = yaml.load(text, _Loader) or {}
    except RecursionError as exc:
        raise ConfigError(f"config file {str(path)!r} is nested too deeply; write it as shown in the README") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"config file {str(path)!r} is not YAML{_what_is_wrong(exc, text)}") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {str(path)!r} holds a {type(tree).__name__}; write keys such as `model:`")
    variables = _apply_environment(tree, os.environ if environ is None else environ)
    try:
        config = Config.model_validate(tree)
    except ValidationError as exc:
        raise ConfigError(explain(exc, Config, variables)) from None
    return _resolve_paths(config, path.resolve().parent)


def _what_is_wrong(error: yaml.YAMLError, text: str) -> str:
    """Return the place, the problem and the remedy, without words of the text."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f" at line {line}: it holds the invisible character U+{error.character:04X}; delete it"
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    problem = getattr(error, "problem", None) or "it cannot be parsed"
    remedy = "indent with spaces" if r"'\t'" in problem else "correct that line"
    shown = _QUOTED.sub(lambda found: found[0] if found["safe"] else "'…'", problem)
    return f"{where}: {shown}; {remedy}"


def _apply_environment(tree: dict[str, Any], environ: Mapping[str, str]) -> dict[tuple[int | str, ...], str]:
    """Return the variables that are settings, by the path of the setting."""
    named: dict[str, str] = {}  # variables by their settings
    set_by: dict[tuple[int | str, ...], str] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in ENV_NOT_SETTINGS:
            continue
        if _SERVICE_LINK.fullmatch(f"{variable}={text}"):
            continue
        same = named.setdefault(variable.lower(), variable)
        if same != variable:
            raise ConfigError(f"environment variables {same} and {variable} are the same setting; unset one of them")
        *parents, leaf = variable.removeprefix(ENV_PREFIX).lower().split("__")
        if not parents and leaf not in Config.model_fields:
            raise ConfigError(
                f"environment variable {variable} names no setting; unset it, or write __ between section and key, as "
                "in FLYWHEEL_EXPLORER__PORT"
            )
        if variable == ENV_MODEL and ":" not in text:
            continue
        node, path = tree, []
        for part in parents:
            path.append(_spelled(part, node))
            node = node.setdefault(path[-1], {})
            if not isinstance(node, dict):
                raise ConfigError(f"environment variable {variable}: {part!r} is not a section; set it in the file")
        leaf = _spelled(leaf, node)
        try:
            if variable in ENV_PLAIN_TEXT:
                node[leaf] = None if text in ("", "null") else text
            else:
                node[leaf] = yaml.load(text, _Loader)
        except _NamedTwice as exc:
            raise ConfigError(
                f"the value of environment variable {variable} names {exc.key} twice; name it once"
            ) from exc
        except (yaml.YAMLError, RecursionError) as exc:
            raise ConfigError(f"the value of environment variable {variable} is not YAML; quote it") from exc
        set_by[*path, leaf] = variable
    return set_by


def _spelled(name: str, section: Mapping[str, Any]) -> str:
    """Return a key of the section that differs in upper case only, such as a metric's, or else the name itself."""
    return next((key for key in section if isinstance(key, str) and key.lower() == name), name)


def _resolve_paths(config: Config, base: Path) -> Config:
    model = config.model.model_copy(update={"path": _resolved("model.path", config.model.path, base)})
    update: dict[str, Any] = {"root_dir": _resolved("root_dir", config.root_dir, base), "model": model}
    if config.engine.staging_dir is not None:
        staging_dir = _resolved("engine.staging_dir", config.engine.staging_dir, base)
        update["engine"] = config.engine.model_copy(update={"staging_dir": staging_dir})
    teacher = config.trainer.distill
    if teacher.path is not None:
        distill = teacher.model_copy(update={"path": _resolved("trainer.distill.path", teacher.path, base)})
        update["trainer"] = config.trainer.model_copy(update={"distill": distill})
    url = config.database_url
    if url is not None and url.startswith("sqlite:///") and not url.startswith("sqlite:////"):
        update["database_url"] = f"{sqlite_url(base)}/{url.removeprefix('sqlite:///')}"
    return config.model_copy(update=update)


def _resolved(setting: str, path: str, base: Path) -> str:
    """Resolve a path relative to a folder. Raises ConfigError."""
    if "\0" in path:
        raise ConfigError(f"{setting} holds NUL, which no file's name may; take it out")
    try:
        return str(base / Path(path).expanduser())
    except RuntimeError as exc:
        user = path.removeprefix("~").partition("/")[0] or "this user"
        raise ConfigError(f"{setting}={path!r}: {user} has no home folder here; write the whole path") from exc
