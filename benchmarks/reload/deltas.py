"""The size of deltas, and the cost of rebuilding compared with copying: bfloat16, AdamW, no engine.

The gradient is that of a policy: of the log-probabilities of sampled tokens, weighted by advantages with mean zero.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reload.model import new_model
from shared.delta import rebuild, write_delta

RATES = (1e-6, 1e-5)
BATCH, LENGTH = 8, 64


def measure_deltas(folder: Path, steps: int, rounds: int = 5) -> dict[str, Any]:
    """By learning rate: the median share of the bytes over the steps, and the times of the last step's delta."""
    return {f"{rate:g}": _measure(folder / f"{rate:g}", rate, steps, rounds) for rate in RATES}


def _measure(folder: Path, rate: float, steps: int, rounds: int) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    model = new_model(dtype="bfloat16").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    files = [folder / "0.safetensors", folder / "1.safetensors"]
    shares = []
    for step in range(steps + 1):
        older, newer = files[step % 2], files[1 - step % 2]
        save_file({name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}, newer)
        if step:
            assert write_delta(older, newer, folder / "delta", newer.stat().st_size)
            shares.append((folder / "delta").stat().st_size / newer.stat().st_size)
        if step < steps:
            optimizer.zero_grad()
            _loss(model).backward()
            optimizer.step()
    rebuilding, copying = [], []
    for _ in range(rounds):
        rebuilding.append(_seconds(lambda: rebuild(older, [folder / "delta"], folder / "rebuilt")))
        copying.append(_seconds(lambda: _copy(newer, folder / "copied")))
    assert (folder / "rebuilt").read_bytes() == newer.read_bytes()
    return {
        "share_of_bytes": statistics.median(shares),
        "first_step": shares[0],
        "last_step": shares[-1],
        "whole_mb": newer.stat().st_size / 1e6,
        "rebuild_ms": 1000 * statistics.median(rebuilding),
        "copy_ms": 1000 * statistics.median(copying),
    }


def _loss(model: Any) -> Any:
    """A policy gradient's loss: random prompts, next tokens sampled by the model, an advantage for each sequence."""
    import torch

    ids_BT = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH))
    logprobs_BTV = torch.log_softmax(model(input_ids=ids_BT).logits, -1)
    sampled_BT1 = torch.distributions.Categorical(logits=logprobs_BTV.detach()).sample()[..., None]
    advantages_B1 = torch.randn(BATCH, 1)
    return -(logprobs_BTV.gather(-1, sampled_BT1)[..., 0] * advantages_B1).mean()


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _copy(source: Path, target: Path) -> str:
    """Copy like an engine's machine copies a whole version: every byte is checked."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while data := reader.read(1024 * 1024):
            digest.update(data)
            writer.write(data)
    return digest.hexdigest()
