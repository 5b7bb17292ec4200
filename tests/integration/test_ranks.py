"""Several ranks: one trainer to the ledger, and the weights of one rank."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import product
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from shared.ledger.queries import count_by_state
from shared.ports import free_port
from shared.versions import verify_version, version_path
from tests.support.experiences import make_experiences, record_ready
from tests.support.forms import FULL
from tests.support.lives import Life
from tests.support.models import make_tiny_model
from tests.support.processes import Process, wait_for
from tests.support.trained_roots import BATCH, LAST, ROWS, begin, newest, open_ledger, prepare, start, weights

EVERYTHING_PARTITIONED = {"stage3_param_persistence_threshold": 0}
ADAM = {"optimizer": {"params": {"eps": 1e-6}}}  # Adam divides a gradient by its size: rounding shall be no gradient
ALL = list(product([0, 1, 2, 3], [40, 256, 8192]))  # ZeRO stages, token budgets
PUBLISHED = list(product([0, 1, 2, 3], ["float32", "bf16"], [True, False]))
SOME = [(0, 40), (3, 8192)]
END = LAST if FULL else 2  # the version that all rows become
COUNT = ROWS if FULL else END * BATCH


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, COUNT)


def finish(root: Path, process: Process | Life) -> dict[str, torch.Tensor]:
    """Let it come to the last version. Returns that version's weights."""
    with process:
        wait_for(lambda: newest(root) == END or not process.alive, "the last version", 240)
        assert process.stop() == 0, process.output()
    assert "Traceback" not in process.output()
    ledger = open_ledger(root)
    with ledger.read() as connection:
        assert count_by_state(connection)["CONSUMED"] == COUNT
    ledger.close()
    verify_version(root / version_path(END))
    return load_file(root / version_path(END) / "model.safetensors")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, lives, model, rows) -> dict[str, torch.Tensor]:
    root = tmp_path_factory.mktemp("one")
    prepare(root, model, rows, deepspeed=ADAM)
    return finish(root, begin(lives, root))


@pytest.mark.parametrize(("stage", "budget"), ALL if FULL else SOME)
def test_two_ranks_end_with_the_weights_of_one(stage, budget, tmp_path, lives, model, rows, one_rank):
    deepspeed = {**ADAM, "zero_optimization": {"stage": stage, **EVERYTHING_PARTITIONED}}
    prepare(tmp_path, model, rows, ranks=2, deepspeed=deepspeed, max_tokens_per_micro_batch=budget)
    found = finish(tmp_path, begin(lives, tmp_path) if stage else start(tmp_path))  # and from the very start, once
    for name, tensor in one_rank.items():
        assert torch.allclose(found[name], tensor, atol=2e-5), name
    require_masters(tmp_path, found, torch.float32, tied=True)


