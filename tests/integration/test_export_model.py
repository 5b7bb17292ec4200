"""What leaves Flywheel is what was trained: an exported folder computes its version's logprobs in other hands."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec import structs
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services import cli
from services.trainer import build_update
from shared.config import Config
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import version_leases
from shared.versions import Manifest, read_manifest, verify_version, version_path, write_version
from tests.integration.test_lora import LORA, largest_gap
from tests.support.experiences import make_experiences, trainer_config
from tests.support.models import make_tiny_model
from tests.support.processes import write_config
from trainer_service.base_version import ensure_base_version
from trainer_service.delta import DeltaMaker
from trainer_service.learner import Learner
from trainer_service.publish import as_published, compute_probe
from trainer_service.ranks import join_ranks


def publish(ledger: Ledger, root: Path, manifest: Manifest) -> None:
    about = {"parent": manifest.parent, "kind": manifest.kind, "step": manifest.step}
    with ledger.write() as connection:
        transitions.publish(connection, version=manifest.version, **about, **as_published(root, manifest))


def train(config: Config, shrink=None) -> None:
    """Two versions of two updates."""
    root, ranks = config.root, join_ranks(60)
    rows = make_experiences(Path(config.model.path), 8)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
        learner = Learner(lambda: build_update(config, root / version_path(0), ranks), ranks)
        for version in (1, 2):
            learner.train(rows[4 * version - 4 : 4 * version], step=version - 1, version=version - 1)
            about = {"version": version, "parent": version - 1, "step": version}
            publish(ledger, root, learner.write_version(root, **about, shrink=shrink))
    write_config(config, root / "flywheel.yaml")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def adapters(request, tmp_path_factory) -> tuple[Path, str]:
    """A root with two versions of adapters, and the base's type."""
    root = tmp_path_factory.mktemp("adapters")
    model = make_tiny_model(root / "base", dtype=request.param)
    train(trainer_config(root, model, LORA, algorithm="raft", raft={"above": 0.0}, epochs=1))
    return root, request.param


@pytest.fixture(scope="module")
def deltas(tmp_path_factory) -> Path:
    """A root of whole weights whose version 2 is a delta."""
    root = tmp_path_factory.mktemp("deltas")
    model = make_tiny_model(root / "base", dtype="bfloat16")
    small = {"algorithm": "raft", "raft": {"above": 0.0}, "learning_rate": 1e-6, "epochs": 1, "minibatches": 1}
    train(trainer_config(root, model, **small), DeltaMaker(root, root / "private", 16).shrink)
    assert verify_version(root / version_path(2)).form == "delta"
    return root


def export(root: Path, *arguments: str) -> int:
    return cli.main(["export-model", "-c", str(root / "flywheel.yaml"), *arguments])


def logprobs(model, manifest: Manifest) -> list[list[float]]:
    sequences = [sequence.token_ids for sequence in manifest.probe.sequences]
    return [sequence.logprobs for sequence in compute_probe(model, sequences)]


def test_an_exported_adapter_is_read_by_peft_and_says_what_its_version_says(adapters, tmp_path, capsys):
    root, _ = adapters
    assert export(root, "--version", "2", "--to", str(tmp_path / "out")) == 0
    assert "version 2 is in" in " ".join(capsys.readouterr().err.split())
    said = json.loads((tmp_path / "out/adapter_config.json").read_text())
    manifest = verify_version(root / version_path(2))
    base = AutoModelForCausalLM.from_pretrained(said["base_model_name_or_path"], dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out")
    assert largest_gap(logprobs(adapted, manifest), manifest.probe.sequences) < 5e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("hello w1") == [7, 9]


def test_a_merged_folder_is_the_base_plus_the_product_rounded_once(adapters, tmp_path):
    root, dtype = adapters
    assert export(root, "--version", "2", "--to", str(tmp_path / "out"), "--merged") == 0
    manifest = verify_version(root / version_path(2))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    gap = largest_gap(logprobs(merged, manifest), manifest.probe.sequences)
    assert gap < (5e-5 if dtype == "float32" else 0.1)
    base = AutoModelForCausalLM.from_pretrained(root / version_path(0), dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, root / version_path(2)).merge_and_unload().state_dict()
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(tensor, by_peft[name].to(tensor.dtype)) for name, tensor in written.items())
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
    assert not (tmp_path / "out/MANIFEST.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("hello w1") == [7, 9]


@pytest.mark.parametrize("version", [1, 2])
def test_all_weights_are_exported_whole_those_of_a_delta_too(version, deltas, tmp_path):
    assert export(deltas, "--version", str(version), "--to", str(tmp_path / "out")) == 0
    manifest = verify_version(deltas / version_path(version))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert largest_gap(logprobs(model, manifest), manifest.probe.sequences) < 0.1


def refusal(root: Path, capsys, *arguments: str) -> str:
    assert export(root, *arguments) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_what_cannot_be_exported_is_refused_in_one_line_and_leaves_nothing(deltas, tmp_path, capsys):
    assert "version 7 does not exist; versions with files: 0, 1, 2" in refusal(
        deltas, capsys, "--version", "7", "--to", str(tmp_path / "out")
    )
    assert "--merged is for adapters" in refusal(
        deltas, capsys, "--version", "1", "--to", str(tmp_path / "out"), "--merged"
    )
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    assert "is there already" in refusal(deltas, capsys, "--version", "1", "--to", str(tmp_path / "taken"))
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
    with (
        contextlib.closing(Ledger.open(f"sqlite:///{deltas / 'ledger.sqlite3'}")) as ledger,
        ledger.read() as connection,
    ):
        readers = connection.execute(version_leases.select()).all()
    assert not [row for row in readers if row.purpose == "export"], "its files are released"


@pytest.mark.parametrize("merged", [[], ["--merged"]])
def test_a_folder_that_computes_something_else_than_its_version_is_not_written(merged, tmp_path, capsys):
    """The probe is computed again from the written files: here the version's own is of another adapter."""
    model = make_tiny_model(tmp_path / "base")
    config = trainer_config(tmp_path, model, LORA, algorithm="raft", raft={"above": 0.0}, epochs=1)
    train(config)
    right = read_manifest(tmp_path / version_path(2))
    off = [structs.replace(one, logprobs=[p - 0.1 for p in one.logprobs]) for one in right.probe.sequences]
    wrong = structs.replace(right, version=3, parent=2, files={}, probe=structs.replace(right.probe, sequences=off))
    old = tmp_path / version_path(2)
    manifest = write_version(
        tmp_path, wrong, lambda folder: [shutil.copy(file, folder) for file in old.glob("adapter_*")]
    )
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        publish(ledger, tmp_path, manifest)
    line = refusal(tmp_path, capsys, "--version", "3", "--to", str(tmp_path / "out"), *merged)
    assert "compute other logprobs than its probe: off by 0.1" in line
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp-*"))


def test_a_damaged_adapter_is_not_exported(adapters, tmp_path, capsys):
    root, _ = adapters
    file = root / version_path(1) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    line = refusal(root, capsys, "--version", "1", "--to", str(tmp_path / "out"))
    assert "version 1 cannot be exported" in line and "does not match its sha256; restore its folder" in line
    assert not list(tmp_path.iterdir())
