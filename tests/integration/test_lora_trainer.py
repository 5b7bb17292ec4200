"""A trainer of adapters as a real process: killed, on two ranks, and with few versions kept."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.config import Config
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import count_by_state, list_versions
from shared.versions import verify_version, version_path
from tests.support.experiences import make_experiences, trainer_config
from tests.support.forms import FULL
from tests.support.processes import wait_for, write_config
from tests.support.servers import free_port
from tests.support.trained_roots import BATCH, begin, newest, open_ledger, prepare
from trainer_service.base_version import ensure_base_version

SETTINGS = {"lora": {"rank": 12}, "deepspeed": {"optimizer": {"params": {"eps": 1e-6}}}, "epochs": 1}
LAST = 4
STAGES = [0, 1, 2, 3] if FULL else [3]


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, 8 * LAST)


def adapter(root: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(root / version_path(version) / "adapter_model.safetensors")


def finish(root: Path, process) -> None:
    wait_for(lambda: newest(root) == LAST or not process.alive, "the last version", 240)
    assert process.stop() == 0, process.output()
    assert "Traceback" not in process.output()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, lives, model, rows) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    prepare(root, model, rows, **SETTINGS)
    with begin(lives, root) as process:
        finish(root, process)
        assert "rank=12 reserved=16" in process.output()
    return root


def test_rows_become_adapters_whose_row_and_manifest_agree(undisturbed):
    ledger = open_ledger(undisturbed)
    with ledger.read() as connection:
        versions, counts = list_versions(connection), count_by_state(connection)
    ledger.close()
    assert [(row.version, row.parent, row.kind) for row in versions] == [
        (0, None, "full"),
        *((n, n - 1, "lora") for n in range(1, LAST + 1)),
    ]
    assert counts["CONSUMED"] == 8 * LAST
    for row in versions[1:]:
        manifest = verify_version(undisturbed / row.path, row.manifest_sha256)
        assert (manifest.kind, manifest.base_version, manifest.parent) == ("lora", 0, row.parent)
        assert row.bytes == sum(entry.size for entry in manifest.files.values())


def test_killed_before_an_adapter_is_official_it_goes_on_to_the_same_bits(tmp_path, lives, model, rows, undisturbed):
    prepare(tmp_path, model, rows, **SETTINGS)
    with begin(lives, tmp_path, FAULT="after StateStore.save", FAULT_CALL="2") as trainer:
        assert trainer.wait(240) == -9
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: newest(tmp_path) == LAST or not trainer.alive, "the last version", 240)
        assert trainer.stop() == 0
    for version in range(1, LAST + 1):
        expected = adapter(undisturbed, version)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter(tmp_path, version).items())


def test_versions_that_no_state_contains_are_withdrawn_their_rows_trained_again_and_old_versions_go(
    tmp_path, lives, model, rows, undisturbed
):
    prepare(tmp_path, model, rows, save_every=2, **SETTINGS)
    with begin(lives, tmp_path, FAULT="publish_ahead committed", FAULT_CALL="2") as trainer:
        assert trainer.wait(240) == -9
    with begin(lives, tmp_path, FLYWHEEL_VERSIONS__MAX_VERSIONS="3") as trainer:
        wait_for(lambda: newest(tmp_path) == LAST + 1 or not trainer.alive, "the last version", 240)
        assert trainer.stop() == 0
    expected = adapter(undisturbed, LAST)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter(tmp_path, LAST + 1).items())
    ledger = open_ledger(tmp_path)
    with ledger.read() as connection:
        states = {row.version: row.state for row in list_versions(connection)}
    ledger.close()
    assert states[3] == "REJECTED"
    kept = {folder.name for folder in (tmp_path / "versions").glob("v*")}
    assert len(kept) == 3 and {"v000000", "v000005"} <= kept


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_end_with_the_adapter_of_one(stage, tmp_path, lives, model, rows, undisturbed):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    settings = {**SETTINGS, "deepspeed": {**SETTINGS["deepspeed"], "zero_optimization": zero}}
    end = 2 if FULL else 1
    prepare(tmp_path, model, rows[: end * BATCH], ranks=2, **settings)
    with begin(lives, tmp_path) as process:
        wait_for(lambda: newest(tmp_path) == end or not process.alive, "the last version", 240)
        assert process.stop() == 0 and "Traceback" not in process.output()
    expected = adapter(undisturbed, end)
    assert all(torch.allclose(found, expected[name], atol=2e-5) for name, found in adapter(tmp_path, end).items())


@pytest.mark.parametrize("command", ["engine", "explorer", "trainer"])
def test_another_kind_than_that_of_the_versions_is_refused_in_one_line_with_what_to_set(
    command, tmp_path, lives, model
):
    config = trainer_config(tmp_path, model, {})
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
        with ledger.write() as connection:
            transitions.publish(connection, version=1, parent=0, kind="lora", step=1)
    engines = [{"name": "e0", "url": f"http://127.0.0.1:{free_port()}"}]
    tree = {
        "root_dir": str(tmp_path),
        "model": {"path": str(model)},
        "explorer": {"port": free_port(), "engines": engines},
    }
    file = write_config(Config.model_validate(tree), tmp_path / "flywheel.yaml")
    with lives.begin([command, "-c", str(file)], tmp_path / "log") as ended:
        assert ended.wait(240) == 2 and "Traceback" not in ended.output()
    (line,) = [line for line in ended.output().splitlines() if line.startswith("flywheel: ")]
    assert "model.kind=full, and v000001 of the ledger" in line
    assert "is of the kind lora; set model.kind: lora, or begin with a new root_dir and database" in line
