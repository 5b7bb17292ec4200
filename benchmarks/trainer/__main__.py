"""`python -m benchmarks.trainer`: see __init__.py."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import benchmarks.trainer
from benchmarks.trainer import fill, memory, ranks, sizes
from benchmarks.trainer.cases import CASES, Row, distinct_tokens, rows, shape_of
from benchmarks.trainer.clock import seconds

UPDATES = ("dpo", "kto", "reinforce_pp", "hint")
STEPS = ("plain", "plain_lean", "trl_sft", "trl_sft_packed", "trl_grpo")
CONTESTANTS = {  # the others' times are relative to those of the first
    "mix": ("flywheel", "flywheel_2048", "flywheel_512", *STEPS),
    "turns": ("flywheel", *STEPS),
    "system": ("flywheel", "flywheel_unfolded", *STEPS),
    "pairs": ("dpo", "trl_dpo"),
    "rated": ("kto", "trl_kto"),
    "said": ("reinforce_pp", "hint"),
}
OTHERS = ("fill", "memory", "ranks")
ON_ACCELERATOR = ("sizes",)  # only on request
REPOSITORY = Path(__file__).parents[2]


def main() -> None:
    args = _arguments()
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY))
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="flywheel-trainer-") as name:
        make_model(Path(name), args.device)
        for case in args.cases:
            if case.partition("/")[0] in CASES:
                report[case] = run_case(case, Path(name), args)
        if "fill" in args.cases:
            report["fill"] = fill.figures()
        if "sizes" in args.cases:
            report["sizes"] = sizes.measure(REPOSITORY, args.sizes)
        if "memory" in args.cases:
            report["memory"] = memory.peaks(REPOSITORY, args.peers)
        if "ranks" in args.cases:
            report["ranks"] = ranks.measure(REPOSITORY, Path(name))
    print(json.dumps(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmarks.trainer.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", metavar="PYTHON", type=lambda text: str(Path(text).absolute()))
    parser.add_argument("--cases", nargs="*", metavar="CASE", default=[*CASES, *OTHERS])
    known_contestants = list(dict.fromkeys(name for names in CONTESTANTS.values() for name in names))
    parser.add_argument("--only", nargs="+", metavar="CONTESTANT", choices=known_contestants)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE/WAY", default=sizes.DEFAULT, choices=sizes.ALL)
    args = parser.parse_args()
    known = [*CASES, *OTHERS, *ON_ACCELERATOR]
    unknown = {case.partition("/")[0] for case in args.cases} - set(known)
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(known)}")
    return args


def make_model(folder: Path, device: str) -> None:
    """Write the model, and a tokenizer for trainers that need one."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    torch.manual_seed(0)
    shape, dtype = shape_of(device), torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=dtype).save_pretrained(folder)
    words = {f"w{number}": number for number in range(shape["vocab_size"])}
    spoken = Tokenizer(models.WordLevel(words, unk_token="w0"))
    spoken.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=spoken, pad_token="w0", eos_token="w0").save_pretrained(folder)


def run_case(case: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants on one case, alternating. A first turn is not counted; the slow peers skip it."""
    found, contestants = rows(case), CONTESTANTS[case.partition("/")[0]]
    names = [name for name in contestants if (args.peers or not _is_peer(name)) and name in (args.only or [name])]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    rates: list[float] = []
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(name, folder, args)) for name in names}
        for number in range(args.turns + 1):
            for name in names:
                if number or not _is_peer(name):
                    turns[name].append(_ask(workers[name], case))
            rates.append(product_rate(args.device))
        for worker in workers.values():
            worker.stdin.close()  # type: ignore[union-attr]
    rate = statistics.median(rates)
    tokens = sum(row.tokens for row in found)
    report: dict[str, Any] = {
        "tokens": tokens,
        "sampled_tokens": sum(row.sampled for row in found),
        "distinct_tokens": distinct_tokens(found),
        "product_rate_gflop_s": rate / 1e9,
    }
    for name, figures in turns.items():
        counted = figures[-args.turns :]
        taken = statistics.median(one["seconds"] for one in counted)
        report[name] = {**counted[-1], "seconds": taken, "tokens_a_second": tokens / taken}
        if names[0] == "flywheel":
            report[name]["of_limit"] = needed_flop(found, args.device) / taken / rate
        if name != names[0]:
            pairs = zip(turns[names[0]][-args.turns :], counted, strict=True)
            report[name][f"times_{names[0]}"] = statistics.median(one["seconds"] / us["seconds"] for us, one in pairs)
    return report


def _is_peer(name: str) -> bool:
    return name.startswith("trl_")


def _worker(name: str, folder: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    module = "benchmarks.peers.trl_trainer" if _is_peer(name) else "benchmarks.trainer.worker"
    module = "benchmarks.trainer.updates" if name in UPDATES else module
    command = [args.peers if _is_peer(name) else sys.executable, "-m", module, name, str(folder), args.device]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def _ask(worker: subprocess.Popen[str], case: str) -> dict[str, float]:
    assert worker.stdin and worker.stdout
    worker.stdin.write(f"{case}\n")
    worker.stdin.flush()
    while line := worker.stdout.readline():
        if line.startswith('{"seconds"'):
            found: dict[str, float] = json.loads(line)
            return found
    raise SystemExit(f"a contestant ended with {worker.wait()}: {worker.args}")


def layer_products(shape: dict[str, Any]) -> list[tuple[int, int]]:
    """Inner and outer size of each matrix of one layer."""
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    narrow = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    return [(hidden, hidden)] * 2 + [(hidden, narrow)] * 2 + [(hidden, wide)] * 2 + [(wide, hidden)]


def needed_flop(found: list[Row], device: str) -> float:
    """The minimum of a step, without attention and the optimizer."""
    shape = shape_of(device)
    layers = shape["num_hidden_layers"] * sum(a * b for a, b in layer_products(shape))
    head = shape["hidden_size"] * shape["vocab_size"]
    return 6.0 * (layers * distinct_tokens(found) + head * sum(row.sampled for row in found))


def product_rate(device: str) -> float:
    """Floating-point operations per second of matrix products of the model's shapes, 2,048 tokens at a time."""
    import torch

    torch.set_num_threads(1)
    shape, repeats = shape_of(device), 1 if device == "cpu" else 50
    like: dict[str, Any] = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    done, taken = 0.0, 0.0
    for inner, outer in [*layer_products(shape), (shape["hidden_size"], shape["vocab_size"])]:
        tokens, matrix = torch.randn(2048, inner, **like), torch.randn(inner, outer, **like)
        into = torch.empty(2048, outer, **like)
        torch.mm(tokens, matrix, out=into)
        began = seconds(device)
        for _ in range(repeats):
            torch.mm(tokens, matrix, out=into)
        taken += seconds(device) - began
        done += repeats * 2.0 * 2048 * inner * outer
    return done / taken


if __name__ == "__main__":
    main()
