"""Losses and gradients of TRL's own trainers, recorded for tests/unit/test_trl_losses.py; run by the peers' Python.

    PEERS_PYTHON -m benchmarks.peers.trl_losses tests/unit/data/trl_losses.json

The trainers are those of the benchmarks, on a tiny model. Each trainer's own method computes the loss. The arrays below
replace the models' log-probabilities of tokens; the gradient is that of the policy's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

import torch
import trl
from datasets import Dataset
from torch import Tensor
from trl import RLOOConfig, RLOOTrainer
from trl.experimental.sdpo.sdpo_trainer import DistillationLogits

from benchmarks.peers.trl_learner import PEERS, STAND_IN, Peer
from tests.support.models import make_tiny_model

Arrays = list[list[float]]  # one for each reply
# four replies; DPO prefers the first to the third and the second to the fourth, KTO treats the first two as good
POLICY: Arrays = [[-0.9, -2.1, -0.4], [-1.7], [-0.3, -1.2, -2.6, -0.8], [-1.1, -0.3]]
OLD: Arrays = [[-1.2, -1.6, -0.5], [-1.5], [-0.9, -1.1, -1.0, -1.2], [-1.0, -0.9]]
SAMPLER: Arrays = [[-1.5, -1.5, -0.7], [-1.1], [-1.9, -1.1, -1.3, -1.1], [-1.2, -0.8]]
REFERENCE: Arrays = [[-1.4, -1.9, -0.6], [-1.2], [-0.8, -1.5, -2.2, -1.4], [-0.7, -1.3]]
# each prompt with the reply to another prompt: the fourth, the first, the second, the third
OTHERS: Arrays = [[-1.3, -0.4], [-0.8, -1.4, -0.9], [-1.9], [-0.5, -1.0, -1.1, -0.9]]
OTHERS_REFERENCE: Arrays = [[-1.6, -0.9], [-1.1, -1.2, -1.3], [-2.0], [-0.9, -1.3, -1.0, -1.2]]
ADVANTAGES = [1.2, -0.7, 0.4, -1.5]
CAP = 2.0  # of importance weights
# logits of two replies of three tokens each over a vocabulary of six; teacher and policy agree which two are likeliest
STUDENT = [
    [[2.0, 1.5, 0.1, -0.3, 0.2, -1.0], [0.3, 2.2, -0.5, 1.9, 0.0, 0.4], [1.1, -0.2, 0.3, 0.2, 2.4, -0.7]],
    [[-0.4, 0.6, 1.8, 0.5, 1.2, 0.0], [2.1, 0.2, 0.1, 0.3, -0.6, 1.4], [0.5, 1.6, 2.0, -0.1, 0.2, 0.3]],
]
TEACHER = [
    [[1.4, 2.3, 0.2, 0.1, -0.5, -0.8], [0.1, 1.6, 0.0, 2.5, -0.3, 0.2], [2.2, 0.3, -0.4, 0.0, 1.5, 0.1]],
    [[0.2, 0.1, 1.3, 0.4, 2.0, -0.6], [1.2, -0.5, 0.3, 0.6, 0.1, 2.3], [-0.2, 2.4, 1.1, 0.5, 0.0, -0.9]],
]
SAMPLED = [[0, 3, 4], [1, 5, 2]]
TOP = 2


def padded(arrays: Arrays) -> Tensor:
    """[B, T], float64, padded with 0."""
    width = max(map(len, arrays))
    return torch.tensor([[*one, *[0.0] * (width - len(one))] for one in arrays], dtype=torch.float64)


def mask_of(arrays: Arrays) -> Tensor:
    return padded([[1.0] * len(one) for one in arrays])


class Said:
    """Stands in for a model: each call returns the next array."""

    def __init__(self, *answers: Tensor) -> None:
        self._answers = list(answers)

    def __call__(self, **_: Any) -> SimpleNamespace:
        found = self._answers.pop(0)
        plotted = {"entropy": torch.zeros_like(found), "mean_logits": found.detach(), "is_top1": found.detach() > 0}
        return SimpleNamespace(log_probs=found, label_mask=found != 0, **plotted)


def whole(mask: Tensor) -> dict[str, Tensor]:
    """A batch as from a collator: a prompt of one token before each reply."""
    completion = torch.cat([torch.zeros(len(mask), 1), mask], 1).long()
    ids = torch.zeros_like(completion)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}


def dpo(trainer: Any, policy: Tensor) -> Tensor:
    pairs = len(policy) // 2 if trainer.loss_types != ["aot"] else 1
    chosen = [*range(pairs), *range(2, 2 + pairs)]
    trainer.ref_model = Said(padded(REFERENCE)[chosen])
    loss: Tensor = trainer._compute_loss(Said(policy[chosen]), whole(mask_of(POLICY)[chosen]), False)
    return loss


def kto(trainer: Any, policy: Tensor) -> Tensor:
    others = whole(mask_of(OTHERS))
    batch = {**whole(mask_of(POLICY)), **{f"KL_{name}": one for name, one in others.items()}}
    trainer.ref_model = Said(padded(OTHERS_REFERENCE), padded(REFERENCE))
    batch["label"] = torch.tensor([True, True, False, False])
    loss: Tensor = trainer._compute_loss(Said(padded(OTHERS), policy), batch, False)
    return loss


def grpo(trainer: Any, policy: Tensor) -> Tensor:
    mask = mask_of(POLICY)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (policy, torch.zeros_like(policy), None)
    ids = torch.zeros_like(mask).long()
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": torch.tensor(ADVANTAGES, dtype=torch.float64), "num_items_in_batch": mask.sum()}
    inputs |= {"old_per_token_logps": padded(OLD), "ref_per_token_logps": padded(REFERENCE)}
    inputs["importance_sampling_ratio"] = (padded(OLD) - padded(SAMPLER)).exp().clamp(max=CAP)
    loss: Tensor = trainer._compute_loss(None, inputs)
    return loss


def grpo_of_another_sampler(trainer: Any, policy: Tensor) -> Tensor:
    trainer.use_vllm = True  # only samples of vLLM have weights
    return grpo(trainer, policy)


class Rloo(Peer):
    """No benchmark runs it."""

    def make(self) -> Any:
        config = RLOOConfig(**self.settings, num_generations=self.count)
        rows = Dataset.from_list([{"prompt": STAND_IN}])
        return RLOOTrainer(self.model, lambda **_: [0.0], args=config, train_dataset=rows, **self.built)


def rloo(trainer: Any, policy: Tensor) -> Tensor:
    """The loss at the sampling policy, where the ratio is 1."""
    ids = torch.zeros_like(policy).long()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (policy, torch.zeros_like(policy), None)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask_of(POLICY)}
    inputs |= {"advantages": torch.tensor(ADVANTAGES, dtype=torch.float64), "old_logps": policy.detach().sum(1)}
    loss: Tensor = trainer._compute_loss(None, inputs)
    return loss


def sft(trainer: Any, policy: Tensor) -> Tensor:
    loss: Tensor = trainer.compute_loss(Said(policy), {**whole(mask_of(POLICY)), "labels": None})
    return loss


def sdpo(trainer: Any, logits: Tensor) -> Tensor:
    sampled = torch.tensor(SAMPLED)
    everywhere = torch.ones_like(sampled)
    given = DistillationLogits(sampled, everywhere, everywhere, logits, torch.tensor(TEACHER, dtype=torch.float64))
    loss: Tensor = trainer._compute_self_distillation_loss(trainer.model, {}, given)
    return loss


Case = tuple[str, dict[str, Any], Callable[[Any, Tensor], Tensor]]
_CLIP: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}
_FORWARD: dict[str, Any] = {"distillation_alpha": 0.0, "distillation_is_clip": None}
CASES: dict[str, Case] = {
    "dpo": ("dpo", {"beta": 0.3}, dpo),
    "dpo smoothed": ("dpo", {"beta": 0.3, "loss_type": ["aot"], "label_smoothing": 0.1}, dpo),
    "kto": ("kto", {"beta": 0.4, "desirable_weight": 1.0, "undesirable_weight": 1.0}, kto),
    "sft": ("sft", {}, sft),
    "grpo": ("grpo", {**_CLIP, "loss_type": "grpo"}, grpo),
    "bnpo": ("grpo", {**_CLIP, "loss_type": "bnpo"}, grpo),
    "dapo": ("grpo", {**_CLIP, "loss_type": "dapo"}, grpo),
    "dr_grpo": ("grpo", {**_CLIP, "loss_type": "dr_grpo"}, grpo),
    "kl": ("grpo", {**_CLIP, "loss_type": "bnpo", "beta": 0.5, "use_bias_correction_kl": False}, grpo),
    "delta": ("grpo", {**_CLIP, "loss_type": "bnpo", "delta": 1.5}, grpo),
    "cispo": ("grpo", {**_CLIP, "loss_type": "cispo", "epsilon_high": 1.5}, grpo),
    "gspo": ("grpo", {**_CLIP, "loss_type": "grpo", "importance_sampling_level": "sequence"}, grpo),
    "weights": ("grpo", {**_CLIP, "loss_type": "bnpo"}, grpo_of_another_sampler),
    "rloo": ("rloo", {}, rloo),
    "sdpo": ("sdpo", {**_FORWARD, "distillation_mode": "full_logits"}, sdpo),
    "sdpo top": (
        "sdpo",
        {**_FORWARD, "distillation_mode": "topk_logits", "distillation_topk": TOP, "distillation_add_tail": True},
        sdpo,
    ),
    "sdpo sampled": ("sdpo", {**_FORWARD, "distillation_mode": "sampled_token", "distillation_alpha": 1.0}, sdpo),
}


def record(case: Case, base: Path) -> dict[str, Any]:
    """The loss of one case, and its gradient by the arrays."""
    name, settings, loss_of = case
    about: dict[str, Any] = {"base": str(base), "rows": len(POLICY), "seed": 0}
    about["settings"] = {"epochs": 1, "minibatches": 1, "learning_rate": 1e-3, **settings}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = {**PEERS, "rloo": Rloo}[name](about, scratch).trainer
    trainer.model.eval()  # in this mode no loss is divided by accumulation steps
    given = torch.tensor(STUDENT, dtype=torch.float64) if name == "sdpo" else padded(POLICY)
    loss = loss_of(trainer, given.requires_grad_())
    loss.backward()
    assert given.grad is not None
    found = given.grad.tolist()
    if name != "sdpo":
        found = [one[: len(said)] for one, said in zip(found, POLICY, strict=True)]
    return {"settings": settings, "loss": loss.item(), "gradient": found}


def main() -> None:
    inputs: dict[str, Any] = {"policy": POLICY, "old": OLD, "sampler": SAMPLER, "reference": REFERENCE}
    inputs |= {"others": OTHERS, "others_reference": OTHERS_REFERENCE, "advantages": ADVANTAGES, "cap": CAP}
    inputs |= {"student": STUDENT, "teacher": TEACHER, "sampled": SAMPLED, "top": TOP}
    with tempfile.TemporaryDirectory() as folder:
        base = make_tiny_model(Path(folder) / "base")
        cases = {name: record(case, base) for name, case in CASES.items()}
    lines = [f'"trl": {json.dumps(trl.__version__)}']
    for name, of in (("inputs", inputs), ("cases", cases)):
        each = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in of.items())
        lines.append(f'"{name}": {{\n{each}\n}}')
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
