"""Determines at start which row layouts a model computes correctly: random sequences, packed and alone.

A model can differ in three ways. Its layers may carry a state along the row across boundaries: gated delta nets and
short convolutions without their CUDA kernels do. Its attention or its output layer may be unsupported by ours; the
model then keeps its own, and the log reports that once. Shapes: K sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.errors import StartupError
from shared.log import StageLogger
from trainer_service import attention, head
from trainer_service.models import score_actions
from trainer_service.packing import MicroBatch, Rows, pack
from trainer_service.ranks import is_lost
from trainer_service.trajectories import Ints, TokenSequence, sequence_alone

log = StageLogger("trainer")

FOREIGN = (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError)  # raised by models that do not fit


@dataclass(frozen=True, slots=True)
class _Bounds:
    """In nats. Rounding in narrow types hides small leaks in a comparison, so leaks are measured separately."""

    mean: float  # mean distance to each sequence alone
    leak: float  # change of a token's logprob when another sequence of its row changes


@torch.no_grad()
def check_rows(model: Any, *others: Any) -> Rows:
    """Return the densest rows that a causal LM computes correctly. `models.prepare` must have run on it.

    others: models and trunks of the same architecture, which get the same fallbacks.
    Raises StartupError if even single sequences differ from the model's own forward pass.
    """
    training = model.training
    model.eval()
    try:
        return _check(model, others)
    finally:
        model.train(training)


def _check(model: Any, others: tuple[Any, ...]) -> Rows:
    narrow = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    bounds = _Bounds(mean=0.1, leak=1e-2) if narrow else _Bounds(mean=1e-4, leak=1e-5)
    sequences = _sequences(int(model.config.get_text_config().vocab_size))
    chosen = model.config._attn_implementation
    _set_attention(model, "eager")
    expected = [_own_logprobs(model, sequence) for sequence in sequences]
    _set_attention(model, chosen)
    retreats: list[tuple[str, Callable[[], None]]] = [
        ("output layer", lambda: _for_all(head.remove, (model, *others))),
        ("attention", lambda: _for_all(lambda one: _set_attention(one, "eager"), (model, *others))),
    ]
    while (trouble := _defect(model, sequences, expected, Rows.SINGLE, bounds)) is not None:
        if not retreats:
            raise StartupError(f"{_name(model)} gives other logprobs than its own forward pass ({trouble})")
        what, retreat = retreats.pop(0)
        log.warning("the model keeps its own", part=what, model=_name(model), reason=trouble)
        retreat()
    for rows in (Rows.FOLDED, Rows.PACKED):
        trouble = _defect(model, sequences, expected, rows, bounds)
        if trouble is None:
            return rows
    log.warning("sequences are computed one by one", model=_name(model), reason=trouble)
    return Rows.SINGLE


def _for_all(act: Callable[[Any], Any], models: tuple[Any, ...]) -> None:
    for model in models:
        act(model)


def _set_attention(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)


def _name(model: Any) -> str:
    return str(model.config.model_type)


def _sequences(vocabulary: int) -> list[TokenSequence]:
    """Two trees with nested branches, and one sequence that shares nothing; all tokens but two are sampled."""
    draw = np.random.default_rng(0)

    def some(count: int) -> Ints:
        return draw.integers(0, vocabulary, count)

    system, other, turn = some(24), some(9), some(11)
    texts = [
        [system, turn, some(7)],
        [system, turn, some(3)],
        [system, some(17)],
        [other, some(12)],
        [other, some(5)],
        [some(21)],
    ]
    return [sequence_alone(np.concatenate(pieces), 2) for pieces in texts]


def _own_logprobs(model: Any, sequence: TokenSequence) -> Tensor:
    """Return logprobs by the model's own forward pass."""
    device = next(model.parameters()).device
    token_ids = torch.from_numpy(sequence.token_ids).to(device)
    logits: Tensor = model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0].float()
    actions = torch.from_numpy(sequence.actions).to(device)
    return logits.log_softmax(-1)[actions - 1, token_ids[actions]]


def _defect(
    model: Any, sequences: list[TokenSequence], expected: list[Tensor], rows: Rows, bounds: _Bounds
) -> str | None:
    """Return what is wrong with these rows; None: nothing."""
    if rows is Rows.FOLDED and model.config._attn_implementation != attention.NAME:
        return "its attention is not ours"
    device = expected[0].device
    units = [(0, len(sequences) - 1)]  # two members: a model of single rows gets two rows at once
    micros = [micro.to(device) for micro in pack(sequences, range(len(sequences)), 1024, rows, units)]
    try:
        distances = []
        for micro in micros:
            wanted_K = torch.cat([expected[index] for index in micro.members])
            distances.append((score_actions(model, micro)["logprobs"] - wanted_K).abs())
        leak = max((_leak(model, micro) for micro in micros), default=0.0)
    except FOREIGN as error:
        if is_lost(error):  # the model is not the cause
            raise
        return str(error).split("\n")[0]
    mean = float(torch.cat(distances).mean())
    if leak > bounds.leak:
        return f"a token moves by {leak:.2g} nats when another sequence of its row changes"
    return None if mean <= bounds.mean else f"{mean:.2g} nats off each alone, on average"


def _leak(model: Any, micro: MicroBatch) -> float:
    """Return the change of the other sequences' logprobs when the tokens of the row's first tree change."""
    nodes = micro.layout.nodes
    roots: list[int] = []
    for number, node in enumerate(nodes):
        roots.append(number if node.parent < 0 else roots[node.parent])
    first = torch.tensor([root == 0 for root in roots])
    lengths = torch.tensor(micro.layout.lengths)
    mine_T = first.repeat_interleave(lengths).to(micro.keep_K.device)
    others_K = ~mine_T[micro.keep_K]
    if not others_K.any():
        return 0.0
    changed = replace(micro, input_ids_1T=torch.where(mine_T, micro.input_ids_1T.flip(1), micro.input_ids_1T))
    before, after = (score_actions(model, one)["logprobs"][others_K] for one in (micro, changed))
    return float((before - after).abs().max())
