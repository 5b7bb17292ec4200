"""The case `lora`: versions are adapters, loaded side by side while streams run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import select

from benchmarks.reload.figures import (
    above_ms,
    as_json,
    compare,
    count_failed,
    read_recorded,
    row_to_first_chat,
    slowest_first_s,
    spread,
    summarize,
)
from benchmarks.reload.model import make_model
from benchmarks.reload.service import Service
from benchmarks.reload.turn import Callers, Turn
from services.export_model import export_model
from shared.experience import Tokens
from shared.ledger.tables import experiences, payloads
from shared.versions import version_path

RIGHT = 1e-3  # of a logprob; another adapter differs a hundred times as much
SIDE_BY_SIDE = 4  # versions
AT_ONCE = 16  # rows of a forward pass


def measure_adapters(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure with its own processes, and end them."""
    with ExitStack() as stack:
        folder.mkdir()
        service = Service(folder / "service", make_model(folder / "base", tied=args.tied), args.engines, stack, "lora")
        report: dict[str, Any] = {}
        for streams in args.streams:
            report[f"{streams} streams"] = asyncio.run(run_turns(service, streams, args.adapters))
            print(json.dumps(as_json(report)), file=sys.stderr)  # the figures so far, in case the rest fails
        report["side_by_side"] = asyncio.run(run_side_by_side(service))
        report["two_explorers"] = asyncio.run(run_two_explorers(service, min(10, args.adapters)))
        return report | check_labels(service)


async def run_turns(service: Service, streams: int, loads: int) -> dict[str, Any]:
    """Loads, alternating with turns that load nothing."""
    turns: dict[str, list[Turn]] = {"none": [], "load": []}
    async with contextlib.aclosing(Callers(service.url)) as callers:
        await callers.turn(streams, None)  # not counted: it compiles kernels
        for number in range(loads):
            print(f"lora, {streams} streams: load {number + 1} of {loads}", file=sys.stderr)
            await asyncio.to_thread(service.prepare_version)
            load = await callers.turn(streams, lambda: asyncio.to_thread(service.publish))
            load.row_at = service.publisher.row_at
            turns["load"].append(load)
            turns["none"].append(await callers.turn(streams, None, len(load.late)))  # the same number of chats
    recorded = read_recorded(service, turns)
    report: dict[str, Any] = {name: summarize(of, recorded) for name, of in turns.items()}
    pairs = list(zip(turns["load"], turns["none"], strict=True))
    gaps, firsts = above_ms(_gap_under_way_s, pairs), above_ms(slowest_first_s, pairs)
    alone = [(after, before) for before, after in pairwise(turns["none"])]
    noise = above_ms(_gap_under_way_s, alone)
    for name, of in turns.items():
        report[name]["gap_under_way_ms"] = spread([1000 * _gap_under_way_s(turn) for turn in of])
    return report | {
        "gap_above_ms": compare(gaps),
        "first_token_above_ms": compare(firsts),
        "gap_above_between_turns_without_ms": compare(noise),
        "first_load": {"gap_above_ms": gaps[0], "first_token_above_ms": firsts[0]},
        "row_to_first_chat_ms": spread([1000 * row_to_first_chat(turn) for turn in turns["load"]]),
    }


async def run_side_by_side(service: Service) -> dict[str, Any]:
    """Four versions with 8 streams each, and one version with 32."""
    versions = []
    async with contextlib.aclosing(Callers(service.url)) as callers:
        for _ in range(SIDE_BY_SIDE):
            await asyncio.to_thread(service.prepare_version)
            versions.append(await asyncio.to_thread(service.publish))
        answered = [await callers.ask(f"agent@{version}") for version in versions]  # this loads them
        assert answered == versions
        several = await callers.side_by_side([f"agent@{version}" for version in versions for _ in range(8)])
        alone = await callers.side_by_side(["agent"] * 32)
    return {
        name: {
            "failed": sum(stream.failed is not None for stream in streams),
            "first_token_ms": spread([1000 * (stream.event_times[0] - stream.begun_at) for stream in streams]),
            "seconds": max(stream.event_times[-1] for stream in streams) - min(stream.begun_at for stream in streams),
        }
        for name, streams in (("four_versions", several), ("one_version", alone))
    }


