"""Tiny base models for the examples, made on this machine; nothing is downloaded.

A model is a Qwen2 with about half a million parameters. Its tokenizer is trained on the example's own words, and a
supervised warm start on demonstrations teaches what the example chooses: an answer format and the use of tools, but
not the skill to be learned. Making a model is deterministic. The cache folder is named by a digest of the programs that
make the model. This module is independent of the examples.

    python -m examples.tiny_model RECIPE.json FOLDER

The command needs torch and transformers. RECIPE.json is a file that Recipe.dump wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ASSISTANT = "<|im_start|>assistant\n"
TOOL_MARKS = ("<tool_call>", "</tool_call>")
PARTS = 4  # of a batch
# Tools are listed in a message of their own. Calls are <tool_call> objects, which vLLM's hermes parser reads.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool['function']['name'] }} "
    "{{ tool['function']['parameters']['properties'] | list | join(' ') }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Progress = Callable[[str, float], None]  # (current step, fraction done)
Row = tuple[list[int], list[int]]  # token ids, and labels of the same length; -100: not learned


@dataclass(frozen=True)
class Demonstration:
    """A conversation in the form of a chat. Every assistant message is learned, except those with `"learn": False`.

    The arguments of a tool call are an object, not a JSON string. tools: as in a chat request.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Recipe:
    """The inputs of a model. Demonstrations are learned in order, and repeated from the first when they run out."""

    demonstrations: Sequence[Demonstration]
    teaches: str = "the form of answers"  # shown while the model is made
    texts: Sequence[str] = ()  # trains the tokenizer; default: the demonstrations
    vocabulary: int = 1600
    context: int = 256
    steps: int = 220
    batch: int = 64
    learning_rate: float = 3e-3
    seed: int = 20
    layers: int = 2
    width: int = 128
    heads: int = 4  # vLLM's CPU attention requires heads of at least 32
    has_tools: bool = False
    as_served: bool = True  # tokenize as AutoTokenizer does, which splits a Qwen2's numbers into digits
    sampling: dict[str, float] = field(default_factory=dict)  # the model's defaults, such as temperature

    def dump(self, file: Path) -> None:
        """Write the recipe as JSON."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Recipe:
        """Read a file that dump wrote."""
        plain = json.loads(file.read_text(encoding="utf-8"))
        demonstrations = [Demonstration(**one) for one in plain.pop("demonstrations")]
        return cls(demonstrations=demonstrations, **plain)


def folder_of(example: str, *variant: str) -> Path:
    """Return the cache folder of examples/EXAMPLE's model. Its name is a digest of the programs and the variant."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flywheel"
    here = Path(__file__)
    programs = [here, *sorted((here.parent / example).glob("*.py"))]
    source = "\0".join([*(file.read_text(encoding="utf-8") for file in programs), *variant])
    return root / f"{example.replace('_', '-')}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def tiny_model(recipe: Callable[[], Recipe], folder: Path, progress: Progress) -> Path:
    """Return the folder with the model. Makes the model if the folder does not exist."""
    if folder.exists():
        return folder
    temporary = folder.parent / f".making-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    make(recipe(), temporary, progress)
    try:
        temporary.rename(folder)
    except OSError:  # another process made it first
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def make(recipe: Recipe, folder: Path, progress: Progress) -> None:
    """Make the tokenizer and the model, and save them in Hugging Face's format."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    progress("training a tokenizer on the example's words", 0.0)
    tokenizer = make_tokenizer(recipe)
    torch.manual_seed(recipe.seed)
    end, pad = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.width,
            intermediate_size=3 * recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=recipe.context,
            tie_word_embeddings=True,
            initializer_range=0.06,  # at 0.02 a model of this width learns only the format
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    served = AutoTokenizer.from_pretrained(folder) if recipe.as_served else tokenizer
    _warm_start(recipe, model, served, pad, progress)
    if recipe.sampling:
        model.generation_config.update(do_sample=True, **recipe.sampling)
    model.save_pretrained(folder)


def make_tokenizer(recipe: Recipe) -> Any:
    """Return a PreTrainedTokenizerFast trained on the recipe's texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    options = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": recipe.context}
    if not recipe.texts:
        plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
        plain.chat_template = TEMPLATE
    texts = recipe.texts or [_text(plain, one) for one in recipe.demonstrations[:6000]]
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    if recipe.has_tools:
        made.add_tokens(list(TOOL_MARKS))  # not special: vLLM's parser looks for them in the text
    made.chat_template = TEMPLATE
    return made


