"""`flywheel trainer`: builds the trainer and runs its loop."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path

from shared.config import Config, is_loopback
from shared.errors import ConfigError, StartupError, VersionError
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.lifecycle import StopRequest
from shared.log import StageLogger, configure_logging
from shared.versions import verify_version, version_path

log = StageLogger("trainer")


def run_trainer(config: Config) -> int:
    """Run until a signal. Returns the exit status."""
    configure_logging("trainer", config.log_level)
    stop = StopRequest().listen()
    if config.model.kind != "full":
        raise ConfigError(f"model.kind={config.model.kind!r} cannot be trained yet; set model.kind: full")
    log.info("loading", model=config.model.path)
    with only_the_last_core():
        import torch  # heavy: after the configuration is known to be good

    from trainer_service.loop import Trainer
    from trainer_service.publish import ensure_base_version
    from trainer_service.resume import StateStore, remove_garbage

    torch.manual_seed(config.trainer.seed)
    torch.set_num_threads(cpu_threads(config))
    ledger = Ledger.open(config.ledger_url)
    try:
        ensure_base_version(config, ledger)
        states = StateStore(config.root, config.trainer.name)
        try:
            row = remove_garbage(config.root, ledger, config.trainer.name)
            has_state = row is not None and row.state_path is not None
            start = 0 if has_state else _newest(ledger)
            for version in sorted({0, start}):
                _require_whole(config, version)
            update, policy = build_update(config, config.root / version_path(start))
            trainer = Trainer(config, ledger, update, policy, states, stop)
            trainer.resume(row, start)
            trainer.run()
        finally:
            states.close()
    finally:
        ledger.close()
    return 0


@contextlib.contextmanager
def only_the_last_core() -> Iterator[None]:
    """Keep this thread off the cores that vLLM's workers are bound to, which begin at the first; see decision 10."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _require_whole(config: Config, version: int) -> None:
    """Raise StartupError when a version that training begins with is damaged."""
    try:
        verify_version(config.root / version_path(version))
    except VersionError as exc:
        raise StartupError(f"version {version} cannot be trained from: {exc}; restore its folder") from exc


def cpu_threads(config: Config) -> int:
    """Threads for PyTorch. More than there are free cores, and threads wait for each other at every operation."""
    here = sum(is_loopback(engine.host) for engine in config.explorer.engines)
    return config.trainer.cpu_threads or max(1, (os.cpu_count() or 1) - here)


def build_update(config: Config, start: Path):  # type: ignore[no-untyped-def]  # torch is imported inside
    """The models and their optimizer. `start`: the version folder whose weights the policy begins with.

    Returns the update and the policy inside it.
    """
    from trainer_service.backends.deepspeed import DeepSpeedBackend, default_config, merge
    from trainer_service.models import ActorCritic, load_causal_lm
    from trainer_service.update import PPOUpdate

    settings = config.trainer
    policy = load_causal_lm(start)
    base = config.root / version_path(0)
    reference = copy.deepcopy(policy) if start == base else load_causal_lm(base)
    module = ActorCritic(policy)
    critic_rate = settings.ppo.critic_learning_rate or settings.learning_rate
    groups = [
        {"params": list(policy.parameters()), "lr": settings.learning_rate},
        {"params": module.critic_parameters(), "lr": critic_rate},
    ]
    deepspeed = merge(default_config(settings.learning_rate, settings.max_grad_norm), settings.deepspeed)
    return PPOUpdate(DeepSpeedBackend(module, groups, deepspeed), reference, settings), policy


def _newest(ledger: Ledger) -> int:
    """The version that a trainer without a saved state begins with."""
    with ledger.read() as connection:
        return max((row.version for row in list_versions(connection) if row.state != "REJECTED"), default=0)
