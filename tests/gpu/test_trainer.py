"""The trainer on an accelerator: bf16 under each ZeRO stage, folded rows by its kernel, and versions that verify."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer import build_update
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.versions import read_manifest, verify_version, version_path
from tests.gpu import ON_GPU
from tests.support.experiences import make_experiences, record_ready, trainer_config
from tests.support.processes import wait_for
from tests.support.trained_roots import LAST, ROWS, newest, open_ledger, prepare, start
from tests.unit.test_packing import alone, branches
from trainer_service.base_version import ensure_base_version
from trainer_service.learner import Learner
from trainer_service.models import load_causal_lm, named_weights, score_actions
from trainer_service.models import prepare as fold
from trainer_service.packing import Rows, pack
from trainer_service.publish import compute_probe, probe_sequences
from trainer_service.ranks import join_ranks
from trainer_service.resume import StateStore

pytestmark = ON_GPU


@contextlib.contextmanager
def learner_of(root: Path, model: Path, stage: int):
    deepspeed = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    config = trainer_config(root, model, deepspeed=deepspeed)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
    folder, ranks = config.root / version_path(0), join_ranks(60)
    with contextlib.closing(StateStore(config.root, "trainer")) as states:
        yield Learner(lambda: build_update(config, folder, ranks), ranks, states)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_computes_in_bf16_beside_float32_masters_with_a_fused_optimizer(stage, tmp_path, base):
    rows = make_experiences(base, 8)
    with learner_of(tmp_path, base, stage) as learner:
        stats = learner.train(rows, step=0, version=0, ahead=0)
        parameters = learner.backend.trained_parameters()
        assert {p.dtype for p in parameters.values()} == {torch.bfloat16}
        assert {learner.backend.whole(p).dtype for p in parameters.values()} == {torch.float32}
        assert stats["logprob_gap_mean"] < 0.05
        manifest = learner.write_version(tmp_path, version=1, parent=0, step=1)
        saved = learner.save(1)
        expected = {name: learner.backend.whole(p).cpu() for name, p in named_weights(learner.policy).items()}
        learner.restore()
        assert learner.backend.state.moments() == ["exp_avg", "exp_avg_sq"] and saved.path
    written = named_weights(load_causal_lm(tmp_path / version_path(1)))
    assert all(torch.equal(written[name], tensor.bfloat16().float()) for name, tensor in expected.items())
    assert read_manifest(tmp_path / version_path(1)) == manifest


def test_the_probe_of_a_version_is_what_its_file_gives_in_float32(tmp_path, base):
    with learner_of(tmp_path, base, 3) as learner:
        learner.train(make_experiences(base, 8), step=0, version=0, ahead=0)
        manifest = learner.write_version(tmp_path, version=1, parent=0, step=1)
    again = compute_probe(load_causal_lm(tmp_path / version_path(1)), probe_sequences(tmp_path))
    said = torch.tensor([sequence.logprobs for sequence in manifest.probe.sequences])
    found = torch.tensor([sequence.logprobs for sequence in again])
    assert float((said - found).abs().mean()) < 0.1, "as near as an engine must come in bf16"


@pytest.mark.parametrize("rows", [Rows.FOLDED, Rows.PACKED])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])  # SDPA, the kernel
def test_logprobs_and_gradients_of_a_row_are_those_of_each_sequence_alone(rows, kind, tolerance, base):
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to("cuda")
    ours = copy.deepcopy(theirs).to(kind)
    fold(ours)
    batch = branches(theirs.config.vocab_size)
    expected = [alone(theirs, one) for one in batch]
    torch.cat(expected).sum().backward()
    (micro,) = pack(batch, range(len(batch)), 1000, rows)
    logprobs_K = score_actions(ours, micro.to(ours.device))["logprobs"]
    logprobs_K.sum().backward()
    wanted_K = torch.cat([expected[index] for index in micro.members])
    assert float((logprobs_K - wanted_K).detach().abs().mean()) < tolerance
    found = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        gap = (found[name].grad.float() - parameter.grad).norm() / parameter.grad.norm()
        assert float(gap) < tolerance, name


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora": {"rank": 8}},
        {"deepspeed": {"zero_optimization": {"stage": 3}}},
        {"deepspeed": {"zero_optimization": OFFLOADED}, "gradient_checkpointing": True},
    ],
)
def test_a_trainer_takes_ready_rows_to_versions_that_verify_and_goes_on_after_a_stop(settings, tmp_path, base):
    rows = make_experiences(base, 2 * ROWS)
    prepare(tmp_path, base, rows[:ROWS], **settings)
    for last, more in ((LAST, []), (2 * LAST, rows[ROWS:])):
        with contextlib.closing(open_ledger(tmp_path)) as ledger:
            record_ready(ledger, more)
        with start(tmp_path) as trainer:
            wait_for(lambda last=last: newest(tmp_path) == last, "the last version", 240)
            assert trainer.stop() == 0, trainer.output()
    with contextlib.closing(open_ledger(tmp_path)) as ledger, ledger.read() as connection:
        there = [row for row in list_versions(connection) if row.has_files]
    assert len(there) > 5
    for row in there:
        verify_version(tmp_path / row.path, row.manifest_sha256)
    log = (tmp_path / "trainer.log").read_text()
    for unexpected in ("Traceback", "one by one", "keeps its own", "destroy_process_group"):
        assert unexpected not in log, log
