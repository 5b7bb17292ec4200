"""The training data: random rows of prompt and reply. Imports only NumPy: the peers' Python imports it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY = 32_000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
HALF_BILLION: dict[str, Any] = SHAPE | {  # the shape of Qwen2.5-0.5B
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "tie_word_embeddings": True,
}


def shape_of(device: str) -> dict[str, Any]:
    """The model's shape; larger on an accelerator, to give it enough work."""
    return SHAPE if device == "cpu" else HALF_BILLION


@dataclass(frozen=True, slots=True)
class Row:
    prompt: list[int]
    reply: list[int]
    run: str  # rows of a run are turns of one conversation
    other: list[int] | None = None  # a reply to the same prompt; this row's is preferred over it
    words: list[int] | None = None  # words about it

    @property
    def tokens(self) -> int:
        own = len(self.prompt) + len(self.reply)
        return own if self.other is None else own + len(self.prompt) + len(self.other)

    @property
    def sampled(self) -> int:
        return len(self.reply) + len(self.other or ())


def rows(case: str) -> list[Row]:
    """The rows of a case, the same at each call. CASE/N: the first 1/N of them."""
    name, _, part = case.partition("/")
    found = CASES[name](np.random.default_rng(0))
    return found[: len(found) // int(part or 1)]


def _some(draw: np.random.Generator, count: int) -> list[int]:
    found: list[int] = draw.integers(1, VOCABULARY, count).tolist()
    return found


def _mix(draw: np.random.Generator) -> list[Row]:
    """64 sequences of 32 to 512 tokens, a quarter of each prompt."""
    lengths = draw.integers(32, 513, 64).tolist()
    return [Row(_some(draw, n // 4), _some(draw, n - n // 4), str(number)) for number, n in enumerate(lengths)]


def _turns(draw: np.random.Generator) -> list[Row]:
    """4 conversations of 8 turns: 100 tokens, then 64 more with each reply."""
    found = []
    for run in range(4):
        history = _some(draw, 100)
        for _ in range(8):
            found.append(Row(history, _some(draw, 64), str(run)))
            history = found[-1].prompt + found[-1].reply
    return found


def _system(draw: np.random.Generator) -> list[Row]:
    """32 sequences after one system prompt of 1,024 tokens: 64 tokens of the user, 64 of the reply."""
    system = _some(draw, 1024)
    return [Row(system + _some(draw, 64), _some(draw, 64), str(number)) for number in range(32)]


def _pairs(draw: np.random.Generator) -> list[Row]:
    """32 preferences: two replies to one prompt, each as one of `mix`."""
    lengths = draw.integers(32, 513, (32, 2)).tolist()
    found = []
    for number, (one, other) in enumerate(lengths):
        prompt = one // 4
        reply, worse = _some(draw, one - prompt), _some(draw, max(8, other - prompt))
        found.append(Row(_some(draw, prompt), reply, str(number), other=worse))
    return found


def _said(draw: np.random.Generator) -> list[Row]:
    """Half of the rows of `mix`, each with 32 tokens of words."""
    return [Row(row.prompt, row.reply, row.run, words=_some(draw, 32)) for row in _mix(draw)[:32]]


CASES = {"mix": _mix, "turns": _turns, "system": _system, "pairs": _pairs, "rated": _mix, "said": _said}


def is_up(number: int) -> bool:
    """The ratings of the rows of `rated`."""
    return number % 2 == 0


def distinct_tokens(found: list[Row]) -> int:
    """The number of positions with different tokens before them."""
    texts = [row.prompt + reply for row in found for reply in (row.reply, row.other) if reply is not None]
    return len({hash(tuple(text)[:end]) for text in texts for end in range(1, len(text) + 1)})
