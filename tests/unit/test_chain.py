"""Versions that are deltas: what they are made of, and the whole copies that come of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shared.chain import copy_version, read_chain
from shared.errors import VersionError, VersionMissing
from shared.versions import MANIFEST, read_manifest, verify_version
from tests.support.deltas import FILES, Weights, contents


def forms(weights: Weights, versions: int) -> str:
    return "".join(read_manifest(weights.folder(version)).form[0] for version in range(versions))


def copy(weights: Weights, version: int, target: Path, **more: object) -> dict[str, str]:
    target.mkdir()
    manifest = copy_version(read_chain(weights.root, version), target, **more)
    assert verify_version(target) == manifest and manifest.form == "whole"
    return contents(target)


def change(folder: Path, **fields: object) -> None:
    file = folder / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_delta_is_published_where_little_changed_and_its_copy_has_the_files_that_were_written(tmp_path):
    weights = Weights(tmp_path)
    for version in range(4):
        manifest = weights.publish(version)
    assert forms(weights, 4) == "wddd"
    assert sum(entry.size for entry in manifest.files.values()) < 0.1 * sum(e.size for e in manifest.whole.values())
    expected = {name: entry.sha256 for name, entry in manifest.whole.items()}
    made = copy(weights, 3, tmp_path / "copy")
    assert made.items() >= expected.items() and made.keys() == {*FILES, "config.json"}
    assert made["config.json"] == contents(weights.folder(3))["config.json"]


def test_one_version_in_n_is_whole_and_so_is_one_with_many_changes(tmp_path):
    weights = Weights(tmp_path, anchor_every=3)
    for version in range(5):
        weights.publish(version)
    for version, share in ((5, 0.9), (6, 0.01)):
        weights.publish(version, share)
    assert forms(weights, 7) == "wddwdwd"


def test_no_version_is_made_of_more_deltas_than_can_be_read(tmp_path, monkeypatch):
    for module in ("shared.chain", "trainer_service.delta"):
        monkeypatch.setattr(f"{module}.MOST_DELTAS", 3)
    weights = Weights(tmp_path, anchor_every=1000)
    for version in range(9):
        weights.publish(version)
        assert len(read_chain(tmp_path, version)) <= 4


def test_a_version_stays_whole_when_its_parent_is_not_there_as_it_was_published(tmp_path):
    weights = Weights(tmp_path)
    for version in range(3):
        weights.publish(version)
    (tmp_path / "last-weights" / FILES[0]).unlink()
    assert weights.publish(3).form == "whole"
    assert weights.publish(4).form == "delta"
    weights.publish(9, parent=4)  # written, and never made official: what was kept is not of version 4
    assert weights.publish(5).form == "whole"
    shutil.rmtree(weights.folder(5))
    assert weights.publish(6).form == "whole"


def test_it_can_be_told_which_versions_others_are_made_of(tmp_path):
    weights = Weights(tmp_path, anchor_every=3)
    for version in range(6):
        weights.publish(version)
    made_of = {n: [link.manifest.version for link in read_chain(tmp_path, n)] for n in (0, 2, 4)}
    assert made_of == {0: [0], 2: [0, 1, 2], 4: [3, 4]}
    assert [link.manifest.version for link in read_chain(tmp_path, 5)] == [3, 4, 5]


def test_an_earlier_copy_saves_reading_the_versions_before_it(tmp_path):
    weights = Weights(tmp_path)
    for version in range(4):
        weights.publish(version)
    expected = copy(weights, 3, tmp_path / "all")
    copy(weights, 2, tmp_path / "two")
    shutil.rmtree(weights.folder(0) / FILES[0], ignore_errors=True)
    (weights.folder(0) / FILES[0]).unlink()
    bases = {read_chain(tmp_path, 2)[-1].sha256: tmp_path / "two"}
    assert copy(weights, 3, tmp_path / "three", bases=bases) == expected
    (tmp_path / "empty").mkdir()
    with pytest.raises(VersionMissing, match=FILES[0]):
        copy_version(read_chain(tmp_path, 3), tmp_path / "empty")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_damage_anywhere_in_the_chain_is_found(tmp_path):
    weights = Weights(tmp_path)
    for version in range(3):
        weights.publish(version)
    delta = "model-00001-of-00002.delta.safetensors"
    for number, file in enumerate(
        (
            weights.folder(0) / FILES[0],
            weights.folder(1) / delta,
            weights.folder(2) / delta,
            weights.folder(2) / "config.json",
        )
    ):
        flip(file)
        (tmp_path / str(number)).mkdir()
        with pytest.raises(VersionError, match="does not match its sha256"):
            copy_version(read_chain(tmp_path, 2), tmp_path / str(number))
        flip(file)


CONTRADICTIONS = {
    "another parent": {"of": {"version": 0, "manifest_sha256": "0" * 64}},
    "a later one": {"parent": 9, "of": {"version": 9, "manifest_sha256": "0" * 64}},
    "itself": {"parent": 2, "of": {"version": 2, "manifest_sha256": "0" * 64}},
    "nothing": {"of": None},
    "whole as well": {"form": "whole"},
    "a new form": {"form": "half"},
    "no weights": {"whole": {}},
    "other weights": {"whole": {"other.safetensors": {"size": 1, "sha256": "0" * 64}}},
    "weights elsewhere": {"whole": {"../x.safetensors": {"size": 1, "sha256": "0" * 64}}},
    "a pickle": {"whole": {"pytorch_model.bin": {"size": 1, "sha256": "0" * 64}}},
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_manifest_that_contradicts_its_form_is_damaged(what, tmp_path):
    weights = Weights(tmp_path)
    for version in range(3):
        weights.publish(version)
    change(weights.folder(2), **CONTRADICTIONS[what])
    with pytest.raises(VersionError, match="is damaged"):
        read_manifest(weights.folder(2))


def test_a_delta_of_another_version_of_the_same_number_is_found(tmp_path):
    weights = Weights(tmp_path)
    for version in range(3):
        weights.publish(version)
    change(weights.folder(1), created_at=1.0)
    with pytest.raises(VersionError, match="is not the one"):
        read_chain(tmp_path, 2)
    shutil.rmtree(weights.folder(1))
    with pytest.raises(VersionMissing, match="cannot be read"):
        read_chain(tmp_path, 2)


def test_a_delta_with_a_size_other_than_its_base_is_detected(tmp_path):
    weights = Weights(tmp_path)
    for version in range(2):
        whole = weights.publish(version).whole
    entries = {name: {"size": entry.size + 1, "sha256": entry.sha256} for name, entry in whole.items()}
    change(weights.folder(1), whole=entries)
    with pytest.raises(VersionError, match="weights of other sizes"):
        read_chain(tmp_path, 1)
