"""The configuration file: a module for each section, the defaults, and errors that name key, value and remedy.

Environment variables override the file: `FLYWHEEL_` and the path with `__` between, such as
`FLYWHEEL_EXPLORER__PORT=8020`; their values are YAML.
"""

from shared.config.algorithms import (
    ALGORITHMS,
    AUTO,
    CHOICES,
    DPOConfig,
    GroupConfig,
    GRPOConfig,
    KTOConfig,
    PPOConfig,
    RAFTConfig,
    ReinforcePPConfig,
    RLOOConfig,
    SFTConfig,
    SPOConfig,
    StepGRPOConfig,
)
from shared.config.engine import EngineConfig, refusal_of_argument
from shared.config.explorer import EngineAddress, ExplorerConfig, ReloadConfig, Tolerance, is_loopback
from shared.config.keys import KeyConfig
from shared.config.load import load_config
from shared.config.model import LoraConfig, ModelConfig
from shared.config.reward import RewardConfig
from shared.config.surrogate import SCORES, AlgorithmConfig, Kind, SurrogateConfig
from shared.config.taught import DistillConfig, HintConfig
from shared.config.trainer import TrainerConfig
from shared.config.versions import VersionsConfig
from shared.config.watch import BreakerConfig, WatchConfig
from shared.config.whole import DATABASES, Config, agreed_settings, check_database_url, differences, ledger_url

__all__ = [
    "ALGORITHMS", "AUTO", "CHOICES", "DATABASES", "SCORES", "AlgorithmConfig", "BreakerConfig", "Config", "DPOConfig",
    "DistillConfig", "EngineAddress", "EngineConfig", "ExplorerConfig", "GRPOConfig", "GroupConfig", "HintConfig",
    "KTOConfig", "KeyConfig", "Kind", "LoraConfig", "ModelConfig", "PPOConfig", "RAFTConfig", "RLOOConfig",
    "ReinforcePPConfig", "ReloadConfig", "RewardConfig", "SFTConfig", "SPOConfig", "StepGRPOConfig", "SurrogateConfig",
    "Tolerance", "TrainerConfig", "VersionsConfig", "WatchConfig", "agreed_settings", "check_database_url",
    "differences", "is_loopback", "ledger_url", "load_config", "refusal_of_argument",
]  # fmt: skip
