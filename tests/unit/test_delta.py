"""Deltas between files of weights: what is rebuilt is the newer file bit for bit, and damage is a VersionError."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shared import delta as deltas
from shared.delta import rebuild, require_delta, write_delta
from shared.errors import VersionError
from tests.support.forms import FULL

EXAMPLES = 100 if FULL else 40
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BITS = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16, "U8": np.uint8}
NO_LIMIT = 1 << 40


def weights(file: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A safetensors file of given bits."""
    entries, data = {}, b""
    for name, (dtype, shape, bits) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(bits)]}
        data += bits
    encoded = msgspec.json.encode(entries)
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return file


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@st.composite
def pairs(draw):
    """Two states of the same tensors, any bits, from none changed to all changed."""
    older, newer = {}, {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        kind, count = BITS[dtype], int(np.prod(shape, dtype=int))
        random = np.random.default_rng(draw(st.integers(0, 2**32)))
        before = random.integers(0, np.iinfo(kind).max, count, kind, endpoint=True)
        share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
        after = np.where(random.random(count) < share, before ^ kind(draw(st.integers(1, 255))), before)
        if draw(st.booleans()) and count:
            after[draw(st.integers(0, count - 1))] = np.iinfo(kind).max  # a NaN where the type is of floats
        older[f"t{number}"] = (dtype, shape, before.tobytes())
        newer[f"t{number}"] = (dtype, shape, after.astype(kind).tobytes())
    return older, newer


@SETTINGS
@given(pairs(), st.sampled_from([2, 64, 1024, deltas.BLOCK_BYTES]))
def test_what_is_rebuilt_is_the_newer_file_bit_for_bit(tmp_path, pair, block):
    older, newer = (weights(tmp_path / name, tensors) for name, tensors in zip("ab", pair, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "BLOCK_BYTES", max(block, older.stat().st_size // 2000 * 2))  # at most 1,000 blocks or so
        assert write_delta(older, newer, tmp_path / "d", NO_LIMIT)
        assert rebuild(older, [tmp_path / "d"], tmp_path / "c") == sha256(newer)
        assert (tmp_path / "c").read_bytes() == newer.read_bytes()


@SETTINGS
@given(pairs(), st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
def test_deltas_of_several_versions_are_applied_in_one_pass(tmp_path, pair, seeds):
    newest, chain = weights(tmp_path / "0", pair[0]), []
    for number, seed in enumerate(seeds, start=1):
        data = bytearray(newest.read_bytes())
        start = deltas.data_start(newest)
        random = np.random.default_rng(seed)
        for at in random.integers(start, len(data), 9) if len(data) > start else []:
            data[at] ^= 5
        (tmp_path / str(number)).write_bytes(data)
        assert write_delta(newest, tmp_path / str(number), tmp_path / f"d{number}", NO_LIMIT)
        newest = tmp_path / str(number)
        chain.append(tmp_path / f"d{number}")
    assert rebuild(tmp_path / "0", chain, tmp_path / "r") == sha256(newest)


def sparse(tmp_path: Path, count: int, share: float) -> tuple[Path, Path]:
    """Two files of bfloat16 weights; a share of them is one step of the type larger in the second."""
    random = np.random.default_rng(0)
    older = (random.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    newer = older + (random.random(count) < share)
    for name, bits in (("a", older), ("b", newer.astype(np.uint16))):
        weights(tmp_path / name, {"w": ("BF16", (count,), bits.tobytes())})
    return tmp_path / "a", tmp_path / "b"


def test_a_delta_of_few_changes_is_small(tmp_path):
    older, newer = sparse(tmp_path, 3_000_000, 0.0033)
    assert write_delta(older, newer, tmp_path / "d", NO_LIMIT)
    assert (tmp_path / "d").stat().st_size < 0.006 * newer.stat().st_size


def test_no_delta_is_made_that_is_larger_than_allowed_or_between_files_that_differ_in_more_than_values(tmp_path):
    older, newer = sparse(tmp_path, 10_000, 1.0)
    assert not write_delta(older, newer, tmp_path / "d", newer.stat().st_size // 4)
    save_file({"v": np.zeros(10_000, np.float16)}, tmp_path / "c")
    save_file({"w": np.zeros(9_000, np.float16)}, tmp_path / "e")
    assert not write_delta(older, tmp_path / "c", tmp_path / "d", NO_LIMIT)
    assert not write_delta(older, tmp_path / "e", tmp_path / "d", NO_LIMIT)
    assert not (tmp_path / "d").exists()


def test_a_delta_does_not_identify_its_base(tmp_path):
    older, newer = sparse(tmp_path, 1000, 0.1)
    assert write_delta(older, newer, tmp_path / "d", NO_LIMIT)
    other = weights(tmp_path / "o", {"w": ("BF16", (1000,), bytes(2000))})
    assert rebuild(other, [tmp_path / "d"], tmp_path / "r") != sha256(newer)


def packed(raw: bytes) -> bytes:
    return zlib.compress(raw)


BOMB = packed(bytes(200 * 2**20))  # 200 kB that become 200 MB
NOISE = bytes(np.random.default_rng(0).integers(0, 256, 4000, np.uint8))
DAMAGED: dict[str, tuple[dict[str, bytes], str]] = {
    "a gap beyond the end": ({"0.gaps": packed(b"\xff" * 4 + b"\0"), "0.values": packed(b"12")}, "beyond its end"),
    "a gap at the end": ({"0.gaps": packed(b"\xff"), "0.values": packed(b"")}, "beyond its end"),
    "no gap": ({"0.gaps": packed(b""), "0.values": packed(b"")}, "beyond its end"),
    "fewer values": ({"0.gaps": packed(b"\0\0"), "0.values": packed(b"12")}, "2 bytes for 2 words"),
    "more values": ({"0.gaps": packed(b"\0"), "0.values": packed(b"1234")}, "4 bytes for 1 words"),
    "half a value": ({"0.gaps": packed(b"\0"), "0.values": packed(b"1")}, "1 bytes for 1 words"),
    "more gaps than words": ({"0.gaps": packed(bytes(1001)), "0.values": packed(bytes(2000))}, "holds more"),
    "a bomb of gaps": ({"0.gaps": BOMB[:1000], "0.values": packed(b"12")}, "holds more"),
    "a long bomb": ({"0.gaps": BOMB, "0.values": packed(b"12")}, "longer than"),
    "a bomb of values": ({"0.gaps": packed(b"\0"), "0.values": BOMB[:2000]}, "holds more"),
    "broken off": ({"0.gaps": packed(b"\0\0\0")[:-4], "0.values": packed(b"123456")}, "holds more, or less"),
    "something after": ({"0.gaps": packed(b"\0") + b"x", "0.values": packed(b"12")}, "holds more"),
    "noise": ({"0.gaps": NOISE[:900], "0.values": NOISE[:900]}, "cannot be decompressed"),
    "empty": ({"0.gaps": b"", "0.values": b""}, "holds more, or less"),
    "no values": ({"0.gaps": packed(b"\0")}, "has no values"),
    "a block too many": ({"1.gaps": packed(b"\0"), "1.values": packed(b"12")}, "changes block 1"),
    "a tensor": ({"model.embed": b"1234"}, "is no part of a delta"),
    "a number without end": ({"9" * 5000 + ".gaps": b""}, "is no part of a delta"),
    "another spelling": ({"00.gaps": packed(b"\0"), "0.values": packed(b"12")}, "is no part of a delta"),
    "another digit": ({"\u0660.gaps": packed(b"\0"), "0.values": packed(b"12")}, "is no part of a delta"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_a_hostile_delta_is_refused_with_its_reason(what, tmp_path):
    older, _ = sparse(tmp_path, 1000, 0.1)
    parts, reason = DAMAGED[what]
    weights(tmp_path / "d", {name: ("U8", (len(data),), data) for name, data in parts.items()})
    with pytest.raises(VersionError, match=reason):
        rebuild(older, [tmp_path / "d"], tmp_path / "r")


@pytest.mark.parametrize(
    ("dtype", "shape", "data"), [("BF16", (2,), b"1234"), ("U8", (2, 2), b"1234"), ("U8", (), b"1")]
)
def test_a_part_that_is_no_row_of_bytes_is_refused(dtype, shape, data, tmp_path):
    older, _ = sparse(tmp_path, 1000, 0.1)
    weights(tmp_path / "d", {"0.gaps": (dtype, shape, data), "0.values": ("U8", (1,), b"1")})
    with pytest.raises(VersionError, match="should be a row of bytes"):
        rebuild(older, [tmp_path / "d"], tmp_path / "r")
    with pytest.raises(VersionError, match="should be a row of bytes"):
        require_delta(tmp_path / "d", 2000)


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 2**32), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_delta_with_flipped_bytes_is_refused_or_makes_another_file(tmp_path, flips):
    older, newer = sparse(tmp_path, 500, 0.2)
    assert write_delta(older, newer, tmp_path / "d", NO_LIMIT)
    damaged = bytearray((tmp_path / "d").read_bytes())
    for at, bits in flips:
        damaged[at % len(damaged)] ^= bits
    (tmp_path / "d").write_bytes(damaged)
    try:
        made = rebuild(older, [tmp_path / "d"], tmp_path / "r")
    except VersionError:
        return
    assert made != sha256(newer) or (tmp_path / "r").read_bytes() == newer.read_bytes()


@pytest.mark.parametrize("share", [0.02, 1.0])
def test_memory_is_bounded_by_the_block_whatever_the_size_of_the_file(share, tmp_path, monkeypatch):
    monkeypatch.setattr(deltas, "BLOCK_BYTES", 256 * 1024)
    older, newer = sparse(tmp_path, 8_000_000, share)
    tracemalloc.start()
    try:
        assert write_delta(older, newer, tmp_path / "d", NO_LIMIT)
        rebuild(older, [tmp_path / "d"], tmp_path / "r")
        assert tracemalloc.get_traced_memory()[1] < 40 * deltas.BLOCK_BYTES
    finally:
        tracemalloc.stop()
    assert sha256(tmp_path / "r") == sha256(newer)


def test_the_header_tells_whether_a_delta_fits_a_file(tmp_path):
    older, newer = sparse(tmp_path, 1000, 0.1)
    assert write_delta(older, newer, tmp_path / "d", NO_LIMIT)
    require_delta(tmp_path / "d", 2000)
    with pytest.raises(VersionError, match="changes block 0"):
        require_delta(tmp_path / "d", 0)
    (tmp_path / "d").write_bytes(b"\xff" * 64)
    with pytest.raises(VersionError, match="is no safetensors file"):
        require_delta(tmp_path / "d", 2000)
