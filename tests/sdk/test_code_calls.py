"""Tools that are called in the text of a reply, as code or as JSON, which agents may run in a thread of any context."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import flywheel
import pytest
from flywheel.tools import ShadowGuard

from tests.sdk.frameworks import run_program

_names = itertools.count()
CALL = 'refund(order="B2")'


@pytest.mark.parametrize(
    ("policy", "timeout_s", "code", "unsafe"),
    [
        ("read_only", 30, CALL, 1),
        ("read_only", None, 'again = refund\nagain(order="B2")', 1),
        ("recorded", None, CALL, 0),
    ],
)
def test_a_shadow_run_of_an_agent_that_runs_code_writes_nothing(
    explorer, scripted_engine, policy, timeout_s, code, unsafe
):
    scripted_engine.script.message = {"content": f"Thought: I refund it.\n<code>\n{code}\n</code>"}
    found = run_program("code_agent_program.py", explorer.url, policy, json.dumps(timeout_s))
    assert found["wrote"] == ["A1"], "production's own"
    assert (found["unsafe"], found["rewarded"]) == (unsafe, 1 - unsafe), found


@pytest.fixture
def name() -> str:
    """A writing tool's."""
    name = f"refund_by_code_{next(_names)}"  # test_tools.py has names of its own in the same process
    flywheel.declare(name, read_only=False)
    return name


def whole(**message: Any) -> list[bytes]:
    """A reply as it is received, in pieces that end anywhere."""
    message = {"role": "assistant", **message}
    body = json.dumps({"id": "c", "choices": [{"index": 0, "message": message}]}, ensure_ascii=False).encode()
    return [body[at : at + 7] for at in range(0, len(body), 7)]


def streamed(*texts: str, field: str = "content") -> list[bytes]:
    """A stream with an event for each text, which are two choices' in turn."""
    events = []
    for number, text in enumerate(texts):
        for index in (0, 1):
            said = text if index == 0 else f"{number} "
            events.append({"id": "c", "choices": [{"index": index, "delta": {field: said}}]})
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\r\n\r\n" for event in events) + b"data: [DONE]\n\n"
    return [body[at : at + 5] for at in range(0, len(body), 5)]


def refuses(pieces: list[bytes], policy: flywheel.ReadOnlyTools | None = None) -> bool:
    """Whether the reply ends the run before its last piece has reached the agent."""
    run: Any = SimpleNamespace(attempts=[])
    see = ShadowGuard(run, policy or flywheel.ReadOnlyTools(), []).watch_reply()
    try:
        for piece in pieces:
            see(piece)
    except flywheel.UnsafeTool:
        assert len(run.attempts) == 1
        return True
    assert run.attempts == []
    return False


@pytest.mark.parametrize(
    "text",
    [
        "<code>\nNAME(order='B2')\n</code>",
        "x = 1\n\tNAME (order='B2')",
        "tools.NAME('B2')",
        "ü—NAME('B2')",
        'Action: {"name": "NAME", "arguments": {"order": "B2"}}',
        '{"path": "C:\\dir"} print(NAME("B2"))',
    ],
)
def test_a_reply_whose_text_calls_a_writing_tool_does_not_reach_the_agent(name, text):
    text = text.replace("NAME", name)
    assert refuses(whole(content=text))
    assert refuses(whole(content=[{"type": "text", "text": text}]))
    assert refuses(streamed(*text)), "a letter at a time"
    assert not refuses(whole(content=text), flywheel.RecordedTools()), "the tool answers it"


def test_code_in_the_arguments_of_a_call_is_searched_too(name):
    code = json.dumps({"code": f"x = 1\n{name}('B2')"})
    assert refuses(whole(content=None, tool_calls=[{"function": {"name": "python_of_the_agent", "arguments": code}}]))


@pytest.mark.parametrize(
    "text", ["NAME it is", "your NAME (A1) is", "do_NAME(1)", "NAMEs(1)", "reNAME(1)", "NAME: (1)", '{"name": "NAMEs"}']
)
def test_a_reply_that_only_mentions_a_writing_tool_is_not_refused(name, text):
    text = text.replace("NAME", name) + " and more of it" * 30
    assert not refuses(whole(content=text))
    assert not refuses(streamed(*text))


def test_a_call_that_is_only_thought_of_and_one_of_a_reading_tool_are_not_refused(name):
    flywheel.declare(f"{name}_status", read_only=True)
    assert not refuses(whole(content=f"{name}_status('B2')", reasoning_content=f"{name}('B2')?"))
    assert not refuses(streamed(*f"{name}('B2')", field="reasoning_content"))
