"""The benchmark's world: tickets of a few departments, a base model that follows hints, and replies sampled by it.

The base is the demo's, trained further: after a block of words with a desk and a priority it answers with these, and
without one it answers as before. Replies are sampled as engines sample for the demo's agent, at temperature 1 without
top-p and top-k, at most 12 tokens, by Transformers' own code on a copy of the policy's weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.support_desk import agent, desk
from examples.tiny_model import folder_of
from shared.config import HintConfig
from shared.experience import Experience, Sampling, Tokens
from shared.reward import Signal
from trainer_service.hints import HintWriter

TEACHER = folder_of("support_desk", "teacher")  # a model with right answers and the base's tokenizer
DEPARTMENTS = ("billing", "shipping", "account")
MAX_TOKENS = 12
WORDING = "right : {text}"  # how the teacher reads a comment or a correction
HINT = {"comment": WORDING, "correction": WORDING, "next_message": None}
STEPS, BATCH, RATE = 1200, 64, 1e-3


@dataclass(frozen=True, slots=True)
class Reply:
    """A ticket and the policy's reply."""

    ticket: desk.Ticket
    text: str
    tokens: Tokens


class World:
    """Draws tickets and samples replies. Owns a copy of the policy with Transformers' own attention."""

    def __init__(self, base: Path, departments: Sequence[str] = DEPARTMENTS) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.departments = departments
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._pad = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self._end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def ticket(self, draw: random.Random) -> desk.Ticket:
        """A ticket of one of the departments."""
        while True:
            ticket = desk.write_ticket(draw)
            if desk.DESKS[ticket.desk] in self.departments:
                return ticket

    def prompt(self, ticket: desk.Ticket) -> list[int]:
        chat = agent.messages(ticket.text)
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.no_grad()
    def sample(self, policy: Any, draw: random.Random, count: int, runs: int = 1, turns: int = 1) -> list[Reply]:
        """Replies of the current policy, with the logprobs of their tokens."""
        self._model.load_state_dict(policy.state_dict())
        torch.manual_seed(draw.getrandbits(62))
        tickets = in_tasks(lambda: self.ticket(draw), count, runs, turns)
        prompts = [self.prompt(ticket) for ticket in tickets]
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        said = self._model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, pad_token_id=self._pad,
            eos_token_id=self._end, output_logits=True, return_dict_in_generate=True, **settings,
        )  # fmt: skip
        replies = said.sequences[:, width:]
        logprobs = torch.stack(said.logits, 1).log_softmax(-1).gather(-1, replies.unsqueeze(-1)).squeeze(-1)
        return [self._reply(*one) for one in zip(tickets, prompts, replies, logprobs, strict=True)]

    def _reply(self, ticket: desk.Ticket, prompt: list[int], reply: Any, logprobs: Any) -> Reply:
        ids = reply.tolist()
        length = ids.index(self._end) + 1 if self._end in ids else len(ids)
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
        arrays = (np.array(prompt, np.int32), np.array(ids[:length], np.int32), logprobs[:length].numpy())
        return Reply(ticket, text, Tokens(*arrays))


def in_tasks(ticket: Callable[[], desk.Ticket], count: int, runs: int, turns: int) -> list[desk.Ticket]:
    """A ticket for each reply: a task has `turns` tickets, and each of its runs answers the same ones."""
    tasks = ([ticket() for _ in range(turns)] for _ in range(-(-count // (runs * turns))))
    return [one for task in tasks for _ in range(runs) for one in task][:count]


def worth(reply: Reply) -> float:
    """How good an answer is, independent of its customer's feedback."""
    return desk.satisfaction(reply.ticket, *desk.parse_answer(reply.text))


def make_base(source: Path, folder: Path) -> Path:
    """Make a model that follows hints from the demo's base model."""
    if folder.exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    writer = HintWriter(tokenizer, HintConfig.model_validate(HINT), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    draw, pad = random.Random(7), tokenizer.convert_tokens_to_ids("<|endoftext|>")
    torch.manual_seed(7)
    for _ in range(STEPS):
        examples = [_example(tokenizer, writer, draw, hinted=place % 2 == 0) for place in range(BATCH)]
        width = max(len(ids) for ids, _ in examples)
        ids, labels = torch.full((BATCH, width), pad), torch.full((BATCH, width), -100)
        for place, (one, start) in enumerate(examples):
            ids[place, : len(one)] = torch.tensor(one)
            labels[place, start : len(one)] = torch.tensor(one[start:])
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    folder.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _example(tokenizer: Any, writer: HintWriter, draw: random.Random, *, hinted: bool) -> tuple[list[int], int]:
    """Token ids of a ticket with an answer, and where the answer begins. hinted: words name it, right or not."""
    ticket = desk.write_ticket(draw)
    desks = tuple(desk.DESKS) if hinted else tuple(desk.DEPARTMENTS[desk.DESKS[ticket.desk]])
    answer = desk.format_answer(draw.choice(desks), draw.choice(tuple(desk.PRIORITIES)))
    text = tokenizer.apply_chat_template(agent.messages(ticket.text), add_generation_prompt=True, tokenize=False)
    prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if hinted:
        blank = Tokens(np.array([1], np.int32), np.array([1], np.int32), np.zeros(1, np.float32))
        said = (Signal("comment", text=answer),)
        row = Experience(1, "m", 0, None, None, None, "m", 0, None, 0.0, blank, Sampling(), signals=said)
        (written,) = writer.write([row])
        assert written.hint is not None
        prompt = [*written.hint.tolist(), *prompt]
    return prompt + tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"], len(prompt)
