"""OpenAI's graders as reward functions: string_check, text_similarity, score_model, python and multi.

`{{ item.… }}` is the task, `{{ sample.output_text }}` and `{{ sample.output_json.… }}` the reply. cosine and meteor
need models and word lists that are not available; they raise an error that names them.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from flywheel.errors import ConfigError, JudgeFailed
from flywheel.model import Model, outside_runs
from flywheel.reward import Reward
from flywheel.threads import DaemonThreads
from flywheel.workflow import Caller

Values = Mapping[str, Any]  # item and sample
_SAMPLING = {"max_completions_tokens": "max_completion_tokens"}  # names of graders, and of chats
_TEMPLATE = re.compile(r"\{\{\s*([\w.\[\]]+)\s*\}\}")


class _NotInReply(Exception):
    """The reply is no JSON, or lacks a field that a template names."""


def _render(text: str, values: Values) -> str:
    """Fill in a template. Raises ConfigError for an unknown name, and _NotInReply."""

    def fill(found: re.Match[str]) -> str:
        value: Any = values
        for part in re.findall(r"\w+", found[1]):
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except (KeyError, IndexError, TypeError, ValueError):
                if found[1].startswith("sample.output_json"):
                    raise _NotInReply from None
                raise ConfigError(f"the grader names {found[0]}, which is not there: item is the task") from None
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _TEMPLATE.sub(fill, text)


_CHECKS: dict[str, Callable[[str, str], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "like": lambda said, wanted: wanted in said,
    "ilike": lambda said, wanted: wanted.casefold() in said.casefold(),
}


def _grams(words: list[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + length]) for at in range(len(words) - length + 1))


def _rouge(length: int) -> Callable[[list[str], list[str]], float]:
    def score(said: list[str], wanted: list[str]) -> float:
        """F1 of the n-grams (Lin 2004)."""
        ours, theirs = _grams(said, length), _grams(wanted, length)
        return 2 * (ours & theirs).total() / max(1, ours.total() + theirs.total())

    return score


def _rouge_l(said: list[str], wanted: list[str]) -> float:
    """F1 of the longest common subsequence (Lin 2004)."""
    row = [0] * (len(wanted) + 1)
    for word in said:
        before = 0
        for at, other in enumerate(wanted, 1):
            before, row[at] = row[at], before + 1 if word == other else max(row[at], row[at - 1])
    return 2 * row[-1] / max(1, len(said) + len(wanted))


def _shares(said: list[str], wanted: list[str]) -> list[tuple[int, int, int]]:
    """For n-grams of 1 to 4 words, return the numbers of common, given and wanted ones."""
    both = [(_grams(said, n), _grams(wanted, n)) for n in range(1, 5)]
    return [((ours & theirs).total(), ours.total(), theirs.total()) for ours, theirs in both]


def _bleu(said: list[str], wanted: list[str]) -> float:
    """Sentence BLEU of up to four words, not smoothed (Papineni et al. 2002)."""
    shares = [(common, total) for common, total, _ in _shares(said, wanted) if total]
    if not shares or not all(common for common, _ in shares):
        return 0.0
    mean = sum(math.log(common / total) for common, total in shares) / len(shares)
    return float(math.exp(mean + min(0.0, 1 - len(wanted) / len(said))))


def _gleu(said: list[str], wanted: list[str]) -> float:
    """The smaller of precision and recall of n-grams of one to four words (Wu et al. 2016)."""
    common, ours, theirs = (sum(column) for column in zip(*_shares(said, wanted), strict=True))
    return float(common / max(1, ours, theirs))


_SIMILARITIES: dict[str, Callable[[list[str], list[str]], float]] = {
    "bleu": _bleu,
    "gleu": _gleu,
    "rouge_l": _rouge_l,
    **{f"rouge_{length}": _rouge(length) for length in range(1, 6)},
}


def _similarity(metric: str, said: str, wanted: str) -> float:
    if metric == "fuzzy_match":
        return difflib.SequenceMatcher(None, said, wanted, autojunk=False).ratio()
    return _SIMILARITIES[metric](said.split(), wanted.split())


_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp, "sqrt": math.sqrt,
    "log": math.log,
}  # fmt: skip


def _calculate(node: ast.AST, scores: Mapping[str, float]) -> float:
    """Evaluate a formula of numbers, graders' names, + - * / ^ and some functions. Raises ConfigError otherwise."""
    if isinstance(node, ast.Expression):
        return _calculate(node.body, scores)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in scores:
        return scores[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculate(node.left, scores), _calculate(node.right, scores))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculate(node.operand, scores))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_calculate(one, scores) for one in node.args))
    raise ConfigError(f"calculate_output has {ast.unparse(node)!r}: numbers, {sorted(scores)} and arithmetic are known")


