"""Batches for tests of algorithms: numbers instead of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from shared.experience import Experience, Sampling, Tokens
from trainer_service.algorithms.seam import Algorithm, Batch, Floats, Memory, Precomputed
from trainer_service.batch import make_batch
from trainer_service.logprobs import Scores
from trainer_service.packing import MicroBatch, pack
from trainer_service.parts import Part, Work
from trainer_service.ranks import Ranks
from trainer_service.shares import bound_shares, keys_of
from trainer_service.trajectories import TokenSequence, Trajectory, trajectories_of

ALONE = Ranks(0, 1, None, 1.0)  # the only rank


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def rows_batch(rows: Iterable[Experience]) -> Batch:
    """The batch that the trainer makes from claimed rows."""
    return make_batch(list(rows))


def assemble(rows: Iterable[Experience]) -> list[TokenSequence]:
    """The sequences of all trajectories of a batch with their rewards, oldest first."""
    sequences = [sequence for trajectory in trajectories_of(rows) for sequence in trajectory.sequences]
    return sorted(sequences, key=lambda sequence: sequence.row_ids[0])


def gather(arrays: Sequence[Floats], micro: MicroBatch) -> torch.Tensor:
    """One [A] array for each trajectory of the batch, concatenated to [K], in the micro-batch's order."""
    return torch.from_numpy(np.concatenate([arrays[index] for index in micro.members]))


def sequence(
    rewards: Sequence[float], behaviour: Sequence[float] | None = None, ends: Sequence[int] = ()
) -> TokenSequence:
    """A prompt of two tokens and a reply; each token of the reply is an action with a reward."""
    length = len(rewards)
    tokens = Tokens(
        np.arange(2, dtype=np.int32), np.arange(2, 2 + length, dtype=np.int32), -np.ones(length, np.float32)
    )
    row = Experience(1, "m1", 0, None, None, None, "m1", 0, 0.0, 0.0, tokens, Sampling())
    return replace(
        trajectories_of([row])[0].sequences[0],
        behaviour=array(*(behaviour or [-1.0] * length)),
        rewards=array(*rewards),
        ends=list(ends) or [length - 1],
    )


def batch_of(*sequences: TokenSequence) -> Batch:
    """Each sequence as a trajectory of one turn, rated by its last reward."""
    return Batch.of(Trajectory(None, [one], [0], [float(one.rewards[-1])], None) for one in sequences)


def rewarded_batch(said: Iterable[tuple[str | None, float | None]]) -> Batch:
    """Trajectories of one turn of two tokens. said: the key that rated each, and the reward; None: no rating."""
    return Batch.of(
        Trajectory(None, [sequence([0.0, reward or 0.0])], [0], [reward], None, key=key) for key, reward in said
    )


def precomputed(batch: Batch, **arrays: Sequence[np.ndarray]) -> Precomputed:
    """The models' precomputed values; by default log π = −1 and V = 0."""
    ones = [np.full(len(one.actions), -1.0, np.float32) for one in batch.sequences]
    said = {"proximal": ones, "processed": ones, "reference": ones, "values": [0 * one for one in ones]}
    return Precomputed(**{**said, **{name: list(given) for name, given in arrays.items()}})


def loss_of(
    algorithm: Algorithm,
    batch: Batch,
    seen: Precomputed,
    logprobs: Sequence[torch.Tensor],
    *,
    entropies: Sequence[torch.Tensor] | None = None,
    values: Sequence[torch.Tensor] | None = None,
    memory: Memory | None = None,
    max_share: float = 1.0,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of one minibatch in one micro-batch, and its figures. Lists have one tensor [A] for each sequence.

    max_share: the largest share of the gradient for one key.
    """
    units = algorithm.units(batch)
    constants, figures = algorithm.constants(batch, units, seen, {} if memory is None else memory)
    constants, shown = bound_shares(constants, keys_of(batch, units), max_share)
    figures |= shown
    work = Work(Part(algorithm), units, constants, figures)
    places = sorted({place for group in work.groups for place in group})
    (micro,) = pack(batch.sequences, places, 1_000_000)
    zeros = [torch.zeros(len(one.actions)) for one in batch.sequences]
    scores: Scores = {
        "logprobs": torch.cat([logprobs[place] for place in micro.members]),
        "entropy": torch.cat([(entropies or zeros)[place] for place in micro.members]),
        "values": torch.cat([(values or zeros)[place] for place in micro.members]),
    }
    loss = work.loss(micro, scores, work.size_of(places))
    assert isinstance(loss, torch.Tensor)
    return loss, work.figures(ALONE)
