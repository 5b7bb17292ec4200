"""DeepSpeed: the optimizer step and ZeRO. Only this file imports it.

DeepSpeed's own checkpoints are pickles and are not used; see `OptimizerState`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from shared.errors import ConfigError, first_line
from shared.experience import JSON
from trainer_service.backends.optimizer_state import OptimizerState
from trainer_service.ranks import Ranks, is_lost

_REFUSALS = (AssertionError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)


class DeepSpeedBackend:
    """One module under `deepspeed.initialize`."""

    def __init__(
        self, module: nn.Module, groups: list[dict[str, Any]], max_grad_norm: float, config: JSON, ranks: Ranks
    ) -> None:
        """groups: parameter groups with their learning rates; the gradient of each group is clipped to `max_grad_norm`
        separately. config: DeepSpeed's configuration.

        Raises ConfigError for a configuration that DeepSpeed rejects.
        """
        _prepare_environment()
        import deepspeed

        self._deepspeed = deepspeed
        self._groups = [list(group["params"]) for group in groups]
        self._rates = [float(group["lr"]) for group in groups]
        self._max_grad_norm = max_grad_norm
        self.ranks = ranks
        # its shared-memory all-reduce for several CPU ranks would be compiled at each start
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        exact = _beyond_bf16(self._groups) if config.get("bf16", {}).get("enabled") else []
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # with bfloat16 it prints its memory usage
                self._engine, *_ = deepspeed.initialize(
                    model=module, model_parameters=groups, config=config, mpu=ranks.data_parallel()
                )
        except (*_REFUSALS, deepspeed.DeepSpeedConfigError) as exc:
            if is_lost(exc):  # the configuration is not the cause
                raise
            raise ConfigError(_refusal(exc, config)) from exc
        self.device: torch.device = self._engine.device
        self.state = OptimizerState(self._engine, deepspeed.utils)
        for parameter, weights in exact:
            self.state.write(parameter, weights.to(self.device))

    @property
    def module(self) -> nn.Module:
        """The wrapped module. For a forward pass that is trained, call the backend itself."""
        module: nn.Module = self._engine.module
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def step(self, shares: Sequence[Callable[[], Tensor]], rate: float = 1.0) -> list[float]:
        """Run one optimizer step on the sum of the losses of `shares`. Returns the norm of each group's gradient before
        clipping.

        rate: factor of the learning rates, unless a scheduler of DeepSpeed sets them.
        """
        self._engine.train()
        for number, share in enumerate(shares):
            self._engine.set_gradient_accumulation_boundary(number == len(shares) - 1)
            self._engine.backward(share())
        norms = [self._clip(parameters) for parameters in self._groups]
        self._set_rates(rate)
        self._engine.step()
        return norms

    def _set_rates(self, rate: float) -> None:
        """Set the configured learning rates, also after a saved state was loaded; a scheduler's are kept."""
        if self._engine.lr_scheduler is None:
            for group, own in zip(self._engine.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = own * rate

    def _clip(self, parameters: list[nn.Parameter]) -> float:
        """Scale the gradient of one group down to `max_grad_norm`. Returns its norm before.

        DeepSpeed clips all groups together: a critic far from its targets would leave the policy almost no gradient.
        """
        read = self._deepspeed.utils.safe_get_full_grad
        norms = {p: gradient.float().norm() for p in parameters if (gradient := read(p)) is not None}
        norm = float(torch.stack(list(norms.values())).norm()) if norms else 0.0
        scale = float(getattr(self._engine.optimizer, "loss_scale", 1.0))  # above 1 with fp16
        if math.isfinite(norm) and norm > self._max_grad_norm * scale:
            for parameter in norms:
                self.state.scale_gradient(parameter, self._max_grad_norm * scale / norm)
        return norm / scale

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a parameter gathered, in the optimizer's float32; a buffer unchanged. Every rank must call it.

        A frozen parameter is returned in the model's type.
        """
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            return self.state.read(tensor)
        if hasattr(tensor, "ds_id"):
            with self._deepspeed.zero.GatheredParameters([tensor]):
                return tensor.detach().clone()
        return tensor.detach()

    def close(self) -> None:
        """Release the memory of the module, which cannot be used afterwards.

        DeepSpeed 0.19 keeps references to modules and parameters that were under ZeRO 3, so their contents are deleted.
        """
        parameters, modules = list(self.module.parameters()), list(self.module.modules())
        self._engine.destroy()
        del self._engine
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)
        for one in (*parameters, *modules):
            vars(one).clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name. A parameter with several names has its first."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained parameters, not sharded."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.trained_parameters().items()}


def _refusal(error: Exception, config: JSON) -> str:
    """Format DeepSpeed's error as one line: key and value if it names them, reason and remedy."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        path = first["loc"]
        section = [key for key, keys in config.items() if path and isinstance(keys, dict) and path[0] in keys][:1]
        name = ".".join(map(str, ("trainer.deepspeed", *section, *path)))
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        reason = "DeepSpeed has no such key" if first["type"] == "extra_forbidden" else message
        return f"{name}={first['input']!r}: {reason}; correct it"
    reason = first_line(error) or type(error).__name__
    return f"trainer.deepspeed: DeepSpeed refuses its configuration ({reason}); correct it"


def has_bf16() -> bool:
    """Whether this machine's accelerator computes in bfloat16. Older ones emulate it, slower than float32."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def _beyond_bf16(groups: list[list[nn.Parameter]]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters that bfloat16 rounds, with their exact weights.

    DeepSpeed first rounds the model, and then copies its float32 master weights from the result.
    """
    weights = [(parameter, parameter.detach()) for group in groups for parameter in group]
    return [(p, exact) for p, exact in weights if not torch.equal(exact, exact.to(torch.bfloat16).to(exact.dtype))]


def configuration(learning_rate: float, over: JSON, *, bf16: bool) -> JSON:
    """Return our DeepSpeed configuration, with the user's keys merged over it.

    bf16: compute in bfloat16, with float32 in the optimizer and in accumulated gradients. ZeRO 0 would not keep float32
    gradients for bfloat16 weights: stage 1 replaces it, which stores the same on one rank.
    """
    merged = merge(_defaults(learning_rate, over.get("optimizer")), over)
    if bf16:
        low = {"bf16": {"enabled": True, "immediate_grad_update": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        merged = merge(low, merged)
        if merged["zero_optimization"]["stage"] == 0:
            merged = merge(merged, {"zero_optimization": {"stage": 1}})
    return merged


def _defaults(learning_rate: float, optimizer: Any) -> JSON:
    """optimizer: the user's section, if any. AdamW's settings apply to Adam alone."""
    params: JSON = {"lr": learning_rate}
    kind = optimizer.get("type", "AdamW") if isinstance(optimizer, dict) else "AdamW"
    if str(kind).lower() in ("adam", "adamw"):
        # PyTorch's: DeepSpeed's implementations need a compiled extension
        params |= {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True}
        if torch.cuda.is_available():
            params["fused"] = True
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the losses are already shares of a sum, and `step` sets the boundary
        "gradient_clipping": 0.0,  # `step` clips
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 0},
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }


def learning_rate(config: JSON) -> float:
    """Return the policy's learning rate in a complete configuration. Raises ConfigError if it is not positive."""
    rate = config["optimizer"]["params"]["lr"]
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ConfigError(
            f"trainer.deepspeed.optimizer.params.lr={rate!r}: must be a positive number, such as 1.0e-6; correct it"
        )
    return float(rate)


def merge(base: JSON, over: JSON) -> JSON:
    """Return `base` with the keys of `over`, merged section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _prepare_environment() -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)  # by DeepSpeed
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