class Grader:
    """One of OpenAI's graders, from from_openai_grader. It is called with a task and a reply, like a judge of learn."""

    def __init__(self, grader: Mapping[str, Any], model: Model | None, run_python: bool) -> None:
        self._grader = grader
        self._model = model
        self._parts: dict[str, Grader] = {}
        self._kind = kind = grader.get("type")
        if kind == "string_check":
            _one_of("operation", grader.get("operation"), _CHECKS)
        elif kind == "text_similarity":
            _one_of("evaluation_metric", grader.get("evaluation_metric"), [*_SIMILARITIES, "fuzzy_match"])
        elif kind == "score_model":
            if model is None:
                raise ConfigError("a score_model grader asks a model: give model=, one that is not the trainee")
            if model.is_trainee:
                raise ConfigError("the trainee would grade itself: give another model, or a version of it")
            asked = grader["input"]
            turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            self._turns = [(turn["role"], _text_of(turn["content"])) for turn in turns]
        elif kind == "python":
            if not run_python:
                raise ConfigError("a python grader runs its source here: say run_python=True if you trust it")
            names: dict[str, Any] = {}
            exec(compile(grader["source"], "grader", "exec"), names)
            self._grade = names["grade"]
        elif kind == "multi":
            parts = grader["graders"]
            named = parts.items() if isinstance(parts, Mapping) else [(part["name"], part) for part in parts]
            self._parts = {name: Grader(part, model, run_python) for name, part in named}
            self._formula = ast.parse(grader["calculate_output"].replace("^", "**"), mode="eval")
        else:
            _one_of("type", kind, ["string_check", "text_similarity", "score_model", "python", "multi"])

    async def __call__(self, task: Any, reply: Any) -> Reward:
        """Return the score, with the scores of a multi grader's parts as metrics.

        A reply that lacks a field of `sample.output_json` that the grader names scores 0.
        """
        text = reply if isinstance(reply, str) else str(reply)
        sample: dict[str, Any] = {"output_text": text}
        try:
            sample["output_json"] = json.loads(text)
        except ValueError:
            sample["output_json"] = None
        values = {"item": task, "sample": sample}
        parts = {name: (await part(task, reply)).value or 0.0 for name, part in self._parts.items()}
        try:
            return Reward(_calculate(self._formula, parts) if parts else await self._score(values), parts)
        except _NotInReply:
            return Reward(0.0)

    async def _score(self, values: Values) -> float:
        if self._kind == "python":
            return await _in_thread(lambda values: float(self._grade(values["sample"], values["item"])), values)
        if self._kind == "score_model":
            return await self._ask(values)
        said, wanted = (_render(self._grader[name], values) for name in ("input", "reference"))
        if self._kind == "string_check":
            return float(_CHECKS[self._grader["operation"]](said, wanted))
        metric = self._grader["evaluation_metric"]
        return await _in_thread(lambda texts: _similarity(metric, *texts), (said, wanted))

    async def _ask(self, values: Values) -> float:
        """Return a model's score within `range`, by default from 0 to 1. Raises JudgeFailed."""
        import openai

        assert self._model is not None
        low, high = self._grader.get("range") or (0.0, 1.0)
        messages: list[Any] = [{"role": role, "content": _render(text, values)} for role, text in self._turns]
        messages.append({"role": "user", "content": f'Answer {{"result": a number from {low:g} to {high:g}}} alone.'})
        model = self._model
        async with outside_runs(model, judges=True) as client:
            try:
                given = self._grader.get("sampling_params") or {}
                options = {_SAMPLING.get(name, name): value for name, value in given.items() if value is not None}
                reply = await client.chat.completions.create(model=model.name, messages=messages, **options)
                said = re.search(r'"result"\s*:\s*(-?[\d.]+(?:[eE][-+]?\d+)?)', reply.choices[0].message.content or "")
                score = float(said[1]) if said else math.nan
            except (openai.OpenAIError, ValueError) as exc:
                raise JudgeFailed(f"the grader's model {model.name} gave no score: {exc}") from exc
        if not low <= score <= high:
            raise JudgeFailed(f"the grader's model {model.name} gave no score from {low:g} to {high:g}")
        return score


async def _in_thread(function: Callable[[Any], float], values: Any) -> float:
    """Return a function's result. It may take long, which must delay neither other runs nor the end of its time."""
    with DaemonThreads(1, "flywheel-grader") as threads:
        return float(await Caller(function, ("values",), threads)(values))


def _text_of(content: Any) -> str:
    """Return the text of a message: a string, an object such as input_text, or a list of them. Raises ConfigError."""
    if isinstance(content, list):
        return "\n".join(map(_text_of, content))
    text = content.get("text") if isinstance(content, Mapping) else content
    if not isinstance(text, str):
        raise ConfigError(f"a score_model grader asks with {content!r}: give text")
    return text


def _one_of(name: str, value: Any, known: Any) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} of a grader: {sorted(known)} are known")
