"""benchmarks/lora measures an update alone: models that prepare it are loaded in another process."""

from __future__ import annotations

import benchmarks.lora
from tests.support.models import make_tiny_model


def test_the_memory_of_an_update_is_measured_in_a_process_that_has_loaded_no_model_before(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks.lora, "KINDS", {"full": {"kind": "full"}})
    base = make_tiny_model(tmp_path / "base")
    loaded: list[str] = []
    run = benchmarks.lora.subprocess.run

    def watched(command, **more):
        (tmp_path / "base" / "model.safetensors").unlink()  # it cannot be loaded any more
        loaded.append(command[3])
        return run(command, **more)

    monkeypatch.setattr(benchmarks.lora.subprocess, "run", watched)
    figures = benchmarks.lora.compare(base, tmp_path)["full"]
    assert loaded == ["full"] and figures["version_bytes"] > 0 and figures["memory_bytes"] > 0
