"""TRL's trainers as contestants of `benchmarks.learning`, run by the peers' Python.

    PEERS_PYTHON -m benchmarks.peers.trl_learner '{"base": FOLDER, "trainer": NAME, "settings": {...}, "rows": N,
                                                   "seed": N, "weights": FILE}'

Each line of standard input is the JSON list of the N rows of one update. After TRL has learnt from them, the weights
are in FILE and a line of figures is on standard output. One trainer with one optimizer makes all updates.

`settings` holds `learning_rate`, `epochs` and `minibatches`, which mean the same to each trainer; everything else is an
argument of the trainer's own configuration. TRL gets the sampled tokens unchanged.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

import torch
from datasets import Dataset
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.trainer.utils import pad

Row = dict[str, Any]
STAND_IN = "a"  # text of the rows that a trainer is built with; it never learns from them


class Peer:
    """A trainer, and how it gets the rows of an update."""

    def __init__(self, about: dict[str, Any], scratch: str) -> None:
        settings = dict(about["settings"])
        steps, self.count = settings.pop("epochs") * settings["minibatches"], about["rows"]
        self.minibatches = settings.pop("minibatches")
        self.epochs = steps // self.minibatches
        self.settings: dict[str, Any] = {
            "output_dir": scratch, "per_device_train_batch_size": self.count // self.minibatches, "max_steps": steps,
            "lr_scheduler_type": "constant", "seed": about["seed"], "gradient_checkpointing": False, "use_cpu": True,
            "bf16": False, "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
            **settings,
        }  # fmt: skip
        self.model = AutoModelForCausalLM.from_pretrained(about["base"], dtype=torch.float32)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings["learning_rate"], weight_decay=0.0)
        self.built = {
            "processing_class": AutoTokenizer.from_pretrained(about["base"]),
            "optimizers": (optimizer, None),
        }
        self.rows: list[Row] = []
        self.trainer = self.make()
        self.trainer.remove_callback(PrinterCallback)

    def make(self) -> Any:
        raise NotImplementedError

    def columns(self) -> list[dict[str, Any]]:
        """The rows as the trainer stores them after tokenisation."""
        raise NotImplementedError

    def update(self, rows: list[Row]) -> None:
        """Make all optimizer steps on the rows of one update."""
        assert len(rows) == self.count
        self.rows = rows
        self.trainer.train_dataset = Dataset.from_list(self.columns())
        self.trainer.train()


class Sft(Peer):
    """Trains on the corrections."""

    def make(self) -> Any:
        config = SFTConfig(**self.settings, max_length=None)
        stand_in = Dataset.from_list([{"input_ids": [0, 0], "labels": [0, 0]}])
        return SFTTrainer(self.model, config, train_dataset=stand_in, **self.built)

    def columns(self) -> list[dict[str, Any]]:
        return [
            {"input_ids": row["prompt"] + row["correction"], "labels": [-100] * len(row["prompt"]) + row["correction"]}
            for row in self.rows
        ]


class Dpo(Peer):
    """Trains on preferences: the correction over the reply."""

    def make(self) -> Any:
        stand_in = Dataset.from_list([{"prompt": STAND_IN, "chosen": STAND_IN, "rejected": STAND_IN}])
        config = DPOConfig(**self.settings, max_length=None)
        return DPOTrainer(self.model, args=config, train_dataset=stand_in, **self.built)

    def columns(self) -> list[dict[str, Any]]:
        return [
            {"prompt_ids": row["prompt"], "chosen_ids": row["correction"], "rejected_ids": row["reply"]}
            for row in self.rows
        ]


class Kto(Peer):
    """Trains on ratings. TRL's loss estimates its bound with the previous row's reply, within a step's rows."""

    def make(self) -> Any:
        stand_in = Dataset.from_list([{"prompt": STAND_IN, "completion": STAND_IN, "label": one < 1} for one in (0, 1)])
        config = KTOConfig(**self.settings, max_length=None)
        return KTOTrainer(self.model, args=config, train_dataset=stand_in, **self.built)

    def columns(self) -> list[dict[str, Any]]:
        step = self.count // self.minibatches
        found = []
        for place, row in enumerate(self.rows):
            first = place - place % step
            other = self.rows[first + (place - first - 1) % step]
            found.append(
                {
                    "prompt_ids": row["prompt"], "completion_ids": row["reply"], "label": row["up"],
                    "KL_completion_ids": other["reply"],
                }
            )  # fmt: skip
        return found


