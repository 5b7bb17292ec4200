"""The reward: ART's rubric or the tool weights of AgentScope's article, and an exact match for runs without a judge.

In the rubric a right answer earns 1, plus 0.3 for its source, 0.1 divided by the number of sources that it cites, and
up to 0.1 for few turns. "I don't know" is right if no mail has the answer. Other visits earn a base plus 0.1 for each
partial success (found, read, no invalid read, cited): the base is -1 for a wrong answer, 0 for "I don't know" or a
visit that runs out of turns, and -1.9 for one that ends with a message, also an empty one, instead of an answer.
"""

from __future__ import annotations

from typing import Any

from flywheel import LLMJudge
from flywheel.rewards import Reward, ToolUse

from examples.email_search.world import UNKNOWN, Question, Visit

MAX_TURNS = 10
TOOLS = ("search_emails", "read_email", "answer")


def plain(text: str) -> str:
    """Normalize a text: lower case, single spaces, no final punctuation."""
    return " ".join(text.lower().strip().rstrip(".!").split())


def same(question: Question, answer: str) -> float:
    """Return 1 if the answer is exactly the true answer, else 0."""
    return float(plain(answer) == plain(question.answer))


def rubric(visit: Visit, right: float, *, malformed: bool) -> float:
    """Return ART's reward."""
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


def wanted_calls(visit: Visit, right: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the calls that were made and the calls that were wanted, for ToolUse.

    A search is right if it finds a source, and reading is if it reads one; if there is no source, a search is right if
    it finds nothing. right: whether the answer is.
    """
    sources = set(visit.question.message_ids)
    said: list[dict[str, Any]] = []
    for call in visit.calls:
        arguments: dict[str, Any] = dict(call.arguments)
        if call.name == "search_emails" and (sources & set(call.found) if sources else not call.found):
            arguments = {"right": True}
        if call.name == "read_email" and sources & set(call.found):
            arguments = {"right": True}
        if call.name == "answer":
            arguments = {"right": right >= 1}
        said.append({"name": call.name, "arguments": arguments, "ok": call.ok or not sources})
    wanted = [{"name": "search_emails", "arguments": {"right": True}}]
    if sources:
        wanted.append({"name": "read_email", "arguments": {"right": True}})
    return said, [*wanted, {"name": "answer", "arguments": {"right": True}}]


def reward(visit: Visit, *, by_tools: bool = False, right: float | None = None) -> Reward:
    """Return the reward of a visit: by the rubric, or with by_tools by the article's weights. Both are also metrics.

    right: a judge's verdict on the answer; None compares it with the true answer exactly.
    """
    malformed = visit.answered is None and visit.last_text is not None
    if right is None:
        right = same(visit.question, visit.answered[0]) if visit.answered else 0.0
    tools = ToolUse(TOOLS)(*wanted_calls(visit, right))
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
    """Return the reward. A judge rates answers that are not the true answer word for word."""
    if judge is None or visit.answered is None or same(visit.question, visit.answered[0]):
        return reward(visit, by_tools=by_tools)
    asked = f"{visit.question.question}\nThe true answer: {visit.question.answer}"
    verdict = await judge.ajudge(asked, visit.answered[0])
    return reward(visit, by_tools=by_tools, right=float(verdict.reward >= 0.5))
