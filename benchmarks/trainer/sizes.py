"""The cost of an update on an accelerator, by the model's size: memory and time of the trainer's own code.

A separate process for each size and way. Models have Qwen2.5's shapes and random weights in bfloat16; the rows are
those of `mix`, two optimizer steps an update, gradient checkpointing on. Bytes are those of PyTorch's tensors: after
the models and their optimizers are built, and the peak within an update.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.trainer.cases import HALF_BILLION, distinct_tokens, rows
from shared.process import die_with_parent

SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {},
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "3B": {
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "reinforce_pp": {"trainer": {"algorithm": "reinforce_pp", "reinforce_pp": {"kl_coef": 0.0}}},
    "ppo": {"trainer": {"algorithm": "ppo"}},  # with a critic and a reference
    "lora": {"trainer": {"algorithm": "ppo"}, "model": {"kind": "lora", "lora": {"rank": 16}}},
}
ALL = [f"{size}/{way}" for size in SIZES for way in WAYS]
DEFAULT = [name for name in ALL if name not in ("7B/reinforce_pp", "7B/ppo")]  # what fits 140 GB
UPDATES = 3  # the first is not counted


def measure(repository: Path, asked: list[str]) -> dict[str, Any]:
    """asked: SIZE/WAY."""
    found = {}
    for one in asked:
        command = [sys.executable, "-m", "benchmarks.trainer.sizes", *one.split("/")]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=repository,
            preexec_fn=die_with_parent(),
        )
        found[one] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-2000:]
        print(one, found[one], file=sys.stderr, flush=True)
    return found


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from benchmarks.trainer.clock import seconds
    from benchmarks.trainer.updates import begin, experiences, learner_of
    from shared.config import Config
    from trainer_service.ranks import join_ranks

    size, way = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder, root = Path(name) / "model", Path(name) / "root"
        torch.manual_seed(0)
        with torch.device("cuda"):
            shape = Qwen2Config(**(HALF_BILLION | SIZES[size]), dtype="bfloat16")
            model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        parameters = sum(tensor.numel() for tensor in model.parameters())
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        settings = {"gradient_checkpointing": True, "epochs": 1, "minibatches": 2, **WAYS[way]["trainer"]}
        about = {"path": str(folder), **WAYS[way].get("model", {})}
        config = Config.model_validate({"root_dir": str(root), "model": about, "trainer": settings})
        begin(config)
        learner, found, taken = learner_of(config, join_ranks(600)), rows("mix"), []
        for step in range(UPDATES):
            began = seconds("cuda")
            learner.train(experiences(found), step=step, version=step)
            taken.append(seconds("cuda") - began)
            if step == 0:
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
        figures = {"parameters": parameters, "held_gb": held / 1e9, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}
        figures |= {"seconds": min(taken[1:]), "tokens_a_second": distinct_tokens(found) / min(taken[1:])}
        print(json.dumps(figures | learner.costs), flush=True)


if __name__ == "__main__":
    main()
