"""TRL's trainers as contestants of `benchmarks.trainer`, run by the peers' Python; the protocol is worker.py's."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from benchmarks.trainer.cases import Row, is_up, rows
from benchmarks.trainer.clock import STEPS, seconds

MICRO_BATCH = 8
DEVICE = sys.argv[3] if len(sys.argv) > 3 else "cpu"
STEPS_A_TURN = STEPS[DEVICE]


def settings(found: list[Row], folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": len(found) // MICRO_BATCH,
        "max_steps": STEPS_A_TURN,
        "learning_rate": 1e-6,
        "gradient_checkpointing": False,
        "use_cpu": DEVICE == "cpu",
        "bf16": DEVICE != "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def _columns(found: list[Row]) -> Dataset:
    return Dataset.from_list(
        [
            {"input_ids": row.prompt + row.reply, "completion_mask": [0] * len(row.prompt) + [1] * len(row.reply)}
            for row in found
        ]
    )


def sft(model: Any, tokenizer: Any, found: list[Row], folder: str) -> SFTTrainer:
    config = SFTConfig(
        **settings(found, folder), max_length=None, completion_only_loss=True, train_sampling_strategy="group_by_length"
    )
    return SFTTrainer(model, config, train_dataset=_columns(found), processing_class=tokenizer)


def sft_packed(model: Any, tokenizer: Any, found: list[Row], folder: str) -> SFTTrainer:
    """Without padding: rows of the longest sequence's length, one in each micro-batch, on an accelerator eight."""
    longest = max(row.tokens for row in found)
    batches = {
        "per_device_train_batch_size": 1 if DEVICE == "cpu" else MICRO_BATCH,
        "gradient_accumulation_steps": len(found),  # at least the number of rows: an epoch is one step
    }
    config = SFTConfig(
        **(settings(found, folder) | batches), max_length=longest, completion_only_loss=True, packing=True
    )
    return SFTTrainer(model, config, train_dataset=_columns(found), processing_class=tokenizer)


def _text(ids: list[int]) -> str:
    return "".join(f" w{number}" for number in ids)


def _written(reply: list[int]) -> str:
    """A reply as text: it ends with the end-of-turn token, which the trainer would otherwise add."""
    return _text([*reply[:-1], 0])


def dpo(model: Any, tokenizer: Any, found: list[Row], folder: str) -> DPOTrainer:
    """Two sequences for each pair: half as many pairs in a micro-batch. Sorted, so there is little padding."""
    ordered = sorted(found, key=lambda row: -row.tokens)
    pairs = [
        {"prompt": _text(row.prompt), "chosen": _written(row.reply), "rejected": _written(row.other or [])}
        for row in ordered
    ]
    halved = {
        "per_device_train_batch_size": MICRO_BATCH // 2,
        "gradient_accumulation_steps": 2 * len(found) // MICRO_BATCH,
    }
    config = DPOConfig(**(settings(found, folder) | halved), max_length=None, train_sampling_strategy="sequential")
    return DPOTrainer(model, args=config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)


def kto(model: Any, tokenizer: Any, found: list[Row], folder: str) -> KTOTrainer:
    """Sorted within the given order, as far as KTO's pairs of prompts with other prompts' replies allow."""
    ordered = sorted(enumerate(found), key=lambda one: -one[1].tokens)
    rated = [
        {"prompt": _text(row.prompt), "completion": _written(row.reply), "label": is_up(number)}
        for number, row in ordered
    ]
    config = KTOConfig(**settings(found, folder), max_length=None)
    return KTOTrainer(model, args=config, train_dataset=Dataset.from_list(rated), processing_class=tokenizer)


def grpo(model: Any, tokenizer: Any, found: list[Row], folder: str) -> GRPOTrainer:
    def rollout(prompts: list[Any], _: Any) -> dict[str, Any]:
        assert len(prompts) == len(found)
        return {
            "prompt_ids": [row.prompt for row in found],
            "completion_ids": [row.reply for row in found],
            "logprobs": [[-10.0] * len(row.reply) for row in found],
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(number % 2) for number in range(len(completions))]

    config = GRPOConfig(
        **settings(found, folder),
        num_generations=2,
        max_completion_length=max(len(row.reply) for row in found),
        beta=0.0,
    )
    prompts = Dataset.from_list([{"prompt": str(number)} for number in range(len(found) // 2)])
    return GRPOTrainer(
        model, reward, args=config, train_dataset=prompts, processing_class=tokenizer, rollout_func=rollout
    )


class Clock(TrainerCallback):  # type: ignore[misc]
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(seconds(DEVICE))


def time_of(trainer: Any) -> float:
    """Seconds of a step: those of the whole call for one step, else the mean of all steps but the first."""
    clock = Clock()
    trainer.add_callback(clock)
    began = seconds(DEVICE)
    trainer.train()
    if STEPS_A_TURN == 1:
        return seconds(DEVICE) - began
    assert len(clock.ends) == STEPS_A_TURN
    return (clock.ends[-1] - clock.ends[0]) / (STEPS_A_TURN - 1)


MAKERS = {"trl_sft": sft, "trl_sft_packed": sft_packed, "trl_grpo": grpo, "trl_dpo": dpo, "trl_kto": kto}


def main() -> None:
    name, folder = sys.argv[1:3]
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # AutoTokenizer would choose the model type's class
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as scratch:
            trainer = MAKERS[name](model, tokenizer, rows(line.strip()), scratch)
            print(json.dumps({"seconds": time_of(trainer)}), flush=True)


if __name__ == "__main__":
    main()
