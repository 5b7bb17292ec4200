"""What is published is what was trained: every element of the file is the optimizer's own, rounded."""

from __future__ import annotations

import contextlib
import shutil
import weakref
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from explorer_service.reload.probe import TABLE, Gap
from services.trainer import build_update
from shared.errors import VersionError
from shared.probe import Probe
from shared.tensors import read_tensors
from shared.versions import read_manifest, verify_version, version_path
from tests.support import architectures
from tests.support.experiences import make_experiences, trainer_config
from tests.support.forms import FULL
from tests.support.models import make_tiny_model, publish_base
from trainer_service import attention
from trainer_service.learner import Learner
from trainer_service.models import load_causal_lm
from trainer_service.publish import compute_probe, sample_sequences, write_base_version, write_full_version
from trainer_service.ranks import join_ranks
from trainer_service.resume import StateStore

ALL = list(product([0, 1, 2, 3], ["float32", "bfloat16"], ["float32", "bf16"], [True, False]))
# a short form: each stage, and each dtype with each precision
SOME = [ALL[number] for number in (0, 14, 21, 27, 28)]
COMBINATIONS = ALL if FULL else SOME
EVERYTHING_PARTITIONED = {"stage3_param_persistence_threshold": 0}


@contextlib.contextmanager
def learner_of(root: Path, model: Path, stage: int, **trainer):
    """A trainer's learner, with version 0 published."""
    zero = {"stage": stage, **EVERYTHING_PARTITIONED}
    config = trainer_config(root, model, deepspeed={"zero_optimization": zero}, **trainer)
    base = publish_base(config)
    with contextlib.closing(StateStore(config.root, "trainer")) as states:
        ranks = join_ranks(60)
        yield Learner(lambda: build_update(config, base, ranks), ranks, states)


def publish(root: Path, learner: Learner, version: int) -> Path:
    learner.write_version(root, version=version, parent=version - 1, step=version)
    return root / version_path(version)


@pytest.mark.parametrize(("stage", "dtype", "precision", "tied"), COMBINATIONS)
def test_every_element_of_a_version_is_the_one_that_was_trained(stage, dtype, precision, tied, tmp_path):
    model = make_tiny_model(tmp_path / "base", tied=tied, dtype=dtype)
    rows = make_experiences(model, 8)
    with learner_of(tmp_path, model, stage, precision=precision) as learner:
        folder = tmp_path / version_path(0)
        for version in (1, 2):
            before = load_file(folder / "model.safetensors")
            learner.train(rows, step=version - 1, version=version - 1, ahead=0)
            folder = publish(tmp_path, learner, version)
            read = learner.weights()
            written = load_file(folder / "model.safetensors")
            assert read_tensors(folder) == read_tensors(tmp_path / version_path(0))
            for name, tensor in written.items():
                assert torch.equal(tensor, read(name).to(getattr(torch, dtype))), name
            assert not torch.equal(written["lm_head.weight"], before["lm_head.weight"])
            tied_in_file = torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
            assert tied_in_file == tied, "a tied model trains tied and is written untied"


@pytest.mark.parametrize("stage", [0, 2, 3] if FULL else [0, 3])
def test_training_in_bf16_begins_with_every_bit_of_a_float32_folder(stage, tmp_path, capfd):
    model = make_tiny_model(tmp_path / "base")
    with learner_of(tmp_path, model, stage, precision="bf16") as learner:
        expected, read = load_file(tmp_path / version_path(0) / "model.safetensors"), learner.weights()
        assert not torch.equal(expected["lm_head.weight"], expected["lm_head.weight"].bfloat16().float())
        for name, tensor in expected.items():
            assert torch.equal(read(name), tensor), name
        working = dict(learner.policy.named_parameters(remove_duplicate=False))
        if stage < 3:
            assert torch.equal(working["lm_head.weight"], expected["lm_head.weight"].bfloat16())
        learner.train(make_experiences(model, 8), step=0, version=0, ahead=0)
        probe = read_manifest(publish(tmp_path, learner, 1)).probe
        ids = [sequence.token_ids for sequence in probe.sequences]
        said, found = (
            torch.tensor([sequence.logprobs for sequence in one])
            for one in (probe.sequences, compute_probe(load_causal_lm(tmp_path / version_path(1)), ids))
        )
        assert float((said - found).abs().mean()) > TABLE["float32"].mean
        allowed = TABLE[probe.rounding_of("float32")]
        assert Gap(float((said - found).abs().max()), float((said - found).abs().mean())).is_within(allowed)
    assert "MA " not in capfd.readouterr().out, "DeepSpeed's figures of memory are not the trainer's log"


@pytest.mark.parametrize(("name", "is_untied"), [("gemma2", False), ("lfm2", True), ("cohere", True)])
def test_version_0_is_untied_unless_engines_have_no_output_embedding_for_the_model(name, is_untied, tmp_path):
    own = architectures.make(name, tie_word_embeddings=True)
    own.save_pretrained(tmp_path / "base")
    write_base_version(tmp_path, tmp_path / "base")
    folder = tmp_path / version_path(0)
    assert ("lm_head.weight" in read_tensors(folder)) is is_untied
    again = load_causal_lm(folder)
    assert again.config.get_text_config().tie_word_embeddings is not is_untied
    assert torch.equal(again.get_output_embeddings().weight, own.get_input_embeddings().weight)


