"""One contestant's process. For each line on stdin, a case's name, it makes one optimizer step and prints figures."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.trainer.cases import Row, rows
from benchmarks.trainer.clock import STEPS, seconds
from shared.experience import Experience, Sampling, Tokens
from trainer_service.algorithms.seam import Batch
from trainer_service.models import prepare, score_actions
from trainer_service.packing import MicroBatch, Rows, pack
from trainer_service.trajectories import trajectories_of

Step = Callable[[Any, list[Row]], Iterator[Tensor]]


def experiences(found: list[Row]) -> list[Experience]:
    """The rows as a trainer reads them from its ledger."""
    read = []
    for number, row in enumerate(found):
        logprobs = np.full(len(row.reply), -10, np.float32)
        tokens = Tokens(np.array(row.prompt, np.int32), np.array(row.reply, np.int32), logprobs)
        name = str(number)
        read.append(Experience(number, name, 0, None, "task", row.run, name, 0, 1.0, 0.0, tokens, Sampling()))
    return read


def packing_figures(micros: Sequence[MicroBatch], max_tokens: int) -> dict[str, float]:
    """Tokens of the trajectories, tokens computed for them, and the filled share of the rows."""
    computed = [micro.input_ids_1T.shape[1] for micro in micros]
    return {
        "tokens_in": float(sum(micro.tokens_in for micro in micros)),
        "tokens_computed": float(sum(computed)),
        "packing_efficiency": sum(computed) / max(1, sum(max(tokens, max_tokens) for tokens in computed)),
    }


def ours(budget: int, kind: Rows) -> Step:
    def losses(model: Any, found: list[Row]) -> Iterator[Tensor]:
        trajectories = Batch.of(trajectories_of(experiences(found))).sequences
        micros = pack(trajectories, range(len(trajectories)), budget, kind)
        figures.update(packing_figures(micros, budget))
        for micro in micros:
            yield -score_actions(model, micro.to(model.device))["logprobs"].sum()

    return losses


def plain(model: Any, found: list[Row], *, lean: bool = False) -> Iterator[Tensor]:
    """The usual padded loop: sorted by length, 8 sequences at a time. lean: logits of replies alone."""
    ordered = sorted(found, key=lambda row: -row.tokens)
    figures.update(tokens_computed=0.0)
    for start in range(0, len(ordered), 8):
        part = ordered[start : start + 8]
        length = part[0].tokens
        ids, labels = torch.zeros(8, length, dtype=torch.long), torch.full((8, length), -100)
        mask = torch.zeros(8, length, dtype=torch.long)
        for number, row in enumerate(part):
            ids[number, : row.tokens], mask[number, : row.tokens] = torch.tensor(row.prompt + row.reply), 1
            labels[number, len(row.prompt) : row.tokens] = torch.tensor(row.reply)
        figures["tokens_computed"] += ids.numel()
        ids, labels, mask = (tensor.to(model.device) for tensor in (ids, labels, mask))
        if not lean:
            yield model(input_ids=ids, attention_mask=mask, use_cache=False, labels=labels, num_items_in_batch=1).loss
            continue
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        sampled = labels[:, 1:] >= 0
        yield F.cross_entropy(model.lm_head(hidden[:, :-1][sampled]), labels[:, 1:][sampled], reduction="sum")


CONTESTANTS: dict[str, Step] = {
    "flywheel": ours(8192, Rows.FOLDED),
    "flywheel_2048": ours(2048, Rows.FOLDED),
    "flywheel_512": ours(512, Rows.FOLDED),
    "flywheel_unfolded": ours(8192, Rows.PACKED),
    "plain": plain,
    "plain_lean": partial(plain, lean=True),
}
figures: dict[str, float] = {}


def main() -> None:
    name, folder, device = sys.argv[1:]
    torch.set_num_threads(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    if name.startswith("flywheel"):
        prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device != "cpu")
    for line in sys.stdin:
        found = rows(line.strip())
        times = [step(model, optimizer, found, CONTESTANTS[name]) for _ in range(STEPS[device])]
        print(json.dumps({"seconds": statistics.mean(times[1:] or times), **figures}), flush=True)


def step(model: Any, optimizer: torch.optim.Optimizer, found: list[Row], losses: Step) -> float:
    """Make one optimizer step. Returns its seconds."""
    figures.clear()
    began = seconds(model.device.type)
    for loss in losses(model, found):
        (loss / sum(len(row.reply) for row in found)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return seconds(model.device.type) - began


if __name__ == "__main__":
    main()
