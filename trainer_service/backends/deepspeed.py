"""DeepSpeed: the optimizer step, ZeRO, and the trainer's private checkpoints. The only file that imports it.

Its checkpoints are pickles and stay in the trainer's own folder; what other processes load is safetensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import ConfigError, StartupError
from shared.experience import JSON

TAG = "state"


class DeepSpeedBackend:
    """One module under `deepspeed.initialize`."""

    def __init__(self, module: nn.Module, groups: list[dict[str, Any]], config: JSON) -> None:
        """groups: parameter groups with their learning rates. config: DeepSpeed's configuration.

        Raises ConfigError for a configuration that DeepSpeed refuses.
        """
        _prepare_environment()
        import deepspeed

        self._deepspeed = deepspeed
        _join_alone(deepspeed)
        try:
            self._engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
        except (AssertionError, ValueError, TypeError, KeyError, RuntimeError) as exc:
            reason = str(exc).strip().split("\n")[0] or type(exc).__name__
            raise ConfigError(f"trainer.deepspeed: DeepSpeed refuses its configuration ({reason}); correct it") from exc
        self.device: torch.device = self._engine.device
        self.zero_stage: int = self._engine.zero_optimization_stage()

    @property
    def module(self) -> nn.Module:
        """The wrapped module. Call the backend itself for a forward pass that is to be trained."""
        module: nn.Module = self._engine.module
        return module

    def __call__(self, *args: Tensor) -> Any:
        return self._engine(*args)

    def step(self, shares: Sequence[Callable[[], Tensor]]) -> float:
        """One optimizer step on the sum of the losses that `shares` compute. Returns the gradient's norm."""
        self._engine.train()
        for number, share in enumerate(shares):
            self._engine.set_gradient_accumulation_boundary(number == len(shares) - 1)
            self._engine.backward(share())
        norm = self._own_norm() if self.zero_stage == 0 else None
        self._engine.step()
        if norm is None:
            norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else 0.0

    def _own_norm(self) -> float:
        """The gradient's norm before clipping; without ZeRO, in float32, DeepSpeed does not keep it."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    @contextlib.contextmanager
    def whole(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Within this block the parameters are whole on this rank, also under ZeRO 3."""
        if self.zero_stage < 3:
            yield
            return
        with self._deepspeed.zero.GatheredParameters(parameters):
            yield

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state. The caller makes it durable."""
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """The inverse of `save`. Raises StartupError."""
        try:
            loaded, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
        except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as exc:
            raise StartupError(f"the trainer's state {folder} cannot be loaded ({exc}); restore it") from exc
        if loaded is None:
            raise StartupError(f"the trainer's state {folder} is not there; restore it, or begin with a new root_dir")


def default_config(learning_rate: float, max_grad_norm: float) -> JSON:
    """Our DeepSpeed configuration, before the user's keys are merged over it."""
    adam = {"lr": learning_rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    if not torch.cuda.is_available():
        adam["torch_adam"] = True  # DeepSpeed's own CPU Adam wants a compiler's extension
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # our losses are shares of a sum already; boundaries are set by hand
        "gradient_clipping": max_grad_norm,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": 0},
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }


def merge(base: JSON, over: JSON) -> JSON:
    """`over` laid on `base`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _prepare_environment() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise StartupError("WORLD_SIZE is above 1, and this trainer runs on one rank; start it without torchrun")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _join_alone(deepspeed: Any) -> None:
    """A process group of one, met over a file: no port that another process could hold."""
    if torch.distributed.is_initialized():
        return
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    meeting = Path(tempfile.mkdtemp(prefix="flywheel-rank-")) / "meet"
    # a shared-memory all-reduce for several CPU ranks: alone it is no use, and compiling it takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