def _text(tokenizer: Any, demonstration: Demonstration) -> str:
    """Return the rendered demonstration without special tokens."""
    text = "".join(text for text, _ in _pieces(tokenizer, demonstration))
    for mark in SPECIAL + TOOL_MARKS:
        text = text.replace(mark, " ")
    return text


def _pieces(tokenizer: Any, demonstration: Demonstration) -> Iterator[tuple[str, bool]]:
    """Yield the rendered demonstration in pieces, split where assistant turns begin and end. True: learn this piece."""
    messages, tools = list(demonstration.messages), list(demonstration.tools) or None
    prompt, *rest = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False).split(ASSISTANT)
    learned = [message.get("learn", True) for message in messages if message["role"] == "assistant"]
    for is_learned, text in zip(learned, rest, strict=True):
        said, end, after = text.partition("<|im_end|>")
        yield prompt + ASSISTANT, False
        yield said + end, is_learned
        prompt = after


def _encode(tokenizer: Any, demonstration: Demonstration) -> Row:
    """Return the token ids of a demonstration and its labels; the label is -100 for a token that is not learned."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in _pieces(tokenizer, demonstration):
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        labels += piece if learned else [-100] * len(piece)
    return ids, labels


def _warm_start(recipe: Recipe, model: Any, tokenizer: Any, pad: int, progress: Progress) -> None:
    """Train the model on the demonstrations."""
    endless = cycle(recipe.demonstrations)
    batches = ([_encode(tokenizer, one) for one in islice(endless, recipe.batch)] for _ in range(recipe.steps))
    for step, _ in enumerate(train(model, batches, recipe.steps, recipe.learning_rate, pad), 1):
        progress(f"warm start: {recipe.teaches}", step / recipe.steps)


def train(model: Any, batches: Iterable[list[Row]], steps: int, learning_rate: float, pad: int = 0) -> Iterator[None]:
    """Take a supervised step on each of `steps` batches, and yield after it. Threads compute the parts of a batch."""
    import torch

    cores = torch.get_num_threads()
    torch.set_num_threads(1)  # in an operation, threads would wait for one another, and for other programs
    parameters, of_part = list(model.parameters()), partial(_gradients, model, pad)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    with ThreadPoolExecutor(min(cores, 2), initializer=torch.set_num_threads, initargs=(1,)) as threads:
        for batch in batches:
            rows = sorted(batch, key=lambda row: len(row[0]), reverse=True)  # so that a part needs little padding
            learned = sum(label != -100 for _, labels in rows for label in labels)
            size = math.ceil(len(rows) / PARTS)
            parts = threads.map(of_part, [rows[start : start + size] for start in range(0, len(rows), size)])
            for parameter, *gradients in zip(parameters, *parts, strict=True):
                parameter.grad = sum(gradients) / learned
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            yield
    model.eval()
    torch.set_num_threads(cores)


def _gradients(model: Any, pad: int, rows: Sequence[Row]) -> Sequence[Any]:
    """Return the gradients of the summed cross entropy of the learned tokens, by parameter.

    Logits are computed for these tokens alone.
    """
    import torch

    width = max(len(ids) for ids, _ in rows)
    inputs, labels = torch.full((len(rows), width), pad), torch.full((len(rows), width), -100)
    for row, (ids, wanted) in enumerate(rows):
        inputs[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(wanted)] = torch.tensor(wanted)
    labels = labels[:, 1:]  # the token after each position
    hidden = model.model(input_ids=inputs).last_hidden_state[:, :-1][labels != -100]
    loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), labels[labels != -100], reduction="sum")
    return torch.autograd.grad(loss, list(model.parameters()))


def say(file: Any = None) -> Progress:
    """Return a Progress that prints a line per quarter done."""
    shown = -1

    def progress(what: str, done: float) -> None:
        nonlocal shown
        if int(done * 4) != shown:
            shown = int(done * 4)
            print(f"base model: {what} {done:4.0%}", file=file or sys.stderr, flush=True)

    return progress


if __name__ == "__main__":
    tiny_model(lambda: Recipe.load(Path(sys.argv[1])), Path(sys.argv[2]), say())
