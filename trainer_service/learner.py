"""The models in memory: train them on a batch, save them, publish them, and restore the last saved state.

Owns the models and their optimizer, and rebuilds them after a failed update. Does not access the ledger. With several
ranks, each rank has a learner; a call on rank 0's learner makes the other ranks do the same at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import SFTConfig
from shared.errors import DiskFull, StartupError
from shared.experience import JSON, Experience, Sampling, Tokens
from shared.probe import ProbeSequence
from shared.stop_request import StopRequest
from shared.versions import Manifest
from trainer_service.algorithms.sft import SFT
from trainer_service.backends.deepspeed import DeepSpeedBackend
from trainer_service.batch import make_batch
from trainer_service.broadcast import pack_rows, unpack_rows
from trainer_service.errors import RankLost, UpdateError
from trainer_service.kinds import kind_of
from trainer_service.ranks import Ranks, together
from trainer_service.resume import SavedState, StateStore
from trainer_service.state_files import read_state, write_state
from trainer_service.update import Stats, Updater

# Errors that an update raises. PyTorch's are RuntimeErrors, including out of memory.
_FAILURES = (UpdateError, RuntimeError, MemoryError, IndexError, ValueError)
_REASON_LENGTH = 400  # characters
Preparation = Callable[[list[Experience]], list[Experience]]
Build = Callable[[], tuple[Updater, Any]]


def harmless_row() -> Experience:
    """Return a row that no update can fail on: three tokens that every model has, with the reward 1."""
    tokens = Tokens(np.zeros(1, np.int32), np.array([1, 0], np.int32), np.full(2, -1.0, np.float32))
    return Experience(0, "harmless", 0, None, None, None, "harmless", 0, 1.0, 0.0, tokens, Sampling())


class Learner:
    """The models of one rank."""

    def __init__(
        self,
        build: Build,
        ranks: Ranks,
        states: StateStore | None = None,
        preparations: Sequence[Preparation] = (),
        build_for_state: Build | None = None,
    ) -> None:
        """build: builds models and optimizer; returns the updater and the policy inside it. states: on rank 0 only.

        preparations: steps applied to claimed rows, in this order, before they are trained on; on rank 0 only.
        build_for_state: like build, for a state that contains all weights: the version that training started from may
        be deleted by then. None: build.
        """
        self._build, self._build_for_state = build, build_for_state or build
        self._preparations = preparations
        self._ranks = ranks
        self._states = states
        self._update, self.policy = build()
        self._parent: list[ProbeSequence] = []  # logprobs of the last version, to compare with the next version's probe
        self._parent_of: int | None = None  # the version that computed them; None: none are stored
        self.saved: SavedState | None = None  # the last saved state, which `restore` loads

    @property
    def backend(self) -> DeepSpeedBackend:
        return self._update.backend

    @property
    def memory(self) -> JSON:
        """What the algorithms remember, by name."""
        return self._update.memory

    @property
    def costs(self) -> Stats:
        """Costs of the last update; see Updater.costs."""
        return self._update.costs

    @property
    def trained_bytes(self) -> int:
        """Size in bytes of all trained weights in float32."""
        return 4 * sum(math.prod(shape) for shape in self.backend.shapes().values())

    @property
    def state_bytes(self) -> int:
        """Maximum size in bytes of a state's tensors: the trained weights in float32, two moments, an average."""
        return (3 if self._update.past is None else 4) * self.trained_bytes

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the policy."""
        return int(self.policy.get_input_embeddings().num_embeddings)

    def prepare(self, rows: list[Experience]) -> list[Experience]:
        """On rank 0: add to the rows what must be computed or requested before training. Raises Stopped."""
        for preparation in self._preparations:
            rows = preparation(rows)
        return rows

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of the policy; None: its config has no limit."""
        return getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)

    def train(self, rows: list[Experience], *, step: int, version: int, ahead: int = 0) -> Stats:
        """Run one update; see Updater.update. Raises UpdateError on any failure; `restore` must follow.

        Raises RankLost if only this rank failed: the others cannot leave the middle of an update.
        """
        self._ranks.order("train", pack_rows(rows), step, version, ahead)
        try:
            with together():
                if self._parent_of != version:
                    self._parent, self._parent_of = kind_of(self.policy).remember(), version
                return self._update.update(make_batch(rows), step=step, version=version, ahead=ahead)
        except _FAILURES as exc:
            agreed = isinstance(exc, UpdateError)
            name = "" if agreed else f"{type(exc).__name__}: "
            reason = f"{name}{str(exc).strip()}".split("\n")[0][:_REASON_LENGTH]
        if self._ranks.size > 1 and not agreed:
            raise RankLost(f"rank {self._ranks.rank} failed in an update ({reason}); all ranks exit, to be restarted")
        raise UpdateError(reason)  # not from exc: its traceback holds the tensors of the failed update

    def weights(self) -> Callable[[str], Any]:
        """Return a function that reads a weight by its name in a version: unsharded and in the optimizer's float32."""
        return kind_of(self.policy).reader(self.backend.whole)

    def write_version(self, root: Path, **about: Any) -> Manifest:
        """Write the policy to a version's folder; `about`: see `write_full_version`. Raises DiskFull and VersionError.

        After DiskFull it may be called again for the same version, until `train` is called with that version.
        """
        kind = kind_of(self.policy)
        asked = kind.ask(root)
        self._ranks.order("join_version", asked)
        probe = kind.probe(asked, self._parent)
        with self._lose_ranks_if_full():
            manifest = kind.write(root, self.weights(), probe, **about)
        self._notify_past()
        return manifest

    def join_version(self, asked: JSON) -> None:
        """On the other ranks: take part in `write_version`."""
        kind_of(self.policy).probe(asked, self._parent)
        read = self.weights()
        for name in asked["names"]:
            read(name)
        self._notify_past()

    def _notify_past(self) -> None:
        if self._update.past is not None:
            self._update.past.written()

    def save(self, version: int) -> SavedState:
        """Save the state of a version, which `restore` then loads. Raises DiskFull and SaveError."""
        assert self._states is not None
        self._ranks.order("join_save")
        with self._lose_ranks_if_full():
            self.saved = self._states.save(self.backend, self._update.memory, version, self._update.past)
        return self.saved

    @contextlib.contextmanager
    def _lose_ranks_if_full(self) -> Iterator[None]:
        """With several ranks, raise RankLost in place of DiskFull: the others wait in the middle of the write."""
        try:
            yield
        except DiskFull as exc:
            if self._ranks.size == 1:
                raise
            raise RankLost(f"{exc}; all ranks exit, to be restarted") from exc

    def join_save(self) -> None:
        """On the other ranks: take part in `save`."""
        write_state(self.backend, None)

    def load(self, saved: SavedState) -> None:
        """Load a saved state. Raises StartupError."""
        assert self._states is not None
        self._states.check(saved)  # before the others wait in a collective: it reads the whole state
        self._ranks.order("join_load")
        self._update.memory = self._ranks.broadcast_json(self._states.load(self.backend, saved, self._update.past))
        self.saved = saved
        self._forget_parent()

    def join_load(self) -> None:
        """On the other ranks: take part in `load`."""
        read_state(self.backend, None)
        if self._update.past is not None:
            self._update.past.load(None)
        self._update.memory = self._ranks.broadcast_json(None)
        self._forget_parent()

    def _forget_parent(self) -> None:
        self._parent, self._parent_of = [], None

    def restore(self, loads_state: bool = False) -> None:
        """Rebuild the models and load the last saved state, because a failed update leaves partial results.

        loads_state: on the other ranks: whether a saved state exists.
        """
        loads_state |= self.saved is not None
        self._ranks.order("restore", loads_state)
        self.close()
        self._update, self.policy = (self._build_for_state if loads_state else self._build)()
        self._forget_parent()
        if self.saved is not None:
            self.load(self.saved)

    def close(self) -> None:
        """Release the models' memory. The learner cannot be used afterwards."""
        self._update.close()
        del self._update, self.policy
        gc.collect()

    def require_harmless_update(self, reason: str) -> None:
        """Before rows are blamed for `reason`, raise StartupError if an update with a harmless row fails too."""
        try:
            self.try_harmless_update()
        except _FAILURES as exc:
            raise StartupError(
                f"updates fail whatever the rows are ({reason}); lower trainer.learning_rate, or see that the machine "
                "has enough memory; no row is lost"
            ) from exc
        self.restore()

    def try_harmless_update(self) -> None:
        """Run an update with a harmless row, and SFT steps on it, which do not depend on the configured algorithms."""
        self._ranks.order("try_harmless_update")
        batch = make_batch([harmless_row()])
        with together():
            self._update.update(batch, step=0, version=0)
            self._update.try_steps(replace(batch, written=range(len(batch.sequences))), SFT(SFTConfig()))

    def follow(self, stop: StopRequest) -> None:
        """On the other ranks: follow rank 0's orders until it ends. Raises RankLost."""
        for name, arguments in self._ranks.orders(stop):
            with contextlib.suppress(UpdateError):  # rank 0 raises it too, and orders the next call
                if name == "train":
                    rows, step, version, ahead = arguments
                    self.train(unpack_rows(rows), step=step, version=version, ahead=ahead)
                else:
                    _JOINED[name](self, *arguments)


_JOINED: dict[str, Callable[..., None]] = {
    method.__name__: method
    for method in (
        Learner.join_version, Learner.join_save, Learner.join_load, Learner.restore, Learner.try_harmless_update,
    )
}  # fmt: skip
