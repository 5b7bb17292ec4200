"""The seam: what a page may import, units that are never parted, and parts that see their own units alone."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.config import ALGORITHMS, TrainerConfig
from tests.support.batches import ALONE, batch_of, sequence
from trainer_service.algorithms import registry
from trainer_service.algorithms.registry import PAGES
from trainer_service.algorithms.seam import Needs, Unit
from trainer_service.minibatches import blocks_of, even_minibatches
from trainer_service.packing import pack
from trainer_service.parts import Part, Work

FOLDER = Path(registry.__file__).parent
ALLOWED = {"__future__", "dataclasses", "math", "collections.abc", "typing", "numpy", "torch", "shared.config"} | {
    f"trainer_service.algorithms.{name}" for name in ("seam", "advantages", "attempts", "surrogates")
}


def imports_of(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return named | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


@pytest.mark.parametrize("name", PAGES)
def test_an_algorithm_is_a_page_that_imports_numpy_torch_its_config_and_the_shared_files(name):
    page = FOLDER / f"{name}.py"
    assert imports_of(page) <= ALLOWED
    assert len(page.read_text().splitlines()) <= 120


def test_import_linter_lets_algorithms_import_only_trajectories():
    contracts = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["name"].startswith("an algorithm sees arrays and tensors"))

    def modules(folder: Path, package: str) -> set[str]:
        names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        return {f"{package}.{name}" for name in names - {"__init__"}}

    allowed = {"trainer_service.algorithms", "trainer_service.trajectories"}
    assert set(contract["forbidden_modules"]) >= modules(FOLDER.parent, "trainer_service") - allowed
    of_algorithms = modules(FOLDER, "trainer_service.algorithms")
    assert set(contract["source_modules"]) == of_algorithms - {"trainer_service.algorithms.registry"}


def test_every_algorithm_has_a_page_a_section_and_a_document():
    documents = {file.stem for file in (FOLDER.parents[1] / "docs/algorithms").glob("*.md")} - {"index", "surrogates"}
    assert set(PAGES) == set(ALGORITHMS) == documents
    assert all(type(getattr(TrainerConfig(), name)) is section for name, section in ALGORITHMS.items())


def test_blocks_are_the_sequences_that_units_connect():
    assert blocks_of([(3,), (0, 4), (1,), (5, 4), (3,)]) == [(0, 4, 5), (1,), (3,)]
    assert blocks_of([]) == []


def test_minibatches_are_even_in_tokens_whole_and_the_same_for_the_same_seed():
    draw = np.random.default_rng(0)
    costs = np.exp(draw.normal(5, 1, 64)).astype(int).tolist()
    parts = even_minibatches(costs, 4, np.random.default_rng([7, 1]))
    assert sorted(block for part in parts for block in part) == list(range(64))
    totals = [sum(costs[block] for block in part) for part in parts]
    assert max(totals) < 1.02 * min(totals)
    assert even_minibatches(costs, 4, np.random.default_rng([7, 1])) == parts
    assert even_minibatches(costs, 4, np.random.default_rng([7, 2])) != parts


def test_no_minibatch_is_empty():
    assert sorted(map(len, even_minibatches([5, 1, 1], 8, np.random.default_rng(0)))) == [1, 1, 1]
    assert sorted(map(len, even_minibatches([0, 0, 0, 0], 2, np.random.default_rng(0)))) == [2, 2]
    assert even_minibatches([], 2, np.random.default_rng(0)) == []


@dataclass(frozen=True)
class Pairs:
    """As DPO would be, without its sigmoid: the sums of logprobs of two sequences are compared."""

    pairs: list[tuple[int, ...]]
    looked_at: list[int] = field(default_factory=list)
    needs: Needs = Needs.NOTHING

    def units(self, batch):
        return [*map(Unit, self.pairs), *(Unit((place,), trained=False) for place in self.looked_at)]

    def constants(self, batch, units, precomputed, memory):
        names = [place for unit in units for place in unit.members]
        return {"factor": [np.full(1, place + 1, np.float32) for place in names]}, {}

    def size(self, units, constants):
        assert len(constants["factor"]) == sum(len(unit.members) for unit in units)
        return len(units)

    def loss(self, now, constants):
        sums_S = now.sum_S(now.logprobs_K) * constants["factor"]
        return (sums_S[0::2] - sums_S[1::2]).sum(), {"pairs": (now.unit_S.max() + 1).float()}


def see(algorithm, batch, logprobs, max_tokens=1_000_000) -> tuple[float, Work]:
    """The loss of one minibatch of the whole batch, summed over its micro-batches."""
    units = algorithm.units(batch)
    work = Work(Part(algorithm, weight=2.0), units, *algorithm.constants(batch, units, None, {}))
    blocks = blocks_of(work.groups)
    places = [place for block in blocks for place in block]
    size = work.size_of(places)
    total = 0.0
    for micro in pack(batch.sequences, places, max_tokens, units=blocks):
        found = torch.cat([logprobs[place] for place in micro.members])
        total += float(work.loss(micro, {"logprobs": found, "entropy": 0 * found}, size))
    return total, work


@pytest.mark.parametrize("max_tokens", [1, 12, 1_000_000])
def test_pairs_are_compared_whatever_else_is_packed_with_them(max_tokens):
    lengths = (3, 1, 4, 2, 5, 1)
    batch = batch_of(*(sequence([0.0] * length) for length in lengths))
    logprobs = [torch.full((length,), -1.0 - place) for place, length in enumerate(lengths)]
    sums = [float(one.sum()) * (place + 1) for place, one in enumerate(logprobs)]
    pairs = [(4, 1), (0, 3), (4, 3)]  # one sequence in two pairs, in another order than theirs
    total, work = see(Pairs(pairs, looked_at=[5]), batch, logprobs, max_tokens)
    assert total == pytest.approx(2 * sum(sums[a] - sums[b] for a, b in pairs) / 3)
    assert work.figures(ALONE) == {"pairs": 1.0}


def test_a_micro_batch_without_a_parts_units_adds_nothing_to_its_loss():
    batch = batch_of(sequence([0.0]), sequence([0.0]), sequence([0.0]))
    algorithm = Pairs([(0, 1)])
    work = Work(Part(algorithm), units := algorithm.units(batch), *algorithm.constants(batch, units, None, {}))
    (micro,) = pack(batch.sequences, [2], 10)
    scores = {"logprobs": torch.ones(1), "entropy": torch.ones(1)}
    assert work.size_of([2]) == 0
    assert work.loss(micro, scores, 1.0) == 0
