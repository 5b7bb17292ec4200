"""ART's rubric, the tool weights of AgentScope's article, and what is right without a judge.

The rubric: a right answer earns 1, 0.3 more for its source, 0.1 shared among the sources that it names, and up to 0.1
for few turns; "I don't know" is right where no mail has the answer. Below that, what is found and read on the way
counts 0.1 each: from -1 for a wrong answer, 0 for "I don't know" or none in time, -1.9 for text that calls no tool.
"""

from __future__ import annotations

from typing import Any

from flywheel import LLMJudge
from flywheel.rewards import Reward, ToolUse

from examples.email_search.world import UNKNOWN, Question, Visit

MAX_TURNS = 10
TOOLS = ("search_emails", "read_email", "answer")


def plain(text: str) -> str:
    """A text without case, spaces around and a full stop."""
    return " ".join(text.lower().strip().rstrip(".!").split())


def same(question: Question, answer: str) -> float:
    """1 for the true answer and nothing beside it."""
    return float(plain(answer) == plain(question.answer))


def rubric(visit: Visit, right: float, *, malformed: bool) -> float:
    """ART's reward."""
    asked, calls = visit.question, visit.calls
    wanted = set(asked.message_ids)
    said, sources = visit.answered or (UNKNOWN, ())
    found = any(wanted & set(call.found) for call in calls if call.name == "search_emails")
    read = any(wanted & set(call.found) for call in calls if call.name == "read_email")
    invalid = any(not call.ok for call in calls if call.name == "read_email")
    sourced = bool(wanted & set(sources))
    partial = 0.1 * (found + read + (not invalid) + sourced)
    if malformed:
        return -1.9 + partial
    if right < 1:
        return partial if plain(said) == plain(UNKNOWN) else -1 + partial
    shared = 0.1 / len(sources) if sources and wanted else 0.0
    return 1 + 0.3 * sourced + shared + 0.1 * (1 - len(calls) / MAX_TURNS)


def wanted_calls(visit: Visit) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls that were made and those that were wanted, for ToolUse.

    A search is right that finds the source; where there is none, one that finds nothing.
    """
    source = next(iter(visit.question.message_ids), None)
    said: list[dict[str, Any]] = []
    for call in visit.calls:
        arguments: dict[str, Any] = dict(call.arguments)
        if call.name == "search_emails" and ((source in call.found) if source else not call.found):
            arguments = {"right": True}
        if call.name == "answer":
            right = same(visit.question, str(arguments["answer"]))
            arguments = {"right": bool(right)}
        said.append({"name": call.name, "arguments": arguments, "ok": call.ok or source is None})
    wanted = [{"name": "search_emails", "arguments": {"right": True}}]
    if source:
        wanted.append({"name": "read_email", "arguments": {"message_id": source}})
    return said, [*wanted, {"name": "answer", "arguments": {"right": True}}]


def reward(visit: Visit, *, by_tools: bool = False, right: float | None = None) -> Reward:
    """What a visit is worth: by the rubric, or by_tools by the article's weights; both as metrics.

    right: what a judge said of the answer; None for the true answer and nothing beside it.
    """
    malformed = visit.answered is None and bool(visit.last_text)
    if right is None:
        right = same(visit.question, visit.answered[0]) if visit.answered else 0.0
    tools = ToolUse(TOOLS)(*wanted_calls(visit))
    points = rubric(visit, right, malformed=malformed)
    metrics = {
        "right": right,
        "tool_accuracy": tools.metrics["correct_tool"],
        "argument_accuracy": tools.metrics["correct_args"] * tools.metrics["correct_tool"],
        "turns": float(len(visit.calls)),
        "malformed": float(malformed),
        "rubric": points,
        "tool_use": tools.value or 0.0,
    }
    return Reward(metrics["tool_use"] if by_tools else points, metrics)


async def judged(visit: Visit, judge: LLMJudge | None, *, by_tools: bool) -> Reward:
    """The same, where a judge reads answers that are not the true one word for word."""
    if judge is None or visit.answered is None or same(visit.question, visit.answered[0]):
        return reward(visit, by_tools=by_tools)
    asked = f"{visit.question.question}\nThe true answer: {visit.question.answer}"
    verdict = await judge.ajudge(asked, visit.answered[0])
    return reward(visit, by_tools=by_tools, right=float(verdict.reward >= 0.5))