def require_masters(root: Path, published: dict[str, torch.Tensor], dtype: torch.dtype, *, tied: bool) -> None:
    """Each element of the last version is its master, rounded."""
    (state,) = (root / "trainer/trainer").glob(f"state-*{END}")
    masters = load_file(state / "master.safetensors")
    before = load_file(root / version_path(0) / "model.safetensors")
    assert published.keys() == before.keys()
    for name, tensor in published.items():
        of = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
        assert torch.equal(tensor, masters[f"policy.{of}"].to(dtype)), name
    assert not torch.equal(published["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.parametrize(("stage", "precision", "tied"), PUBLISHED if FULL else [(3, "bf16", True)])
def test_two_ranks_publish_their_masters_element_by_element(stage, precision, tied, tmp_path, lives):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    base = make_tiny_model(tmp_path / "base", tied=tied, dtype=str(dtype).removeprefix("torch."))
    deepspeed = {"zero_optimization": {"stage": stage, **EVERYTHING_PARTITIONED}}
    prepare(tmp_path, base, make_experiences(base, COUNT), ranks=2, precision=precision, deepspeed=deepspeed)
    published = finish(tmp_path, begin(lives, tmp_path))
    require_masters(tmp_path, published, dtype, tied=tied)


def test_torchrun_by_hand_starts_the_same_ranks_and_they_end_with_it_however_it_ends(tmp_path, model, rows, one_rank):
    prepare(tmp_path, model, rows, deepspeed=ADAM)
    arguments = ["--standalone", "--nproc-per-node", "2", "-m", "services.cli"]
    arguments += ["trainer", "-c", str(tmp_path / "flywheel.yaml")]
    process = Process(arguments, tmp_path / "trainer.log", module="torch.distributed.run")
    with process:
        wait_for(lambda: newest(tmp_path) == END or not process.alive, "the last version", 240)
        ranks = ranks_of(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(240)
        assert len(ranks) == 2
        _, left = psutil.wait_procs(ranks, 240)
        assert not left, "ranks that nobody watches go on"
    found = load_file(tmp_path / version_path(END) / "model.safetensors")
    assert all(torch.allclose(found[name], tensor, atol=2e-5) for name, tensor in one_rank.items())


def over_two_machines(port: int) -> list[tuple[str, list[str]]]:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return [("torch.distributed.run", ["--nnodes", "2", "--nproc-per-node", "1", *rendezvous, "-m"])] * 2


def by_deepspeed(port: int) -> list[tuple[str, list[str]]]:
    arguments = ["--num_gpus", "2", "--master_port", f"{port}", "--no_local_rank", "--module"]
    return [("deepspeed.launcher.runner", arguments)]


@pytest.mark.skipif(not FULL, reason="in the long form")
@pytest.mark.parametrize("launched", [over_two_machines, by_deepspeed])
def test_ranks_meet_over_machines_and_by_deepspeeds_launcher(launched, tmp_path, model, rows, one_rank):
    prepare(tmp_path, model, rows, deepspeed=ADAM)
    command = ["services.cli", "trainer", "-c", str(tmp_path / "flywheel.yaml")]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(Process([*arguments, *command], tmp_path / f"{number}.log", module=module))
            for number, (module, arguments) in enumerate(launched(free_port()))
        ]
        wait_for(lambda: newest(tmp_path) == END or not all(one.alive for one in started), "the last version", 240)
        assert any("ranks=2" in one.output() for one in started)
    found = load_file(tmp_path / version_path(END) / "model.safetensors")
    assert all(torch.allclose(found[name], tensor, atol=2e-5) for name, tensor in one_rank.items())


@pytest.mark.parametrize("rank", [0, 1] if FULL else [1])
def test_a_rank_that_is_killed_ends_all_and_the_next_start_goes_on(rank, tmp_path, lives, model, rows, one_rank):
    prepare(tmp_path, model, rows, ranks=2, deepspeed=ADAM)
    with begin(lives, tmp_path) as process:
        wait_for(lambda: newest(tmp_path) >= 1 or not process.alive, "a version", 240, 0.01)
        victim = ranks_of(process)[rank]
        os.kill(victim.pid, signal.SIGKILL)
        assert process.wait(240) == 1
        assert not victim.is_running() and "a rank has ended; all end" in process.output()
    found = finish(tmp_path, begin(lives, tmp_path))
    assert all(torch.allclose(found[name], tensor, atol=2e-5) for name, tensor in one_rank.items())


@pytest.mark.parametrize("rank", [0, 1] if FULL else [0])
def test_a_rank_that_hangs_between_updates_ends_all_once_it_took_too_long(rank, tmp_path, lives, model, rows):
    prepare(tmp_path, model, rows[:8], ranks=2, deepspeed=ADAM, rank_timeout_s=20.0)
    with begin(lives, tmp_path) as process:
        wait_for(lambda: newest(tmp_path) == 1 or not process.alive, "the last version", 240)
        wait_for(lambda: "no ready rows" in process.output(), "the end of the rows", 240)
        found = ranks_of(process)
        found[rank].suspend()
        if rank == 1:  # rank 0 misses it only when it has work
            record_more(tmp_path, rows[8:16])
        ended_for_the_hang(process, found)


@pytest.mark.parametrize("rank", [0, 1] if FULL else [0])
def test_a_rank_that_hangs_in_an_update_ends_all_once_a_collective_took_too_long(rank, tmp_path, lives, model, rows):
    prepare(tmp_path, model, rows, ranks=2, deepspeed=ADAM, rank_timeout_s=20.0)
    with begin(lives, tmp_path, HANG_IN_UPDATE=f"{rank}:2") as process:
        found = wait_for(lambda: [one for one in [ranks_of(process)] if is_stopped(one)], "a rank that hangs", 240)
        ended_for_the_hang(process, found[0])


def is_stopped(ranks: list[psutil.Process]) -> bool:
    return any(one.status() == psutil.STATUS_STOPPED for one in ranks)


def ended_for_the_hang(process: Life, ranks: list[psutil.Process]) -> None:
    assert process.wait(240) == 1
    assert not any(one.is_running() for one in ranks)
    assert "trainer.rank_timeout_s" in process.output() and "Traceback" not in process.output()


def record_more(root: Path, rows) -> None:
    ledger = open_ledger(root)
    record_ready(ledger, rows)
    ledger.close()


def ranks_of(process: Process | Life) -> list[psutil.Process]:
    """In their order: it is that of their starts."""
    children = psutil.Process(process.pid).children()
    found = [child for child in children if child.name().startswith("rank-") or "services.cli" in child.cmdline()]
    return sorted(found, key=lambda child: child.pid)


def test_a_state_of_one_rank_goes_on_with_two(tmp_path, lives, model, rows, one_rank):
    half = END // 2
    prepare(tmp_path, model, rows[: half * BATCH], deepspeed=ADAM)
    with begin(lives, tmp_path) as process:
        wait_for(lambda: newest(tmp_path) == half or not process.alive, "the first versions", 240)
        assert process.stop() == 0
    deepspeed = {**ADAM, "zero_optimization": {"stage": 3, **EVERYTHING_PARTITIONED}}
    prepare(tmp_path, model, rows[half * BATCH :], ranks=2, deepspeed=deepspeed)
    found = finish(tmp_path, begin(lives, tmp_path))
    assert all(torch.allclose(found[name], tensor, atol=2e-5) for name, tensor in one_rank.items())


def test_a_loss_that_is_not_finite_is_undone_on_all_ranks_together(tmp_path, lives, model, rows):
    prepare(tmp_path, model, rows[:8], ranks=2, learning_rate=1e30)
    with begin(lives, tmp_path) as process:
        assert process.wait(240) == 1
    assert process.output().count("the update failed; its rows go back") == 5, "8, 8, 4, 2 and 1 rows, in one life"
    assert "updates fail whatever the rows are" in process.output() and "Traceback" not in process.output()
    assert weights(tmp_path, 0)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 and RANK is not set; start the ranks with `flywheel trainer`"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE=1, and trainer.ranks=2: unset WORLD_SIZE"),
        ({"FLYWHEEL_TRAINER__RANKS": "1", "FLYWHEEL_TRAINER__DEVICES": "[0]"}, "trainer.devices=[0], and PyTorch sees"),
    ],
)
def test_a_rank_without_partners_or_gpu_is_refused_in_one_line(environ, expected, tmp_path, lives, model):
    prepare(tmp_path, model, ranks=2)
    with begin(lives, tmp_path, **environ) as ended:
        assert ended.wait(240) in (1, 2)
    (line,) = [line for line in ended.output().splitlines() if line.startswith("flywheel: ")]
    assert expected in line and "Traceback" not in ended.output()