class Grpo(Peer):
    """Trains on rewards. An update's rows are one group: each prompt has one sample, which has no advantage alone."""

    def make(self) -> Any:
        config = GRPOConfig(
            **self.settings, num_generations=self.count, steps_per_generation=self.minibatches,
            num_iterations=self.epochs, max_completion_length=64,
        )  # fmt: skip
        return GRPOTrainer(
            self.model, self._rewards, args=config, train_dataset=Dataset.from_list(self.columns()),
            rollout_func=self._rollout, **self.built,
        )  # fmt: skip

    def columns(self) -> list[dict[str, Any]]:
        return [{"prompt": STAND_IN}]  # one row for the group

    def _rollout(self, _prompts: list[Any], _trainer: Any) -> dict[str, Any]:
        names = {"prompt_ids": "prompt", "completion_ids": "reply", "logprobs": "logprobs"}
        return {name: [row[one] for row in self.rows] for name, one in names.items()}

    def _rewards(self, **_: Any) -> list[float]:
        return [row["reward"] for row in self.rows]


class Sdpo(Peer):
    """Trains on comments, as `privileged_context`, which the teacher reads."""

    def make(self) -> Any:
        config = SDPOConfig(
            **self.settings, num_generations=1, steps_per_generation=self.minibatches, num_iterations=self.epochs,
            scale_rewards="none", diagnostics_warning_interval=0, shuffle_dataset=False,
        )  # fmt: skip
        stand_in = Dataset.from_list([{"prompt": STAND_IN, "privileged_context": [0], "place": 0}])
        trainer = _Sampled(self.model, _nothing, args=config, train_dataset=stand_in, **self.built)
        trainer.peer, trainer.teacher_context_builder = self, _Written()
        return trainer

    def columns(self) -> list[dict[str, Any]]:
        return [
            {"prompt": STAND_IN, "privileged_context": row["hint"] + row["prompt"], "place": place}
            for place, row in enumerate(self.rows)
        ]


class _Written:
    """The teacher's input, as tokens: a comment at the place where our own teacher reads it, and the prompt.

    TRL's own builder joins texts and tokenizes them. A comment then becomes other tokens than those that the base model
    has learnt to follow, and the teacher knows little more than the policy.
    """

    def __init__(self) -> None:
        self.last_metrics: dict[str, float] = {}

    def build(
        self, output: dict[str, Any], prompts: list[Any], rewards: torch.Tensor, feedbacks: list[list[int]]
    ) -> dict[str, torch.Tensor]:
        texts = [torch.tensor(one) for one in feedbacks]
        read = pad(texts, padding_value=0, padding_side="left")
        is_read = pad([torch.ones_like(one) for one in texts], padding_value=0, padding_side="left")
        return {
            "teacher_input_ids": torch.cat([read, output["completion_ids"]], dim=1),
            "teacher_attention_mask": torch.cat([is_read, output["completion_mask"]], dim=1),
            "self_distillation_mask": torch.ones(len(prompts)),
        }


def _nothing(completions: list[Any], **_: Any) -> list[float]:
    """Rewards of 0: only the teacher determines the loss."""
    return [0.0] * len(completions)


class _Sampled(SDPOTrainer):
    """SDPO on stored replies; its trainer, unlike GRPO's, has no rollout function."""

    peer: Sdpo

    def sample_rollouts(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [self.peer.rows[one["place"]] for one in inputs]
        prompts, replies = ([torch.tensor(row[name]) for row in rows] for name in ("prompt", "reply"))
        logprobs = [torch.tensor(row["logprobs"]) for row in rows]
        padding = self.processing_class.pad_token_id
        return {
            "prompt_ids": pad(prompts, padding_value=padding, padding_side="left"),
            "prompt_mask": pad([torch.ones_like(one) for one in prompts], padding_value=0, padding_side="left"),
            "completion_ids": pad(replies, padding_value=padding, padding_side="right"),
            "completion_mask": pad([torch.ones_like(one) for one in replies], padding_value=0, padding_side="right"),
            "raw_completion_lengths": torch.tensor([len(one) for one in replies]),
            "old_per_token_logps": pad(logprobs, padding_value=0.0, padding_side="right"),
        }


PEERS: dict[str, type[Peer]] = {"sft": Sft, "dpo": Dpo, "kto": Kto, "grpo": Grpo, "sdpo": Sdpo}


def main() -> None:
    about = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        peer = PEERS[about["trainer"]](about, scratch)
        for line in sys.stdin:
            started = time.perf_counter()
            peer.update(json.loads(line))
            save_model(peer.model, about["weights"])
            print(json.dumps({"seconds": round(time.perf_counter() - started, 3)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
