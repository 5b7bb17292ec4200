"""The trainer's state as files: master weights, moments and progress, in safetensors and JSON.

    state.json             format, steps, schedule
    master.safetensors     every trained weight, float32, by its name in the module
    exp_avg.safetensors    and other files: each value that the optimizer keeps for a weight, by its own name for it

Each tensor is stored whole, so a state does not depend on ZeRO's stage, on the number of ranks or on their devices. One
tensor is in memory at a time. Only rank 0 has files; the other ranks take part in the collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from shared.config import TrainerConfig
from shared.errors import ConfigError, StartupError, VersionError
from shared.experience import JSON
from shared.tensors import Tensor, make_header, read_header
from trainer_service.algorithms.registry import algorithm
from trainer_service.algorithms.seam import Needs
from trainer_service.backends.deepspeed import DeepSpeedBackend
from trainer_service.tensor_files import PYTORCH, write_tensors

FORMAT = 1
PROGRESS = "state.json"
_START_OVER = "set another trainer.name: it begins at the newest version that an engine has served, with new moments"
_MASTER = "master"
_OF_CRITIC = "value_head."  # prefix of weights that only a critic has


def write_state(backend: DeepSpeedBackend, folder: Path | None) -> None:
    """Write the state into a new folder. folder: None on every rank but 0. Raises OSError."""
    state, parameters = backend.state, backend.trained_parameters()
    layout = _layout(backend)
    moments = state.moments()
    if folder is not None:
        folder.mkdir(parents=True)
        about = {"format": FORMAT, "moments": moments, **state.progress()}
        (folder / PROGRESS).write_bytes(msgspec.json.encode(about))
    for kind in (None, *moments):

        def read(name: str, kind: str | None = kind) -> torch.Tensor:
            return state.read(parameters[name], kind)

        if folder is not None:
            write_tensors(_file(folder, kind), make_header(layout, PYTORCH), layout, read)
        else:
            for name in layout:
                read(name)


def read_state(backend: DeepSpeedBackend, folder: Path | None) -> None:
    """Load what `write_state` wrote into a new engine. folder: None on every rank but 0.

    Raises ConfigError if it belongs to another model, algorithm or optimizer, StartupError if it is damaged.
    """
    state, parameters = backend.state, backend.trained_parameters()
    about = backend.ranks.broadcast_json(None if folder is None else _read_progress(folder))
    moments: list[str] = about["moments"]
    if folder is not None:
        for kind in (None, *moments):
            _require_layout(folder, kind, _layout(backend))
    if moments or about["steps"]:  # without either, it was saved before the optimizer's first step
        state.make_moments()
        if folder is not None:
            _require_moments(folder, moments, state.moments())
    for kind in (None, *moments):
        for name, whole in _tensors(backend, folder, kind):
            state.write(parameters[name], whole, kind)
    state.set_progress(about)


def require_same_critic(folder: Path, settings: TrainerConfig) -> None:
    """Raise ConfigError if a state has a critic and the algorithms train none, or the reverse.

    It reads the header of one file, before any model is loaded. `read_state` reports damage.
    """
    try:
        names = read_header(_file(folder, None))
    except (OSError, VersionError):
        return
    had = any(name.startswith(_OF_CRITIC) for name in names)
    has = any(Needs.VALUES in algorithm(name, settings).needs for name in settings.parts)
    if had != has:
        of, now = ("with", "without") if had else ("without", "with")
        raise ConfigError(
            f"the trainer's state {folder} was saved {of} a critic, and trainer.algorithm={','.join(settings.parts)} "
            f"trains {now} one; set an algorithm {of} a critic again, or {_START_OVER}"
        )


def _tensors(backend: DeepSpeedBackend, folder: Path | None, kind: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a file, on every rank."""
    layout = _layout(backend)
    if folder is None:
        for name, tensor in layout.items():
            yield name, backend.ranks.broadcast(torch.empty(tensor.shape), backend.device)
        return
    file = _file(folder, kind)
    try:
        with safe_open(file, "pt") as tensors:
            for name in layout:
                yield name, backend.ranks.broadcast(tensors.get_tensor(name), backend.device)
    except (OSError, SafetensorError) as exc:
        raise StartupError(f"the trainer's state {file} cannot be read ({exc}); restore it") from exc


def _read_progress(folder: Path) -> JSON:
    if not (folder / PROGRESS).exists() and folder.is_dir():
        raise StartupError(
            f"the trainer's state {folder} is in a form that this Flywheel does not read (no {PROGRESS} in it); "
            f"{_START_OVER}"
        )
    try:
        progress: JSON = msgspec.json.decode((folder / PROGRESS).read_bytes())
    except (OSError, msgspec.DecodeError) as exc:
        raise StartupError(f"the trainer's state {folder} cannot be loaded ({exc}); restore it") from exc
    if progress["format"] != FORMAT:
        raise StartupError(f"the trainer's state {folder} is of a newer Flywheel; start that one")
    return progress


def _require_layout(folder: Path, kind: str | None, layout: dict[str, Tensor]) -> None:
    """Raise ConfigError unless a file has the tensors of this model and algorithm, StartupError if it is damaged."""
    file = _file(folder, kind)
    try:
        found = read_header(file)
    except (OSError, VersionError) as exc:
        raise StartupError(f"the trainer's state {file} cannot be loaded ({exc}); restore it") from exc
    for name in sorted(found.keys() | layout.keys()):
        if found.get(name) != layout.get(name):
            raise ConfigError(
                f"the trainer's state {folder} is of another model or algorithm: {name!a} is "
                f"{found.get(name, 'not in it')}, and {layout.get(name, 'not there')} in the model; restore these "
                "settings or set another trainer.name"
            )


def _require_moments(folder: Path, saved: list[str], own: list[str]) -> None:
    """Raise ConfigError unless the optimizer keeps the same values for a weight as the one that saved them."""
    if set(saved) != set(own):
        raise ConfigError(
            f"the trainer's state {folder} has {', '.join(saved) or 'nothing'} for each weight, and "
            f"trainer.deepspeed.optimizer keeps {', '.join(own) or 'nothing'}; set the optimizer that saved it, or "
            f"{_START_OVER}"
        )


def _layout(backend: DeepSpeedBackend) -> dict[str, Tensor]:
    return {name: Tensor("F32", shape) for name, shape in backend.shapes().items()}


def _file(folder: Path, kind: str | None) -> Path:
    return folder / f"{kind or _MASTER}.safetensors"