async def run_two_explorers(service: Service, loads: int) -> dict[str, int]:
    """Run streams at two explorers of one engine while versions arrive; `check_labels` checks their rows."""
    turns: list[Turn] = []
    async with (
        contextlib.aclosing(Callers(service.url)) as one,
        contextlib.aclosing(Callers(service.start_explorer())) as other,
    ):
        for _ in range(loads):
            await asyncio.to_thread(service.prepare_version)
            publish = one.turn(8, lambda: asyncio.to_thread(service.publish))
            turns += await asyncio.gather(publish, other.turn(8, None))
    return {"replies": sum(len(turn.streams) for turn in turns), "failed": count_failed(turns)}


def check_labels(service: Service) -> dict[str, Any]:
    """Compare the rows' logprobs with those that PEFT computes, in float32, for the version that the row names.

    Also returns the largest difference between engine and PEFT, and between PEFT and the last version merged.
    """
    from trainer_service.adapters import open_adapter
    from trainer_service.models import load_causal_lm

    root, by_version = service.config.root, read_rows(service)
    wrong, largest = 0, {"adapter": 0.0, "base": 0.0}
    base = root / version_path(0)
    for version, rows in by_version.items():
        model = open_adapter(base, root / version_path(version)) if version else load_causal_lm(base)
        gaps = [_gap(own, row.logprobs) for own, row in zip(_logprobs(model, rows), rows, strict=True)]
        wrong += sum(gap >= RIGHT for gap in gaps)
        kind = "adapter" if version else "base"
        largest[kind] = max(largest[kind], *gaps)
    export_model(service.config, version, root.parent / "merged", merged=True)
    merged = _logprobs(load_causal_lm(root.parent / "merged"), rows)
    largest["merged"] = max(_gap(a, b) for a, b in zip(merged, _logprobs(model, rows), strict=True))
    counted = {"rows": sum(map(len, by_version.values())), "versions": len(by_version)}
    return {**counted, "wrong_labels": wrong, "largest_gap_to_peft": largest}


def read_rows(service: Service) -> dict[int, list[Tokens]]:
    """The tokens of all rows, by their version."""
    with service.ledger.read() as connection:
        query = select(experiences.c.version, payloads.c.tokens).join(payloads).order_by(experiences.c.version)
        rows = connection.execute(query).all()
    by_version: dict[int, list[Tokens]] = {}
    for row in rows:
        by_version.setdefault(row.version, []).append(Tokens.decode(row.tokens))
    return by_version


def _logprobs(model: Any, rows: list[Tokens]) -> list[npt.NDArray[np.float32]]:
    """The logprobs of the rows' replies."""
    import torch

    found = []
    for first in range(0, len(rows), AT_ONCE):
        block = rows[first : first + AT_ONCE]
        texts = [torch.from_numpy(np.concatenate([row.prompt_ids, row.reply_ids]).astype(np.int64)) for row in block]
        ids_BT = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # padding after a row does not change it
        with torch.no_grad():
            logprobs_BTV = torch.log_softmax(model(input_ids=ids_BT, use_cache=False).logits.float(), -1)
        logprobs_BT = logprobs_BTV[:, :-1].gather(2, ids_BT[:, 1:, None])[..., 0].numpy()
        starts = [len(row.prompt_ids) - 1 for row in block]
        found += [
            logprobs_BT[n, start : start + len(row.reply_ids)]
            for n, (row, start) in enumerate(zip(block, starts, strict=True))
        ]
    return found


def _gap(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    return float(np.abs(one - other).max())


def _gap_under_way_s(turn: Turn) -> float:
    """Counted once all streams have begun: before that, each waits for the others' prompts."""
    return max(stream.longest_gap_since(turn.under_way_at) for stream in turn.streams)
