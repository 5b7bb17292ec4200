"""Peak memory of any function that scores sampled tokens. Imports only PyTorch, for the peers' Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

TOKENS, VOCABULARY, HIDDEN = 2048, 151_936, 256
CHUNK_BYTES = 32 * 2**20  # of logits that are computed at once: ours, and the peer's if both are to be equal
UNIT = 4 * TOKENS * VOCABULARY  # bytes of one float32 array of all logits


def measure(spread: float, score: Callable[[nn.Linear, Tensor, Tensor], Tensor], *, update: bool) -> float:
    """Peak resident memory above that with weights, their gradient and hidden states in place.

    score: logprobs of actions [K], given the output layer and hidden states. spread: of the logits. update: with the
    gradient.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    nn.init.normal_(layer.weight, std=spread / HIDDEN**0.5)
    layer.weight.grad = torch.zeros_like(layer.weight)
    hidden_KD = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    actions_K = torch.randint(0, VOCABULARY, (TOKENS,))
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which contains what was freed
    before = _status("VmRSS")
    with torch.set_grad_enabled(update):
        logprobs_K = score(layer, hidden_KD, actions_K)
    if update:
        logprobs_K.sum().backward()
    return (_status("VmHWM") - before) / UNIT


def _status(name: str) -> int:
    """Bytes of this process by the kernel: ru_maxrss would contain the peak of the process that started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])
