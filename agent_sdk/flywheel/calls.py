"""Finds the tools that a reply calls, while its pieces pass to the agent.

A call is an object with the tool's name, as the API has it, or stands in the text: as JSON that an agent reads, or as
code that it runs, such as smolagents' CodeAgent.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

_NAMED = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENT = r"""\s*(?:["'\\)\[{]|\w+\s*=)"""  # after white space: "order (A1)" may be prose
# \n, not a line's end: code in a string of JSON
_CODE = re.compile(rf"(?:\\[nrt]|(?<!\w))(\w+)(?:\(|[ \t]+\((?={_ARGUMENT}))")
_CARRY = 200  # characters that are searched again together with the next piece
_TEXTS = ("content", "text", "arguments")  # fields that an agent may read calls from; not what a model only thinks
_LINE_END = re.compile(r"[\r\n]")


class CalledTools:
    """The tools that one reply calls, whole or streamed.

    >>> called = CalledTools()
    >>> list(called.see(b'data: {"choices": [{"delta": {"content": "ref"}}]}\\n\\n'))
    []
    >>> list(called.see(b'data: {"choices": [{"delta": {"content": "und(order)"}}]}\\n\\n'))
    ['refund']
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail = ""  # of the pieces so far
        self._open = ""  # a line of a stream, or a whole reply, that has not ended
        self._texts: dict[tuple[Any, ...], str] = {}  # the last characters, by place in the reply

    def see(self, piece: bytes) -> Iterator[str]:
        """Yield the names that are called up to the end of this piece; a name may come several times."""
        text = self._decoder.decode(piece)
        passed = self._tail + text
        self._tail = passed[-_CARRY:]
        for found in _NAMED.finditer(passed):
            yield _unescaped(found[1])
        for place, more in (one for event in self._events(text) for one in _texts_of(event)):
            known = self._texts.get(place, "")
            said, begin = known + more, int(len(known) > _CARRY)  # the first character is only looked back at
            self._texts[place] = said[-_CARRY - 1 :]
            for pattern in (_NAMED, _CODE):
                for found in pattern.finditer(said, begin):
                    yield _unescaped(found[1])

    def _events(self, text: str) -> Iterator[Any]:
        """Yield what ends in this text: events of a stream, or a whole reply."""
        self._open += text
        if self._open.lstrip()[:1] == "{":
            if self._open.rstrip()[-1:] == "}":
                yield from _parsed(self._open)
            return
        *lines, self._open = _LINE_END.split(self._open)
        for line in lines:
            if line.startswith("data:"):
                yield from _parsed(line[5:])


def _parsed(text: str) -> Iterator[Any]:
    try:
        yield json.loads(text)
    except ValueError:
        return  # it has not ended, or is a stream's [DONE]


def _texts_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the texts in a reply or an event that an agent may read calls from. A list's items may have an index."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _texts_of(one, (*place, name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            index = one.get("index", number) if isinstance(one, dict) else number
            yield from _texts_of(one, (*place, str(index)))
    elif isinstance(value, str) and place[-1:] and place[-1] in _TEXTS:
        yield place, value


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"', strict=False))
    except ValueError:  # in text, which need not be JSON
        return name
