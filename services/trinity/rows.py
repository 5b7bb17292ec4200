"""The file of rows that Trinity's trainer reads for sft and dpo, and the rows that `flywheel import` reads instead."""

from __future__ import annotations

from typing import Any

from services.trinity import algorithms
from services.trinity.key import Given, NoCounterpart, NotNeeded, Settings
from services.trinity.takes import is_on

_BUFFERS = ("buffer.trainer_input.experience_buffer.", "buffer.train_dataset.")  # the second one in the old layout
_DEFAULTS = {  # Trinity's, of `format`
    "prompt_type": "messages",
    "prompt_key": "prompt",
    "response_key": "response",
    "messages_key": "message",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
}
COLUMN = "the line of `path` shows the row to write"
EACH_REPLY = "the last message of a row is learned: write a row for each reply, the conversation up to it"
_NO_FILE = "rows are in the ledger, not in a file"


def are_in_a_file(given: Given) -> bool:
    """Whether the trainer reads its rows from a file. With mode both or colocate, Trinity puts a queue in its place."""
    is_alone = given.is_a_pair or given.get("mode") == "train"
    return is_alone and _of(given, "storage_type") == "file"


def what_to_import(path: Any, given: Given) -> str:
    """Return what to do with the file at `path`."""
    return (
        f"write each row of {path} into a .jsonl file as {_row(given)}, where <NAME> is the value of NAME; while "
        "`flywheel engine` runs, `flywheel import -c flywheel.yaml FILE --commit` records them"
    )


def column(_value: Any, given: Given) -> Settings:
    """Point to the row that shows the name of each column."""
    if are_in_a_file(given):
        raise NoCounterpart(COLUMN)
    raise NotNeeded(_NO_FILE)


def multi_turn(value: Any, given: Given) -> Settings:
    """Report that the replies before the last one would not be learned."""
    if not is_on(value):
        raise NotNeeded("the last message is learned, as it is here")
    if not are_in_a_file(given):
        raise NotNeeded(_NO_FILE)
    if _is_dpo(given) or _is_plaintext(given):
        raise NotNeeded("Trinity ignores it: it is for sft on messages")
    raise NoCounterpart(EACH_REPLY, changes_training=True)


def _of(given: Given, name: str) -> Any:
    return given.first(*(buffer + name for buffer in _BUFFERS))


def _is_dpo(given: Given) -> bool:
    return algorithms.theirs(given) == "dpo"


def _is_plaintext(given: Given) -> bool:
    return _format(given, "prompt_type").lower() == "plaintext"


def _format(given: Given, name: str) -> str:
    return str(_of(given, f"format.{name}") or _DEFAULTS.get(name, ""))


def _row(given: Given) -> str:
    """Return the JSON of a row to import; `<NAME>` is a value of Trinity's row."""
    tools = "" if _is_dpo(given) or not _format(given, "tools_key") else f', "tools": <{_format(given, "tools_key")}>'
    return f'{{"messages": {_messages(given)}{tools}{_signals(given)}}}'


def _messages(given: Given) -> str:
    reply = _format(given, "rejected_key" if _is_dpo(given) else "response_key")
    if not _is_plaintext(given):
        return f"<{_format(given, 'messages_key')}>{f' + <{reply}>' if _is_dpo(given) else ''}"
    system = _format(given, "system_prompt_key") or (_format(given, "system_prompt") and "format.system_prompt")
    said = {"system": system, "user": _format(given, "prompt_key"), "assistant": reply}
    return f"[{', '.join(_message(role, name) for role, name in said.items() if name)}]"


def _message(role: str, name: str) -> str:
    return f'{{"role": "{role}", "content": <{name}>}}'


def _signals(given: Given) -> str:
    """Return the signal by which dpo prefers the better reply."""
    if not _is_dpo(given):
        return ""
    better = _format(given, "chosen_key")
    text = better if _is_plaintext(given) else f"content of {better}"
    return f', "signals": [{{"kind": "correction", "text": <{text}>}}]'
