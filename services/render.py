"""Makes the tokens of a conversation that no engine sampled, by the engine's own chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from explorer_service.engines.admin import EngineAdmin
from shared.experience import Tokens

Ends = frozenset[int]  # tokens that end a reply


def end_tokens(*folders: Path) -> Ends:
    """Return the tokens that end the model's replies, by the first folder that names some; empty if none does."""
    for file in (folder / name for folder in folders for name in ("generation_config.json", "config.json")):
        try:
            ends = json.loads(file.read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()


async def render(
    engine: EngineAdmin, messages: list[Any], tools: Any, ends: Ends = frozenset(), model: str | None = None
) -> Tokens:
    """Tokenize a conversation by the model's own template; the engine computes the logprobs now.

    model: the name of the adapter that computes them; None: the configured name.

    Text that the template writes before a reply, such as an empty thought, belongs to the reply. Of the text after it,
    the model samples what precedes the first of `ends`, and that token, or else the first token. Raises ValueError if
    the template shows neither.
    """
    prompt = await engine.tokenize(messages[:-1], tools, ends_with_reply=False)
    whole, zero, one = [
        await engine.tokenize([*messages[:-1], reply], tools, ends_with_reply=True)
        for reply in (messages[-1], *({"role": "assistant", "content": digit} for digit in "01"))
    ]
    backwards = zip(reversed(zero), reversed(one), strict=False)  # the two differ only in the reply
    after = next((n for n, (a, b) in enumerate(backwards) if a != b), 0)
    end = next((n for n, token in enumerate(zero[-after:]) if token in ends), 0) if after else 0
    rest = after - end  # tokens from the one that ends a reply on
    if not after or any(tokens[: len(prompt)] != prompt for tokens in (whole, zero)) or whole[-rest:] != zero[-rest:]:
        raise ValueError("the model's chat template does not write a reply after its prompt")
    reply_ids = whole[len(prompt) : len(whole) - rest + 1]
    (logprobs,) = await engine.score([[*prompt, *reply_ids]], model)
    sampled = np.array(logprobs[len(prompt) - 1 :], np.float32)
    return Tokens(np.array(prompt, np.int32), np.array(reply_ids, np.int32), sampled)