def test_version_0_is_computed_by_the_models_own_attention(tmp_path, monkeypatch):
    """Only at its start, the trainer finds out whether its own attention supports the model."""

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("a position bias")

    monkeypatch.setattr(attention, "attend", refuse)
    own = architectures.make("gpt_oss", attn_implementation="eager")
    own.save_pretrained(tmp_path / "base")
    probe = write_base_version(tmp_path, tmp_path / "base").probe.sequences
    expected = compute_probe(own, [sequence.token_ids for sequence in probe])
    said, theirs = (torch.tensor([sequence.logprobs for sequence in one]) for one in (probe, expected))
    torch.testing.assert_close(said, theirs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module", params=[0, 1, 2, 3] if FULL else [0, 3])
def published(request, tmp_path_factory) -> Path:
    """The root of versions 1 to 3, trained under a ZeRO stage; the second of the updates failed and is made again."""
    root = tmp_path_factory.mktemp("published")
    model = make_tiny_model(root / "base")
    rows = make_experiences(model, 8)
    with learner_of(root, model, request.param) as learner:
        for version in (1, 2, 3):
            learner.train(rows, step=version - 1, version=version - 1, ahead=0)
            if version == 2:
                learner.restore()
                learner.train(rows, step=version - 1, version=version - 1, ahead=0)
            publish(root, learner, version)
            learner.save(version)
    return root


def test_the_probe_is_of_the_weights_in_the_folder(published):
    base = read_manifest(published / version_path(0)).probe.sequences
    for version in (1, 2, 3):
        folder = published / version_path(version)
        assert verify_version(folder).version == version
        probe = read_manifest(folder).probe.sequences
        ids = [sequence.token_ids for sequence in probe]
        assert ids == [sequence.token_ids for sequence in base]
        said = [sequence.logprobs for sequence in probe]
        found = [sequence.logprobs for sequence in compute_probe(load_causal_lm(folder), ids)]
        assert torch.allclose(torch.tensor(said), torch.tensor(found), atol=1e-5)


def test_the_probe_holds_the_tokens_on_which_a_version_and_its_parent_differ(published):
    for version in (1, 2, 3):
        own, parent = (load_causal_lm(published / version_path(number)) for number in (version, version - 1))
        contrasts = read_manifest(published / version_path(version)).probe.contrasts
        assert 0 < len(contrasts) <= 4
        for one in contrasts:
            assert abs(one.logprob - one.parent_logprob) > 1e-3
            (ours,), (theirs,) = (compute_probe(by, [one.token_ids]) for by in (own, parent))
            assert ours.logprobs[-1] == pytest.approx(one.logprob, abs=1e-5)
            assert theirs.logprobs[-1] == pytest.approx(one.parent_logprob, abs=1e-5)


def test_a_version_that_is_written_again_is_told_apart_from_its_parent_as_the_first_time(tmp_path):
    """The disk filled up when its state was saved: its folder was deleted, and both are made anew."""
    model = make_tiny_model(tmp_path / "base")
    with learner_of(tmp_path, model, 0) as learner:
        learner.train(make_experiences(model, 8), step=0, version=0, ahead=0)
        probes = []
        for _ in range(2):
            probes.append(read_manifest(folder := publish(tmp_path, learner, 1)).probe)
            shutil.rmtree(folder)
    assert probes[0].contrasts and probes[1] == probes[0]


def test_every_other_file_of_the_model_is_in_every_version(tmp_path):
    model = make_tiny_model(tmp_path / "base")
    (model / "special_config.json").write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    with learner_of(tmp_path, model, 0) as learner:
        folders = [tmp_path / version_path(0), publish(tmp_path, learner, 1)]
    files = [file for file in model.rglob("*") if file.is_file() and file.suffix != ".safetensors"]
    others = {str(file.relative_to(model)): file.read_bytes() for file in files}
    del others["config.json"]  # is written anew: the weights are untied
    assert {"tokenizer_config.json", "generation_config.json", "special_config.json"} <= others.keys()
    assert "additional_chat_templates/tool_use.jinja" in others, "an engine renders chats with tools by it"
    for folder in folders:
        assert {name: (folder / name).read_bytes() for name in others} == others


def test_a_weight_of_another_shape_is_refused_before_it_becomes_a_version(tmp_path):
    model = make_tiny_model(tmp_path / "base")
    with learner_of(tmp_path, model, 0) as learner:
        whole = learner.weights()

        def read(name: str) -> torch.Tensor:
            return torch.empty(0) if name == "model.norm.weight" else whole(name)

        with pytest.raises(VersionError, match=r"'model\.norm\.weight' has shape \[0\], but should be F32 \[64\]"):
            write_full_version(tmp_path, read, Probe("float32", []), version=1, parent=0, step=1)
    assert [folder.name for folder in (tmp_path / "versions").glob("*v0*")] == ["v000000"]


def test_no_more_than_one_weight_is_in_memory_while_a_version_is_written(tmp_path):
    model = make_tiny_model(tmp_path / "base")
    given: list[weakref.ref] = []

    with learner_of(tmp_path, model, 3) as learner:
        whole = learner.weights()

        def read(name: str) -> torch.Tensor:
            assert not any(array() is not None for array in given), name
            array = whole(name).numpy().copy()
            given.append(weakref.ref(array))
            return torch.from_numpy(array)

        write_full_version(tmp_path, read, Probe("float32", []), version=1, parent=0, step=1)


def test_the_probe_is_what_the_base_says_by_itself_and_the_same_each_time(tmp_path):
    model = load_causal_lm(make_tiny_model(tmp_path / "base"))
    sampled = sample_sequences(model)
    assert sampled == sample_sequences(model)
    drawn = torch.randint(208, (64, 24), generator=torch.Generator().manual_seed(1)).tolist()
    own, foreign = (
        torch.tensor([sequence.logprobs for sequence in compute_probe(model, ids)]).mean() for ids in (sampled, drawn)
    )
    assert own > foreign
