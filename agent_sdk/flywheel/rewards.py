"""Rewards: plain functions that score answers and tool calls.

The scores compare an answer with the truth; each returns 0.0 to 1.0. `Weighted` combines named parts to one reward.
reward.py converts results of reward functions; OpenAI's graders are in graders.py, judges in judge.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flywheel.errors import ConfigError
from flywheel.reward import Reward as Reward

if TYPE_CHECKING:
    from flywheel.graders import Grader
    from flywheel.model import Model


def exact(said: str, truth: str) -> float:
    """Return 1.0 if both are equal, ignoring surrounding whitespace.

    >>> exact(" Paris\\n", "Paris"), exact("paris", "Paris")
    (1.0, 0.0)
    """
    return float(said.strip() == truth.strip())


def contains(said: str, truth: str | Iterable[str]) -> float:
    """Return 1.0 if the answer contains the text, or one of the texts, ignoring case.

    >>> contains("It is Paris.", "paris"), contains("It is Rome.", ["Paris", "Lyon"])
    (1.0, 0.0)
    """
    wanted = [truth] if isinstance(truth, str) else list(truth)
    return float(any(one.casefold() in said.casefold() for one in wanted))


def one_of(said: str, truths: Iterable[str]) -> float:
    """Return 1.0 if the answer is one of these.

    >>> one_of("b", ["a", "b"])
    1.0
    """
    return max((exact(said, truth) for truth in truths), default=0.0)


# A sign between two terms, as in "7-2", is not part of a number.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+\u2212])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number in a text; commas between digits are ignored.

    >>> last_number("first 12, in all $1,234.50.")
    1234.5
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\N{MINUS SIGN}", "-")) if found else None


def number(said: str, truth: float | str, *, tolerance: float = 1e-9) -> float:
    """Return 1.0 if the last number in the answer is the true one, within a relative and absolute tolerance.

    >>> number("so it is 42.0", 42), number("no idea", 42)
    (1.0, 0.0)
    """
    wanted = last_number(truth) if isinstance(truth, str) else float(truth)
    given = last_number(said)
    if wanted is None:
        raise ConfigError(f"truth={truth!r} has no number")
    return float(given is not None and math.isclose(given, wanted, rel_tol=tolerance, abs_tol=tolerance))


def in_box(text: str) -> str | None:
    r"""Return the contents of the last \boxed{…} in a text, including nested braces; None if there is none.

    >>> in_box(r"thus \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    depth, start = 1, begin + len("\\boxed{")
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def boxed(said: str, truth: float | str, *, tolerance: float = 1e-9) -> float:
    r"""Return 1.0 if the last \boxed{…} contains the truth, as a number or word for word.

    >>> boxed(r"\boxed{ 7 }", 7), boxed("7", 7)
    (1.0, 0.0)
    """
    inside = in_box(said)
    if inside is None:
        return 0.0
    wanted = truth if isinstance(truth, str) else str(truth)
    if _NUMBER.fullmatch(inside.strip()) and _NUMBER.fullmatch(wanted.strip()):
        return number(inside, wanted, tolerance=tolerance)
    return exact(inside, wanted)


def gsm8k(said: str, truth: str) -> Reward:
    r"""GSM8K: compare the number after `####` in the truth with the answer's \boxed{…}, `####`, or last number.

    The reward is correctness plus 0.1 if the answer has a number in one of the two formats.

    >>> gsm8k(r"So \boxed{18}", "9 * 2 = <<9*2=18>>18\n#### 18").value
    1.1
    """
    wanted = _after_mark(truth)
    inside = in_box(said)
    marked = inside if inside is not None else _after_mark(said)
    has_mark = inside is not None or "####" in said
    right, formed = number(marked, wanted), float(has_mark and last_number(marked) is not None)
    return Reward(right + 0.1 * formed, {"correctness": right, "format": formed})


def _after_mark(text: str) -> str:
    """Return the first number after the last `####`; the whole text without one."""
    _, mark, rest = text.rpartition("####")
    found = _NUMBER.search(rest) if mark else None
    return found[0] if found else rest


@dataclass(frozen=True)
class Weighted:
    """Combines named parts to one reward: the weighted sum of the parts; parts without a weight are only metrics.

    rule "server" sends only the parts: the explorer weights them by its `reward.metrics`, which may change later.
    Reports and evaluations show the reward by the weights given here.

    >>> rule = Weighted({"correctness": 3.0, "steps": -0.1, "format": 0.5})
    >>> rule({"correctness": 1.0, "steps": 4.0, "format": 1.0}).value
    3.1
    """

    weights: Mapping[str, float]
    rule: Literal["here", "server"] = "here"

    def __call__(self, parts: Mapping[str, float]) -> Reward:
        """Return the reward. Raises ConfigError for a missing part."""
        if missing := sorted(set(self.weights) - set(parts)):
            raise ConfigError(f"parts {missing} are missing: give each part of {sorted(self.weights)}")
        metrics = {name: float(value) for name, value in parts.items()}
        total = round(math.fsum(weight * metrics[name] for name, weight in self.weights.items()), 12)
        return Reward(total, metrics) if self.rule == "here" else Reward(None, metrics, shown=total)


@dataclass(frozen=True)
class ToolUse:
    """Scores the tool calls of a run against the wanted ones, with the weights of the article's ToolUseTrainer.

    A call is `{"name": …, "arguments": {…}}`, optionally with `"ok"`: whether the tool succeeded. correct_tool and
    tool_success are shares of the wanted calls, correct_args is a share of those with the right tool; invalid_tool is
    the number of calls of unknown tools.

    >>> score = ToolUse(tools=["search", "read"])
    >>> said = [{"name": "search", "arguments": '{"q": "a"}', "ok": True}, {"name": "fly", "arguments": {}}]
    >>> dict(score(said, [{"name": "search", "arguments": {"q": "a"}}]).metrics)
    {'correct_tool': 1.0, 'correct_args': 1.0, 'tool_success': 1.0, 'invalid_tool': 1.0}
    >>> score(said, [{"name": "search", "arguments": {"q": "a"}}]).value
    0.5
    """

    tools: Sequence[str]
    correct_tool: float = 1.0
    correct_args: float = 0.5
    tool_success: float = 1.0
    invalid_tool: float = -2.0

    def __call__(self, said: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> Reward:
        """Return the reward, with its parts as metrics."""
        left, by_tool, by_args, succeeded = list(said), 0, 0, 0
        for want in wanted:
            same = [call for call in left if call["name"] == want["name"]]
            if not same:
                continue
            same.sort(key=lambda call: _arguments(call) != _arguments(want))
            left.remove(same[0])
            by_tool += 1
            by_args += _arguments(same[0]) == _arguments(want)
            succeeded += bool(same[0].get("ok"))
        parts = {
            "correct_tool": by_tool / max(1, len(wanted)),
            "correct_args": by_args / max(1, by_tool),
            "tool_success": succeeded / max(1, len(wanted)),
            "invalid_tool": float(sum(call["name"] not in self.tools for call in said)),
        }
        return Weighted({name: getattr(self, name) for name in parts})(parts)


def _arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments as an object; as text if they are not JSON."""
    arguments = call.get("arguments") or {}
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def from_openai_grader(
    grader: str | Mapping[str, Any], *, model: Model | None = None, run_python: bool = False
) -> Grader:
    """Return one of OpenAI's graders, from JSON or an object, as a reward function of (task, reply); see graders.py.

    model: for score_model graders. run_python: whether a grader's Python source may run in this process.

    >>> import asyncio
    >>> check = {"type": "string_check", "operation": "eq", "input": "{{ sample.output_text }}"}
    >>> grade = from_openai_grader({**check, "reference": "{{ item.answer }}"})
    >>> asyncio.run(grade({"answer": "42"}, "42")).value
    1.0
    """
    from flywheel.graders import Grader

    return Grader(json.loads(grader) if isinstance(grader, str) else grader, model, run_python)
