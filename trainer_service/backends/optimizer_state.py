"""Weights and optimizer state of a DeepSpeed engine, one whole tensor at a time, under any ZeRO stage.

Reads return the same under every stage and any number of ranks, so a state that was saved under one can be loaded under
another. Reads and writes are collective: every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shared.experience import JSON

STEP = "step"


class OptimizerState:
    """Master weights, moments and schedule of one engine."""

    def __init__(self, engine: Any, utils: Any) -> None:
        """utils: the module deepspeed.utils."""
        self._engine = engine
        self._utils = utils
        self._stage: int = engine.zero_optimization_stage()
        self._optimizer: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def moments(self) -> list[str]:
        """Return the names of the optimizer's values for each weight, such as exp_avg; none before its first step."""
        self._link()
        kept: dict[str, Any] = next(iter(self._optimizer.state.values()), {})
        return sorted(name for name, value in kept.items() if name != STEP and isinstance(value, Tensor))

    def read(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """Return a master weight, or one of its moments, gathered in float32."""
        if self._stage == 0:
            return (parameter if moment is None else self._optimizer.state[parameter][moment]).detach()
        whole: Tensor
        if moment is None:
            whole = self._utils.safe_get_full_fp32_param(parameter)
        else:
            whole = self._utils.safe_get_full_optimizer_state(parameter, moment)
        return whole.detach()

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, whole: Tensor, moment: str | None = None) -> None:
        """Set a master weight and the model's copy of it, or a moment. whole: the same on every rank."""
        if self._stage == 0:
            (parameter if moment is None else self._optimizer.state[parameter][moment]).copy_(whole)
        elif self._stage == 3:
            self._write_share(parameter, whole, moment)
        elif moment is None:
            self._utils.safe_set_full_fp32_param(parameter, whole)
            parameter.copy_(whole)
        else:
            self._utils.safe_set_full_optimizer_state(parameter, whole, moment)

    def _write_share(self, parameter: Any, whole: Tensor, moment: str | None) -> None:
        """Write this rank's part of a tensor under ZeRO 3; the last part is padded with zeros."""
        length = parameter.ds_tensor.numel()
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        padded = torch.nn.functional.pad(whole.flatten(), (0, length * (rank + 1) - whole.numel()))
        share = padded.narrow(0, length * rank, length)
        if moment is None:
            self._utils.safe_set_local_fp32_param(parameter, share)
            parameter.ds_tensor.data.copy_(share)
            if parameter.numel():  # small parameters are not sharded
                parameter.data.copy_(whole)
        else:
            self._utils.safe_set_local_optimizer_state(parameter, share, moment)

    def scale_gradient(self, parameter: nn.Parameter, factor: float) -> None:
        """Multiply the gradient of the next step. DeepSpeed 0.19 cannot set a whole gradient with padded parts."""
        utils = self._utils
        if (summed := getattr(parameter, "_hp_grad", None)) is not None:
            # bfloat16 under ZeRO 1: each rank has the whole sum, of which DeepSpeed sets a part, or a copy beside it
            summed.mul_(factor)
        elif self._stage == 3:
            utils.safe_set_local_grad(parameter, utils.safe_get_local_grad(parameter) * factor)
        else:
            utils.safe_set_full_grad(parameter, utils.safe_get_full_grad(parameter) * factor)

    def make_moments(self) -> None:
        """Create the optimizer's state as its first step does: step each tensor with zero gradients at rate 0."""
        for group, flat in list(self._flat_parameters()):
            kept, gradient = dict(group), flat.grad
            group.update(params=[flat], lr=0.0)
            flat.grad = torch.zeros_like(flat)
            self._optimizer.step()
            group.update(kept)
            flat.grad = gradient
        self._link()

    def _link(self) -> None:
        """Register with DeepSpeed where the moments of each weight are in its flat state.

        DeepSpeed 0.19 does so once, after the first group's first step, when the other groups have no state yet.
        """
        zero = self._engine.optimizer
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _flat_parameters(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """Yield the tensors that the optimizer updates, with their groups. ZeRO 3 inserts them only during a step."""
        if self._stage == 3:
            zero = self._engine.optimizer
            for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
                yield self._optimizer.param_groups[zero.sub_group_to_group_id[number]], flat
        else:
            for group in self._optimizer.param_groups:
                for flat in list(group["params"]):
                    yield group, flat

    def progress(self) -> JSON:
        """Return steps and schedule as JSON."""
        kept: dict[str, Any] = next(iter(self._optimizer.state.values()), {})
        schedule = self._engine.lr_scheduler
        return {
            "steps": self._engine.global_steps,
            "optimizer_steps": int(kept[STEP]) if STEP in kept else None,
            "schedule": schedule.state_dict() if schedule else None,
            "rates": [group["lr"] for group in self._optimizer.param_groups] if schedule else None,
        }

    def set_progress(self, progress: JSON) -> None:
        """Restore what `progress` returned."""
        self._engine.global_steps = progress["steps"]
        for kept in self._optimizer.state.values():
            if isinstance(kept.get(STEP), Tensor):
                kept[STEP].fill_(progress["optimizer_steps"])
            elif STEP in kept:
                kept[STEP] = progress["optimizer_steps"]
        if self._engine.lr_scheduler and progress["schedule"]:
            self._engine.lr_scheduler.load_state_dict(progress["schedule"])
            for group, rate in zip(self._optimizer.param_groups, progress["rates"], strict=True):
                group["lr"] = rate
