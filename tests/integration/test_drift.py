"""What is measured after an update equals plain forward passes over the sample, before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.experience import Experience
from shared.reward import Signal
from tests.integration.test_update import build
from tests.support.batches import batch_of, rows_batch, sequence
from tests.support.experiences import make_experiences
from trainer_service import drift
from trainer_service.algorithms.seam import Batch
from trainer_service.logprobs import Scores
from trainer_service.packer import Packer
from trainer_service.packing import MicroBatch, Rows
from trainer_service.precompute import Precompute
from trainer_service.ranks import Ranks


def log_policy(policy, batch: Batch) -> list[torch.Tensor]:
    """Of each sequence the whole distributions that its actions were drawn from, in float64: [A, V]."""
    policy.eval()
    with torch.no_grad():
        return [
            policy(input_ids=torch.from_numpy(s.token_ids)[None]).logits[0, s.actions - 1].double().log_softmax(-1)
            for s in batch.sequences
        ]


def of_actions(logprobs: list[torch.Tensor], batch: Batch) -> np.ndarray:
    taken = [rows[range(len(rows)), s.token_actions] for rows, s in zip(logprobs, batch.sequences, strict=True)]
    return torch.cat(taken).numpy()


@pytest.mark.parametrize("algorithm", ["ppo", "sft"])
def test_the_figures_after_an_update_are_those_of_plain_forward_passes(algorithm, tmp_path, model):
    update, policy = build(tmp_path, model, algorithm=algorithm)
    batch = rows_batch(make_experiences(model, 8))
    before = log_policy(policy, batch)
    stats = update.update(batch, step=0, version=0)
    after = log_policy(policy, batch)
    moved = of_actions(after, batch) - of_actions(before, batch)
    entropies = torch.cat([-(rows.exp() * rows).sum(-1) for rows in after])
    larger, smaller = np.exp(np.maximum(moved, 0)), np.exp(np.minimum(moved, 0))  # over the probability before
    assert stats["change_of_update"] == pytest.approx(float((1 - (smaller / larger) ** 2).mean()), rel=1e-3)
    assert stats["kl_of_update"] == pytest.approx(float((moved**2 / 2).mean()), rel=1e-3)
    assert stats["entropy_after"] == pytest.approx(float(entropies.mean()), rel=1e-4)
    if algorithm == "ppo":  # the first update began with the base
        assert stats["kl_to_base"] == pytest.approx(stats["kl_of_update"], rel=1e-6)
        assert stats["grad_norm_policy"] > 0 and stats["grad_norm_critic"] > 0
    else:
        assert "kl_to_base" not in stats and "grad_norm_critic" not in stats


def merged_conversations(model, *about: dict[str, Any]) -> list[Experience]:
    """Conversations of two turns that become one sequence. about: of each second turn."""
    made = make_experiences(model, 2 * len(about))
    rows = []
    for first, second, more in zip(made[::2], made[1::2], about, strict=True):
        asked = np.concatenate([first.tokens.prompt_ids, first.tokens.reply_ids, second.tokens.prompt_ids])
        tokens = replace(second.tokens, prompt_ids=asked.astype(np.int32))
        of_one = {"conversation_id": first.conversation_id, "parent_id": first.msg_id}
        rows += [first, replace(second, tokens=tokens, **of_one, **more)]
    return rows


RATED = [{"signals": (Signal("rating", text=text),)} for text in ("up", "down")]
CORRECTED = [{"correction": np.array([40, 41], np.int32), "correction_key": "k"}] * 2


@pytest.mark.parametrize(
    ("algorithm", "said", "scored"),
    [("kto", RATED, [2, 3]), ("dpo", CORRECTED, [3, 5])],  # 2 and 4 are the corrections
)
def test_the_distance_to_the_base_is_measured_on_single_replies_of_merged_turns(
    algorithm, said, scored, tmp_path, model
):
    update, policy = build(tmp_path, model, algorithm=algorithm)
    batch = rows_batch(merged_conversations(model, *said))
    assert [len(places) for places in batch.members] == [1, 1], "merged"
    replies = Batch([batch.sequences[place] for place in scored], [], [])
    assert [one.row_ids for one in replies.sequences] == [[2], [4]]
    before = log_policy(policy, replies)
    stats = update.update(batch, step=0, version=0)
    moved = of_actions(log_policy(policy, replies), replies) - of_actions(before, replies)
    assert stats["kl_to_base"] == pytest.approx(float((moved**2 / 2).mean()), rel=1e-3)


class OneOfTwo(Ranks):
    """A rank whose partner makes as many passes, and measures what it itself does."""

    def largest(self, value: int) -> int:
        return max(2, value)

    def gather_json(self, value: Any) -> list[Any]:
        self.measured = value
        return [value, value]


class EvenOdds(torch.nn.Module):
    """Every token has a probability of ½ and an entropy of 1."""

    module = property(lambda self: self)

    def forward(self, micro: MicroBatch, **_: Any) -> Scores:
        return {"logprobs": torch.full((len(micro.actions_K),), -0.7), "entropy": torch.ones(len(micro.actions_K))}


def test_a_sequence_that_is_computed_again_to_even_out_the_passes_of_the_ranks_counts_once():
    """Of three sequences that take a pass each, one rank has the longest, and the other one two."""
    batch = batch_of(*(sequence([1.0] * length) for length in (12, 6, 5)))
    nothing = {name: [np.empty(0, np.float32)] * 3 for name in ("proximal", "reference")}
    counts = []
    for rank in range(2):
        ranks = OneOfTwo(rank, 2, None, 1.0)
        precompute = Precompute(EvenOdds(), None, Packer(ranks, torch.device("cpu"), 16, Rows.SINGLE))
        drift.Drift(precompute, ranks, batch, nothing).measure()
        counts.append(ranks.measured["entropy_after"][1])
    assert counts == [12, 6 + 5]


def test_each_rank_compares_the_sequences_that_it_scored_before_if_the_base_scored_others():
    """With the rated sequence, the longest, the ranks share the others differently than without it."""
    batch = batch_of(*(sequence([1.0] * length) for length in (12, 6, 5)))
    batch.ratings[batch.add(sequence([1.0] * 20))] = True
    nothing, reference = [np.empty(0, np.float32)] * 4, [np.empty(0, np.float32)] * 3 + [np.zeros(20, np.float32)]
    totals = {"change_of_update": 0, "kl_to_base": 0}
    for rank in range(2):
        ranks = OneOfTwo(rank, 2, None, 1.0)
        precompute = Precompute(EvenOdds(), None, Packer(ranks, torch.device("cpu"), 16, Rows.SINGLE))
        drift.Drift(precompute, ranks, batch, {"proximal": nothing, "reference": reference}).measure()
        totals = {name: count + ranks.measured[name][1] for name, count in totals.items()}
    assert totals == {"change_of_update": 12 + 6 + 5, "kl_to_base": 20}


def test_the_distance_to_the_base_is_measured_on_the_sample_itself_if_the_base_scored_all_of_it():
    batch = replace(batch_of(*(sequence([1.0] * length) for length in (4, 3))), written=[2])
    written = batch.add(sequence([1.0] * 2))
    batch.ratings.update({batch.add(sequence([1.0] * 5)): True, written: True})
    batch.add(sequence([1.0] * 6))  # kto's own
    scored, unscored = [np.zeros(4, np.float32)], [np.empty(0, np.float32)]
    assert drift.choose_for_base(batch, scored * 5, [0, 1]) == [0, 1]
    assert drift.choose_for_base(batch, scored + unscored + scored * 3, [0, 1]) == [0, 3], "of what was sampled"
    assert drift.choose_for_base(batch, unscored * 2 + scored + unscored * 2, [0, 1]) == [written]
    assert drift.choose_for_base(batch, unscored * 5, [0, 1]) == []


def test_the_sample_is_bounded_and_prefers_what_was_sampled(model, monkeypatch):
    batch = rows_batch(make_experiences(model, 8))
    lengths = [len(sequence.token_ids) for sequence in batch.sequences]
    monkeypatch.setattr(drift, "SAMPLE_TOKENS", sum(lengths[:3]))
    assert drift.choose(batch) == [0, 1, 2]
    monkeypatch.setattr(drift, "SAMPLE_TOKENS", 1)
    assert drift.choose(batch) == [0], "a longer sequence goes alone"
    written = Batch(batch.sequences, [], [], written=range(2, 8))
    assert drift.choose(written) == [2]
    assert drift.choose(Batch([], [], [])) == []
