"""The algorithms by name. A new one needs a file next to this one, a section of settings, and a line here."""

from __future__ import annotations

from typing import Any

from shared.config import TrainerConfig
from trainer_service.algorithms.distill import Distill
from trainer_service.algorithms.dpo import DPO
from trainer_service.algorithms.grpo import GRPO
from trainer_service.algorithms.hint import Hint
from trainer_service.algorithms.kto import KTO
from trainer_service.algorithms.ppo import PPO
from trainer_service.algorithms.raft import RAFT
from trainer_service.algorithms.reinforce_pp import ReinforcePP
from trainer_service.algorithms.rloo import RLOO
from trainer_service.algorithms.seam import Algorithm
from trainer_service.algorithms.sft import SFT
from trainer_service.algorithms.spo import SPO
from trainer_service.algorithms.step_grpo import StepGRPO

PAGES: dict[str, Any] = {  # each is built with its section
    "ppo": PPO,
    "reinforce_pp": ReinforcePP,
    "sft": SFT,
    "spo": SPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "step_grpo": StepGRPO,
    "raft": RAFT,
    "dpo": DPO,
    "kto": KTO,
    "hint": Hint,
    "distill": Distill,
}


def algorithm(name: str, config: TrainerConfig) -> Algorithm:
    """Return one of the configured algorithms, with its settings."""
    built: Algorithm = PAGES[name](config.settings_of(name))
    return built
