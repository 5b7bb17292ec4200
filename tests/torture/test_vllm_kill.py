"""kill -9 of real vLLM while it loads and unloads adapters: when it is back, it has its set.

Takes minutes, and runs with FLYWHEEL_TORTURE=full alone; tests/torture/test_adapters_kill.py kills a scripted engine.
"""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from sqlalchemy import select

from benchmarks.reload.adapters import AdapterPublisher
from shared.config import Config
from shared.experience import Tokens
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences, payloads
from tests.support.forms import FULL
from tests.support.models import make_tiny_model
from tests.support.processes import Process, wait_for, write_config
from tests.support.servers import free_port
from tests.torture.adapters import PINS, Customers, is_right

pytestmark = pytest.mark.torture
KILLS = 12
TOLERANCE = 1e-4  # of a logprob; another adapter's is off by a thousand times that


@pytest.mark.skipif(not FULL, reason="in the long form")
@pytest.mark.timeout(3600)
def test_vllm_that_is_killed_in_a_load_comes_back_with_its_set_and_every_row_is_its_version_s(tmp_path):
    config = config_of(tmp_path)
    file = write_config(config, tmp_path / "flywheel.yaml")
    url = f"http://127.0.0.1:{config.explorer.port}"
    draw, unfinished = random.Random(7), 0
    with (
        contextlib.ExitStack() as stack,
        Process(["explorer", "-c", str(file)], tmp_path / "explorer.log") as explorer,
        contextlib.closing(Ledger.open(config.ledger_url)) as ledger,
    ):
        engine = begin_engine(stack, file)
        wait_for(lambda: is_ready(url, engine), "ready", 240, 0.5)
        publisher = AdapterPublisher(config, ledger, size=0.2)
        customers = Customers([url], 4, tokens_tell=False)
        stack.callback(customers.close)
        for kill in range(KILLS):
            customers.come()
            publisher.prepare()
            time.sleep(1.0)  # with pins that come and go
            version = publisher.publish()
            time.sleep(draw.uniform(0, 0.3))
            kill_engine(engine, whole=kill % 3 == 2)
            unfinished += served_at(ledger, version) is None
            engine = begin_engine(stack, file)
            customers.pause()
            wait_for(lambda: is_right(config, ledger), "the right set", 240, 0.2)
            customers.come()
            before = customers.answered.total()
            wait_for(lambda: customers.answered.total() > before + 20, "chats", 240)  # noqa: B023
            print(f"{kill + 1} kills, {unfinished} before the version was in service", flush=True)
        customers.close()
        assert (engine.stop(), explorer.stop()) == (0, 0)
        rows, largest = compare_rows(ledger, publisher)
    assert customers.wrong == []
    assert "Traceback" not in explorer.output()
    print(f"{rows} rows, off by {largest:.2g} at most")
    print(f"answered {dict(customers.answered)}, refused {dict(customers.refused)}")


def config_of(root: Path) -> Config:
    return Config.model_validate(
        {
            "root_dir": str(root / "data"),
            "model": {"path": str(make_tiny_model(root / "base")), "kind": "lora", "lora": {"rank": 2, "alpha": 4}},
            "explorer": {
                "port": free_port(),
                "engines": [{"name": "e0", "url": f"http://127.0.0.1:{free_port()}"}],
                "reload": {"poll_interval_s": 0.1, "unpin_after_s": 1.0},
            },
            "engine": {
                **{"dtype": "float32", "max_model_len": 256, "max_loras": 2, "max_cpu_loras": PINS + 2},
                "staging_dir": str(root / "staged"),
            },
        }
    )


def is_ready(url: str, engine: Process) -> bool:
    assert engine.alive, engine.output()[-3000:]
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def begin_engine(stack: contextlib.ExitStack, file: Path) -> Process:
    return stack.enter_context(Process(["engine", "-c", str(file)], file.with_name("engine.log")))


def kill_engine(engine: Process, *, whole: bool) -> None:
    """Kill vLLM, with which `flywheel engine` ends, and nothing of vLLM stays; whole: both at once."""
    if not whole:
        vllm = psutil.Process(engine.pid).children(recursive=True)
        vllm[0].kill()
        assert engine.wait(240) == 1
        wait_for(lambda: not any(process.is_running() for process in vllm), "the end of all of vLLM's processes", 10)
    engine.kill()


def served_at(ledger: Ledger, version: int) -> float | None:
    with ledger.read() as connection:
        return next(row.served_at for row in list_versions(connection) if row.version == version)


def compare_rows(ledger: Ledger, publisher: AdapterPublisher) -> tuple[int, float]:
    """How many rows there are, and how far their logprobs are at most from those of the version that they name."""
    with ledger.read() as connection:
        found = connection.execute(select(experiences, payloads.c.tokens).join(payloads)).all()
    largest = 0.0
    for version in {row.version for row in found}:
        with publisher.adapted(version) as model, torch.no_grad():
            for row in found:
                if row.version == version:
                    assert row.version_end == version
                    largest = max(largest, gap(model, Tokens.decode(row.tokens)))
    assert largest < TOLERANCE
    return len(found), largest


def gap(model: torch.nn.Module, tokens: Tokens) -> float:
    ids = torch.from_numpy(np.concatenate([tokens.prompt_ids, tokens.reply_ids]).astype(np.int64))[None]
    logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    at = torch.arange(len(tokens.prompt_ids) - 1, ids.shape[1] - 1)
    own = logprobs[at, ids[0, len(tokens.prompt_ids) :]].numpy()
    return float(np.abs(own - tokens.logprobs).max())
