"""Reads Trinity's YAML: numbers such as 1e-6, `${oc.env:…}`, dotted keys, one file or a pair."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from services.trinity.key import Given
from shared.errors import ConfigError

_PLACE = re.compile(r"\$\{([^${}]*)\}")  # the innermost reference
_DEPTH = 10
_OF_THE_TRAINER = re.compile(r"(trainer|buffer|cluster|monitor|log)\.|mode$")
_TEXT = re.compile(r"(?:^|[._])(?:name|project|group|path|dir|file|url|key|prompt)$")  # keys with texts as values
_AGREED = "buffer.trainer_input.experience_buffer."


class _Loader(yaml.SafeLoader):
    """YAML as Trinity reads it: 1e-6 is a number, and a date is text; to PyYAML it is the other way round."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read(files: Sequence[Path], environ: Mapping[str, str]) -> tuple[Given, list[str]]:
    """Return the values of one file, or of an explorer's and a trainer's file together, and remarks.

    Raises ConfigError if a file is unreadable, a variable is not set, or the two disagree.
    """
    remarks: list[str] = []
    found = [_resolved(_given(file), file, environ, remarks) for file in files]
    return (found[0] if len(found) == 1 else _together(found, files, remarks)), remarks


def _given(file: Path) -> Given:
    try:
        return Given(_leaves(_tree(file)))
    except RecursionError as exc:
        raise ConfigError(f"{file} is nested too deeply, or a value contains itself; correct it") from exc


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as exc:
        raise ConfigError(f"{file} cannot be read ({exc.strerror}); name Trinity's YAML file") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file} is not UTF-8 text; name Trinity's YAML file") from exc
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        correct = "correct that line, or the indentation of the lines before it"
        raise ConfigError(f"{file} is not YAML{where}; {correct}") from exc
    except ValueError as exc:
        raise ConfigError(f"{file} holds a number or a date that does not exist; correct it") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds no keys; name Trinity's YAML file")
    return tree


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key. A list of plain values is one value; an empty section, too."""
    if isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        tree = dict(enumerate(tree))
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _resolved(given: Given, file: Path, environ: Mapping[str, str], remarks: list[str]) -> Given:
    """Return the values with each `${…}` replaced: `oc.env` by a variable or its default, others by a key's value."""

    def inner(key: str, found: re.Match[str]) -> str:
        asked = found.group(1)
        resolver, colon, rest = asked.partition(":")
        if colon and resolver.strip() != "oc.env":
            raise ConfigError(f"{file}: {key}: ${{{asked}}} cannot be resolved here; write the value")
        if not colon:
            if asked not in given:
                raise ConfigError(f"{file}: {key}: ${{{asked}}} names no value of the file; correct it")
            return str(given[asked])
        name, comma, default = rest.partition(",")
        if name.strip() not in environ and not comma:
            raise ConfigError(f"{file}: {key} needs the environment variable {name.strip()}; set it")
        remark = f"{key}: from {name}" if name.strip() in environ else f"{key}: the default, {name} is not set"
        if remark not in remarks:
            remarks.append(remark)
        return environ.get(name.strip(), _unquoted(default.strip()))

    def whole(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [whole(key, item) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        for _ in range(_DEPTH):
            changed = _PLACE.sub(lambda found: inner(key, found), value)
            if changed == value:
                break
            value = changed
        plain = _plain(value)
        return value if plain is not None and _TEXT.search(key) else plain

    return Given({key: whole(key, value) for key, value in given.items()})


def _unquoted(text: str) -> str:
    """Return the text between matching quotes."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text


def _plain(text: str) -> Any:
    """Return the number, true, false or null in a variable; any other text unchanged."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if isinstance(value, int | float | bool | None) else text


def _together(found: Sequence[Given], files: Sequence[Path], remarks: list[str]) -> Given:
    """Merge an explorer's and a trainer's file: each one determines its own keys, and the others must agree."""
    trainers = [number for number, given in enumerate(found) if given.get("mode") == "train"]
    if len(trainers) != 1:
        raise ConfigError("of two files one is the trainer's, with `mode: train`; correct mode, or name one file")
    trainer, explorer = found[trainers[0]], found[1 - trainers[0]]
    differing = [key for key in explorer.keys() & trainer.keys() if explorer[key] != trainer[key]]
    for key in sorted(differing):
        if key.startswith(_AGREED) or not (_OF_THE_TRAINER.match(key) or key.startswith("explorer.")):
            names = " and ".join(str(file) for file in files)
            raise ConfigError(f"{names} disagree in {key}, which must be the same in both; correct one of them")
        if key != "mode":
            whose = "explorer" if key.startswith("explorer.") else "trainer"
            remarks.append(f"{key}: the files differ, and the {whose}'s counts")
    of_explorer = {key: value for key, value in explorer.items() if key.startswith("explorer.")}
    merged = Given({**explorer, **trainer, **of_explorer, "mode": "both"})
    merged.is_a_pair = True
    return merged
