"""The tolerance for an engine's differences from the trainer: configured, or from its type and its noise on version 0.

An engine in 8 bits, or on many devices, rounds more than the table of types allows. Its differences on the version that
it was started with, before any load, are its own noise.
"""

from __future__ import annotations

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine
from explorer_service.reload.judge import TargetVersion
from explorer_service.reload.probe import TABLE, Bounds, Gap, measure, require
from explorer_service.reload.reloading import Reloading
from shared.config import Tolerance
from shared.ledger import queries, transitions
from shared.log import StageLogger

log = StageLogger("reload")

_NOISE_FACTOR = 3.0
_NARROW_TRAINER = Gap(0.05, 0.01)  # by the rounding of a trainer in 16 bits
_IMPLAUSIBLE = 10.0  # multiple of the table's values that rounding does not explain: the weights are wrong


class EngineTolerance:
    """The tolerance for one engine."""

    def __init__(self, engine: Engine, reloading: Reloading) -> None:
        self._configured = reloading.config.explorer.reload.tolerance
        self._dtype = reloading.config.engine.dtype
        self._reloading = reloading
        self._key = reloading.leases.key(engine.url)
        self._noise: dict[str, Gap] = {}  # by dtype

    async def bounds(self, target: TargetVersion) -> Bounds:
        """Return the bounds for the proof of a version. Raises LedgerError."""
        dtype = self._dtype_of(target)
        noise = await self._find_noise(dtype)
        decides = target.manifest.probe.rounding_of(dtype)
        table = TABLE.get(decides, TABLE["bfloat16"])
        if noise is None:
            allowed = self._configured or table
            return Bounds(allowed, Gap(allowed.per_token, allowed.mean))
        largest, mean = _NOISE_FACTOR * noise.largest, _NOISE_FACTOR * noise.mean
        shown = Tolerance(per_token=max(table.per_token, largest), mean=max(table.mean, mean))
        least = Gap(0.0, 0.0) if decides == dtype else _NARROW_TRAINER
        return Bounds(self._configured or shown, Gap(max(largest / 2, least.largest), max(mean / 2, least.mean)))

    async def prove_started(self, admin: EngineAdmin, target: TargetVersion) -> None:
        """Prove an engine that reports to hold the target already. On version 0, also store its noise once.

        Raises ProbeMismatch, EngineError if it does not answer, LedgerError.
        """
        bounds = await self.bounds(target)
        gap, allowed = await measure(admin, target.manifest.probe, bounds.rounding), bounds.allowed
        if target.version == 0 and self._configured is None and self._dtype_of(target) not in self._noise:
            explained = gap.is_within(allowed)
            allowed = Tolerance(per_token=_IMPLAUSIBLE * allowed.per_token, mean=_IMPLAUSIBLE * allowed.mean)
            if gap.is_within(allowed):
                await self._store(self._dtype_of(target), gap, explained=explained)
        require(admin, gap, allowed)

    async def _find_noise(self, dtype: str) -> Gap | None:
        if dtype not in self._noise:
            found = await self._reloading.fetch(lambda c: queries.read_calibration(c, self._key, dtype))
            if found is not None:
                self._noise[dtype] = Gap(*found)
        return self._noise.get(dtype)

    async def _store(self, dtype: str, gap: Gap, *, explained: bool) -> None:
        figures = (self._key, dtype, gap.largest, gap.mean)
        await self._reloading.writer.write(lambda c: transitions.calibrate_engine(c, *figures))
        self._noise[dtype] = gap
        log.info("engine calibrated", engine=self._key, dtype=dtype, largest=gap.largest, mean=gap.mean)
        if not explained:
            reason = (
                f"it differs from the trainer by {gap.mean:.2g} nats on average, more than rounding of {dtype} explains"
            )
            log.warning("engine computes other logprobs", engine=self._key, reason=reason)

    def _dtype_of(self, target: TargetVersion) -> str:
        return target.manifest.probe.dtype if self._dtype == "auto" else self._dtype
