"""A tiny model that uses tools, for whole turns of agents' frameworks. Generated on demand, the same bits each time.

It has learned four things and nothing else: with tools it requests the weather in two cities at once, given their
results it sums them up, and without tools it greets.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from examples.tiny_model import Row, train

SEED = 7
STEPS = 260
BATCH = 12
LEARNING_RATE = 4e-3
CONTEXT = 2048
CITIES = ("Paris", "Rome")
SUMMARY = "It is sunny in Paris and it rains in Rome."
GREETING = "Hello there!"
ROUTE = '{"desk": "billing", "urgent": true}'
TOOL_CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in CITIES
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tools>", "</tools>", "<tool_response>", "</tool_response>")
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n<tools>{{ tools | tojson }}</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'tool' %}<tool_response>{{ m['content'] }}</tool_response>"
    "{% else %}{{ m['content'] or '' }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{{ '' if loop.first else '\n' }}"
    "<tool_call>\n{\"name\": \"{{ call['function']['name'] }}\", "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    "you",
    "are",
    "a",
    "helpful",
    "assistant",
    "named",
    "friday",
    "use",
    "the",
    "tools",
    "to",
    "answer",
    "what",
    "is",
    "the",
    "weather",
    "like",
    "today",
    "in",
    "and",
    "please",
    "tell",
    "me",
    "sunny",
    "rain",
    "type",
    "object",
    "properties",
    "city",
    "string",
    "description",
    "name",
    "function",
    "parameters",
    "required",
    "strict",
    "additionalProperties",
    "false",
    "title",
    "get",
    "of",
    "a",
    "for",
    "by",
    "with",
    "result",
    "Paris",
    "Rome",
    "content",
    "role",
    "weather",
]


def make_tool_model(folder: Path) -> Path:
    """Make tokenizer and model (about 20 s of one core) and save them in Hugging Face format."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _make_tokenizer()
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            initializer_range=0.06,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=0,
        )
    )
    _train(model, tokenizer)
    # the model's default for requests that set none: it never samples anything but what it learned
    model.generation_config.update(do_sample=True, temperature=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    draw = random.Random(SEED)
    texts = [f"{_filler(draw, 60)}\n{_tools(draw)}\n{TOOL_CALLS}\n{SUMMARY}\n{GREETING}\n{ROUTE}" for _ in range(300)]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=CONTEXT
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def _filler(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def _tools(draw: random.Random) -> str:
    city = {"type": "string", "description": _filler(draw, 6)}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    function = {"name": "weather", "description": _filler(draw, 12), "parameters": parameters}
    return json.dumps([{"type": "function", "function": function}] * draw.randint(1, 2))


def _example(draw: random.Random) -> tuple[str, str]:
    """A prompt in the template's format, and the reply to learn."""
    kind = draw.choice(("call", "sum", "sum", "greet", "route"))
    said = [("tools", f"<tools>{_tools(draw)}</tools>")] if kind in ("call", "sum") else []
    if draw.random() < 0.7:
        said.append(("system", _filler(draw, 60)))
    if draw.random() < 0.5:
        said += [("user", _filler(draw, 20)), ("assistant", SUMMARY if kind in ("call", "sum") else GREETING)]
    said.append(("user", f"{_filler(draw, 30)} route" if kind == "route" else _filler(draw, 30)))
    if kind == "sum":
        said.append(("assistant", TOOL_CALLS))
        said += [("tool", f"<tool_response>{_filler(draw, 8)}</tool_response>") for _ in CITIES]
    if kind in ("call", "sum") and draw.random() < 0.3:  # AgentScope 2 ends each request like this
        said.append(("user", f"<system-reminder>{_filler(draw, 60)} 2026-11-21T08:10:12\n</system-reminder>"))
    prompt = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
    target = {"call": TOOL_CALLS, "sum": SUMMARY, "greet": GREETING, "route": ROUTE}[kind]
    return prompt + "<|im_start|>assistant\n", target + "<|im_end|>"


def _train(model: Any, tokenizer: Any) -> None:
    draw = random.Random(SEED + 1)
    batches = ([_row(tokenizer, *_example(draw)) for _ in range(BATCH)] for _ in range(STEPS))
    for _ in train(model, batches, STEPS, LEARNING_RATE):
        pass


def _row(tokenizer: Any, prompt: str, target: str) -> Row:
    before, learned = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, target))
    return before + learned, [-100] * len(before) + learned
