"""Stage 9, reload: engines take up versions, and prove it before they serve under a version's name.

One task for each engine keeps it: away → answers → proven → serving, and from version to version. A reload is: verify
the folder, take no new requests, let running ones finish for a while, pause, load, clear the prefix cache, resume (in a
`finally`), score the manifest's probe. When a load fails the last good version goes back in; the version is rejected
only when the engine then proves to be well, so a dying engine never condemns a version. With several engines one
reloads at a time. With several explorers on one ledger one of them keeps the engine, and the others follow it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from explorer_service.engines.client import EngineAway, EngineClient
from explorer_service.engines.pool import Engine, EnginePool, EngineState
from explorer_service.fleet import Fleet
from explorer_service.record import Recorder
from explorer_service.watch import VersionWatch
from shared.config import Config
from shared.errors import EngineError, LedgerError, VersionError
from shared.experience import Sampling
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import VersionRow, list_versions
from shared.lifecycle import until_next
from shared.log import StageLogger
from shared.metrics import ExplorerMetrics
from shared.versions import Manifest, Probe, read_manifest, verify_version, version_path

log = StageLogger("reload")

HEALTH_INTERVAL_S = 1.0
FOLLOW_S = 3.0  # how long after draining another explorer may take to say so
# Largest difference of one logprob, and of their mean, between trainer (float32) and engine.
TOLERANCE = {"float32": (2e-3, 5e-4), "float16": (0.1, 0.02), "bfloat16": (0.6, 0.1)}


class ProbeMismatch(EngineError):
    """The engine answers, with other logprobs than the trainer computed."""


class EngineKeeper:
    """Keeps one engine in service. `run()` ends only by cancellation."""

    def __init__(
        self,
        engine: Engine,
        client: EngineClient,
        pool: EnginePool,
        config: Config,
        ledger: Ledger,
        recorder: Recorder,
        metrics: ExplorerMetrics,
        fleet: Fleet,
        versions: VersionWatch,
        one_at_a_time: asyncio.Lock,
    ) -> None:
        self._engine = engine
        self._client = client
        self._pool = pool
        self._config = config
        self._ledger = ledger
        self._recorder = recorder
        self._metrics = metrics
        self._fleet = fleet
        self._versions = versions
        self._keeping = False
        self._unknown = True  # whether it is paused, and what it serves
        self._one_at_a_time = one_at_a_time
        self._last_health = 0.0
        self._ledger_away = False

    async def run(self) -> None:
        """Look after the engine for ever."""
        while True:
            turn = self._versions.turn
            try:
                await self._look()
                self._ledger_away = False
            except LedgerError as error:
                if not self._ledger_away:  # said once, until it is back
                    log.warning("the ledger is away: no new version can be seen", reason=str(error))
                self._ledger_away = True
            except EngineAway as error:
                await self._away(str(error))
            except EngineError as error:
                log.error("engine refuses", engine=self._engine.name, reason=str(error))
                self._pool.set_state(self._engine, EngineState.CHECKING, str(error))
                await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._rest(turn)

    async def _rest(self, turn: int) -> None:
        """Until there may be something to do."""
        if self._keeping and self._engine.state is EngineState.SERVING:
            await self._versions.turned(turn, until_next(HEALTH_INTERVAL_S))
        else:
            await asyncio.sleep(self._config.explorer.reload.poll_interval_s)

    async def _look(self) -> None:
        engine = self._engine
        heard_at = max(self._last_health, engine.answered_at)  # a chat answered says as much as /health
        if engine.state is not EngineState.SERVING or time.monotonic() - heard_at > HEALTH_INTERVAL_S:
            await self._client.check_health()
            self._last_health = time.monotonic()
        if not await self._fleet.keeps(engine.url):
            await self._follow()
            return
        if not self._keeping:  # the one who kept it may have died in the middle of a reload
            self._keeping = self._unknown = True
        if self._unknown or engine.state is EngineState.AWAY:
            await self._client.resume()  # an explorer that died in a reload may have left it paused
            self._unknown = False
            self._pool.set_state(engine, EngineState.CHECKING, "its version is not proven yet")
            log.info("engine answers", engine=engine.name, url=engine.url)
        target = self._versions.newest()
        if target is None:  # nobody has published yet: it serves what it was started with
            engine.version = 0
            if engine.state is not EngineState.SERVING:
                await self._move(EngineState.SERVING, 0)
                self._pool.set_state(engine, EngineState.SERVING)
        elif engine.state is EngineState.CHECKING:
            await self._prove_or_reload(target)
        elif engine.version != target.version:
            await self._take_up(target)

    async def _move(self, state: EngineState, version: int | None) -> int:
        """Tell the other explorers where the engine stands. Raises EngineError when it is no longer ours to move."""
        generation = await self._fleet.move(self._engine.url, state, version)
        if generation is None:
            self._keeping = False
            raise EngineError("another explorer keeps this engine now")
        return generation

    async def _follow(self) -> None:
        """Another explorer keeps this engine: stand where it says, and tell it once no chat of ours is on the way."""
        engine = self._engine
        self._keeping = False
        said = await self._fleet.look(engine.url)
        if said is None:
            return
        if said.state == EngineState.SERVING and said.version is not None:
            if engine.state is not EngineState.SERVING or engine.version != said.version:
                engine.version = said.version
                folder = self._config.root / version_path(said.version)
                engine.sampling_defaults = await asyncio.to_thread(read_sampling_defaults, folder)
                self._pool.set_state(engine, EngineState.SERVING)
        elif engine.state is EngineState.SERVING:
            self._pool.set_state(engine, EngineState.RELOADING, "another explorer reloads it")
            await self._pool.wait_drained(engine, self._config.explorer.reload.drain_s)
        elif engine.state is EngineState.AWAY:
            self._pool.set_state(engine, EngineState.CHECKING, "another explorer proves it")
        await self._fleet.acknowledge(engine.url, said.generation)

    async def _away(self, reason: str) -> None:
        if self._engine.state is not EngineState.AWAY:
            log.warning("engine is away", engine=self._engine.name, reason=reason)
            if self._keeping:
                await self._fleet.move(self._engine.url, EngineState.AWAY, None)
        self._pool.set_state(self._engine, EngineState.AWAY, reason)

    async def _prove_or_reload(self, target: VersionRow) -> None:
        """An engine that has just answered: does it serve the target already?"""
        try:
            manifest = await asyncio.to_thread(read_manifest, self._folder(target))
            await self._prove(manifest.probe)
        except (ProbeMismatch, VersionError):
            await self._take_up(target)
            return
        await self._in_service(target)

    async def _take_up(self, target: VersionRow) -> None:
        async with self._one_at_a_time:
            before = self._engine.version
            try:
                manifest = await asyncio.to_thread(verify_version, self._folder(target))
            except VersionError as error:
                await self._reject(target, str(error))
                return
            started = time.monotonic()
            self._pool.set_state(self._engine, EngineState.RELOADING, f"taking up version {target.version}")
            try:
                await self._load(target, manifest, await self._move(EngineState.RELOADING, before))
            except EngineAway:
                raise
            except EngineError as error:
                await self._put_back(before, target, str(error))
                return
            await self._in_service(target, took_ms=1000 * (time.monotonic() - started))

    async def _load(self, target: VersionRow, manifest: Manifest, generation: int) -> None:
        drain_s = self._config.explorer.reload.drain_s
        drained = await self._pool.wait_drained(self._engine, drain_s)
        if not await self._fleet.wait_followed(self._engine.url, generation, drain_s + FOLLOW_S):
            log.warning("an explorer did not follow in time", engine=self._engine.name, generation=generation)
        mode = "keep" if drained or not self._engine.seeded_in_flight else "wait"
        started = time.monotonic()
        try:
            await self._client.pause(mode)
            await self._client.reload_weights(self._folder(target).resolve())
            await self._client.reset_prefix_cache()
            self._engine.version = target.version  # what runs on is sampled by it from here
        finally:
            await self._client.resume()
        self._metrics.reload_pause.observe(time.monotonic() - started)
        await self._prove(manifest.probe)

    async def _prove(self, probe: Probe) -> None:
        """Raise ProbeMismatch unless the engine computes the probe's logprobs."""
        configured = self._config.engine.dtype
        per_token, mean = TOLERANCE.get(probe.dtype if configured == "auto" else configured, TOLERANCE["bfloat16"])
        gaps: list[float] = []
        for sequence in probe.sequences:
            scored = await self._client.score(sequence.token_ids)
            gaps += [abs(a - b) for a, b in zip(scored, sequence.logprobs, strict=True)]
        if gaps and (max(gaps) > per_token or sum(gaps) / len(gaps) > mean):
            raise ProbeMismatch(
                f"engine {self._engine.name} computes other logprobs than the trainer: off by {max(gaps):.4g}, "
                f"{sum(gaps) / len(gaps):.4g} on average (allowed: {per_token:g} and {mean:g})"
            )

    async def _in_service(self, target: VersionRow, **fields: float) -> None:
        self._engine.version = target.version
        self._engine.sampling_defaults = await asyncio.to_thread(read_sampling_defaults, self._folder(target))
        await self._recorder.write(lambda connection: transitions.serve_version(connection, target.version))
        await self._move(EngineState.SERVING, target.version)
        self._pool.set_state(self._engine, EngineState.SERVING)
        self._metrics.reloads.labels("served").inc()
        self._metrics.reload_version.labels(self._engine.name).set(target.version)
        log.info("version in service", version=target.version, engine=self._engine.name, **fields)

    async def _put_back(self, before: int | None, target: VersionRow, reason: str) -> None:
        """Loading failed: the version from before goes back in, and only then the new one is rejected."""
        log.error("version not taken up", version=target.version, engine=self._engine.name, reason=reason)
        good = await asyncio.to_thread(self._last_good, before, target.version)
        if good is None:
            raise EngineError(reason)
        try:
            manifest = await asyncio.to_thread(verify_version, self._folder(good))
        except VersionError as error:
            raise EngineError(f"version {good.version} cannot go back in: {error}") from error
        await self._load(good, manifest, await self._move(EngineState.RELOADING, None))
        await self._reject(target, reason)
        await self._in_service(good)

    def _last_good(self, before: int | None, failed: int) -> VersionRow | None:
        """The version this engine served before, or else the newest other one that has ever served."""
        with self._ledger.read() as connection:
            rows = [row for row in list_versions(connection) if row.version != failed and row.state != "REJECTED"]
        served = [row for row in rows if row.version == before or (before is None and row.served_at is not None)]
        return served[-1] if served else None

    async def _reject(self, target: VersionRow, reason: str) -> None:
        log.error("version rejected", version=target.version, reason=reason)
        self._metrics.reloads.labels("rejected").inc()
        await self._recorder.write(lambda connection: transitions.reject_version(connection, target.version, reason))
        await self._versions.look()  # so that it is not the newest any more

    def _folder(self, row: VersionRow) -> Path:
        return self._config.root / row.path


def read_sampling_defaults(folder: Path) -> Sampling:
    """What vLLM applies where a request says nothing: generation_config.json of the version it serves."""
    file = folder / "generation_config.json"
    if not file.exists():
        return Sampling()
    try:
        said = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
    except msgspec.DecodeError as exc:
        raise EngineError(f"{file} cannot be read ({exc}); mend or remove it") from exc
    return Sampling(
        temperature=1.0 if said.temperature is None else said.temperature,
        top_p=1.0 if said.top_p is None else said.top_p,
        top_k=max(0, said.top_k or 0),
        min_p=said.min_p or 0.0,
    )


class _GenerationConfig(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
