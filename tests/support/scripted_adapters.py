"""The LoRA routes of the scripted engine, and adapters in PEFT's format, written without torch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from shared.adapters import ADAPTER_WEIGHTS, AdapterConfig, a_name, b_name, write_adapter_config
from shared.ledger import transitions
from shared.probe import Probe, ProbeSequence
from shared.versions import Manifest, manifest_sha256, version_path, write_version
from tests.support.script import Script
from tests.support.scripted_answers import bad_request
from tests.support.servers import RunningExplorer, safetensors, write_scripted_version

BASE = {"model.layers.0.q_proj.weight": ("F32", [4, 3]), "model.embed_tokens.weight": ("F32", [5, 3])}
RANK = 2
PROBE_IDS = [5, 6, 7]


class ScriptedAdapters:
    """vLLM 0.32's handling of adapters: names are loaded at run time from folders that must stay."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)

    async def _models(self, _request: web.Request) -> web.Response:
        for name, root in self._script.adapters.items():
            if not (Path(root) / ADAPTER_WEIGHTS).exists():
                self._script.gone.append(name)
                self._script.say(f"gone {name}")
        cards = [{"id": "agent", "root": "/base"}]
        cards += [{"id": name, "root": root, "parent": "agent"} for name, root in self._script.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _load(self, request: web.Request) -> web.Response:
        body, script = await request.json(), self._script
        name, folder = body["lora_name"], Path(body["lora_path"])
        script.calls.append(f"load {name}")
        script.say(f"loading {name}")
        if not script.routes_lora:
            return web.json_response({"detail": "Not Found"}, status=404)
        await asyncio.sleep(script.reload_s)
        if name in script.adapters:
            return bad_request(f"The lora adapter '{name}' has already been loaded.")
        if script.refuses_lora is not None:
            return web.json_response({"error": {"message": script.refuses_lora, "code": 500}}, status=500)
        if not (folder / ADAPTER_WEIGHTS).exists():
            return web.json_response({"error": {"message": f"No adapter found for {folder}", "code": 404}}, status=404)
        script.adapters[name] = str(folder)
        script.ever_loaded.append((name, str(folder)))
        script.say(f"loaded {name}")
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self._script.calls.append(f"unload {name}")
        self._script.say(f"unloading {name}")
        await asyncio.sleep(self._script.reload_s)
        self._script.adapters.pop(name, None)
        self._script.say(f"unloaded {name}")
        return web.Response(text="Success")

    def logprobs(self, name: str, token_ids: list[int]) -> list[float] | None:
        """The logprobs of a probe's sequence by this adapter; None: it is not loaded, or has no effect."""
        folder = self._script.adapters.get(name)
        if folder is None or name in self._script.without_effect:
            return None
        sequences = json.loads((Path(folder) / "MANIFEST.json").read_text())["probe"]["sequences"]
        return next(([float(p) for p in one["logprobs"]] for one in sequences if one["token_ids"] == token_ids), None)


def write_base(root: Path) -> Path:
    """Write version 0, the base of adapters."""
    files = {"model.safetensors": safetensors(BASE), "generation_config.json": b"{}"}
    return write_scripted_version(root, 0, -1.0, files, base="base")


def publish_base(explorer: RunningExplorer) -> None:
    """Publish version 0, the base of adapters, which `write_base` has written."""
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0, manifest_sha256=_sha(explorer, 0))


def write_adapter(root: Path, version: int, logprob: float | None = None, **wrong: Any) -> Path:
    """Write an adapter's folder. The version determines its probe. wrong: settings, tensors, fingerprint."""
    logprob = -1.0 - 0.1 * version if logprob is None else logprob
    probe = Probe("float32", [ProbeSequence(PROBE_IDS, [logprob] * 2)], base=[ProbeSequence(PROBE_IDS, [-1.0, -1.0])])
    manifest = Manifest(
        version, version - 1, "lora", "base", wrong.get("base", "base"), version, 0.0, {}, probe, base_version=0
    )
    rank = wrong.get("rank", RANK)
    tensors = {a_name("model.layers.0.q_proj"): ("F32", [RANK, 3]), b_name("model.layers.0.q_proj"): ("F32", [4, RANK])}
    config = AdapterConfig(
        base_model_name_or_path="base", r=rank, lora_alpha=4.0, target_modules=wrong.get("targets", ["q_proj"])
    )

    def write(folder: Path) -> None:
        (folder / ADAPTER_WEIGHTS).write_bytes(safetensors(wrong.get("tensors", tensors), version))
        write_adapter_config(folder, config)

    write_version(root, manifest, write)
    return root / version_path(version)


def publish_adapter(explorer: RunningExplorer, version: int, logprob: float | None = None, **wrong: Any) -> str:
    """Publish an adapter like a trainer. Returns its name on engines."""
    write_adapter(explorer.config.root, version, logprob, **wrong)
    return publish_row(explorer, version)


def publish_row(explorer: RunningExplorer, version: int) -> str:
    """Make a written adapter official. Returns its name on engines."""
    about = {"kind": "lora", "step": version, "manifest_sha256": _sha(explorer, version)}
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=version, parent=version - 1, **about)
    return name_of(explorer, version)


def name_of(explorer: RunningExplorer, version: int) -> str:
    return f"agent@{version}+{_sha(explorer, version)[:8]}"


def _sha(explorer: RunningExplorer, version: int) -> str:
    return manifest_sha256(explorer.config.root / version_path(version))
