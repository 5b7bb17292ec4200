"""What ranks send one another, how they share, and which GPUs each process sees."""

from __future__ import annotations

from dataclasses import fields
from threading import Event, Thread, Timer

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import distributed as dist

from services.engine.launch import command_line
from shared.config import Config
from shared.errors import ConfigError, StartupError
from shared.experience import Experience, Tokens
from shared.ports import free_port
from shared.process import visible_devices
from shared.stop_request import StopRequest
from tests.support.experiences import rows
from trainer_service import ranks
from trainer_service.broadcast import pack_arrays, pack_rows, unpack_arrays, unpack_rows
from trainer_service.errors import RankLost
from trainer_service.ranks import Ranks, join_ranks


def test_rows_arrive_as_they_were_sent():
    sent = rows(3)
    found = unpack_rows(pack_rows(sent))
    for one, other in zip(found, sent, strict=True):
        for field in fields(Experience):
            if field.name != "tokens":
                assert getattr(one, field.name) == getattr(other, field.name), field.name
        for field in fields(Tokens):
            ours, theirs = getattr(one.tokens, field.name), getattr(other.tokens, field.name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs) and ours.flags.writeable


def test_arrays_arrive_bit_for_bit():
    sent = [np.array([0.1, np.nan, np.inf, -0.0], np.float32), np.empty(0, np.float32), np.arange(6).reshape(2, 3)]
    found = unpack_arrays(pack_arrays(sent))
    assert [(one.shape, one.tobytes()) for one in found] == [(one.shape, one.tobytes()) for one in sent]


def test_an_object_is_not_sent():
    with pytest.raises(NotImplementedError, match="a object is not sent to other ranks"):
        pack_arrays([object()])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_item_is_one_ranks_and_costs_are_even(size):
    costs = [90, 10, 40, 40, 70, 30, 20, 60]
    shares = [Ranks(rank, size, None, 1.0).share(costs) for rank in range(size)]
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    totals = [sum(costs[number] for number in share) for share in shares]
    assert max(totals) - min(totals) <= min(costs)


def test_rank_0_stays_until_the_others_have_read_their_last_order(monkeypatch):
    """Its process has the store: without it a rank that reads late would take rank 0 for lost."""
    monkeypatch.setattr("trainer_service.ranks.PATIENCE_S", 240.0)
    store = dist.HashStore()
    first, second = (Ranks(rank, 2, store, 240.0) for rank in range(2))
    first.end()
    leaving = Thread(target=first.leave)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    assert list(second.orders(StopRequest())) == []
    second.leave()
    leaving.join(60)
    assert not leaving.is_alive()


def test_an_order_of_more_bytes_than_the_store_takes_at_once_arrives_whole():
    """PyTorch's server of the store ends a connection that sends a value above 8 MiB."""
    port = free_port()
    stores = [dist.TCPStore("127.0.0.1", port, 2, is_master=first, wait_for_workers=False) for first in (True, False)]
    first, second = (Ranks(rank, 2, store, 60.0) for rank, store in enumerate(stores))
    sent = np.random.default_rng(5).bytes(9 << 20)
    for number in range(3):
        first.order("train", sent, number)
        assert second._next_order(StopRequest()) == ("train", [sent, number])
    assert stores[0].num_keys() < 12, "orders that were read are deleted"


def test_an_order_stays_until_every_rank_has_read_it():
    store = dist.HashStore()
    first, second = (Ranks(rank, 2, store, 60.0) for rank in range(2))
    for number in range(4):
        first.order("join_save", number)
    assert [second._next_order(StopRequest())[1] for _ in range(4)] == [[0], [1], [2], [3]]


class StopsBetween:
    """The store of a rank 0 that is stopped after it has said that there is an order."""

    def wait(self, *_: object) -> None:
        pass

    def get(self, _key: str) -> bytes:
        Event().wait(240)
        raise RuntimeError


def test_a_rank_0_that_is_stopped_while_an_order_is_read_is_lost():
    ranks = Ranks(1, 2, StopsBetween(), 0.1)
    found: list[BaseException] = []

    def follow() -> None:
        try:
            list(ranks.orders(StopRequest()))
        except RankLost as error:
            found.append(error)

    following = Thread(target=follow, daemon=True)
    following.start()
    following.join(60)
    assert "rank 0 does not answer" in str(found[0])


def test_a_machine_with_fewer_gpus_than_ranks_is_refused_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"trainer\.ranks=2, but this trainer sees 1 GPUs; lower trainer\.ranks"):
        join_ranks(1.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        join_ranks(1.0)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_whose_partners_do_not_join_reports_it_within_the_timeout(rank, monkeypatch):
    monkeypatch.setattr("trainer_service.ranks.JOIN_TIMEOUT_S", 0.5)
    job = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    for name, value in {**job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=r"did not all meet at 127\.0\.0\.1:\d+ within 0\.5 s .*; start all of them"):
        join_ranks(1.0)


def config(**sections: object) -> Config:
    return Config.model_validate({"model": {"path": "m"}, **sections})


def engines(*devices: list[int], host: str = "h") -> dict[str, object]:
    named = [{"name": f"e{n}", "url": f"http://{host}:{n + 1}", "devices": d} for n, d in enumerate(devices)]
    return {"engines": named}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"trainer": {"ranks": 3, "devices": [0, 1]}}, r"trainer\.ranks=3 is more than the GPUs .* name one for each"),
        ({"explorer": engines([0], [0])}, r"'e0' and .*'e1' both name GPU 0.* set engine\.gpu_share"),
        (
            {"explorer": engines([0], host="localhost"), "trainer": {"devices": [0]}},
            r"'e0' and trainer\.devices both name",
        ),
        ({"trainer": {"devices": [1, 1]}}, "'1' appears twice"),
        (
            {"trainer": {"deepspeed": {"bf16": {"enabled": True}}}},
            r"trainer\.deepspeed\.bf16 is not taken; set trainer",
        ),
    ],
)
def test_devices_that_cannot_be_are_refused_with_a_remedy(sections, expected):
    with pytest.raises(ValidationError, match=expected):
        config(**sections)


def test_an_engine_takes_its_gpus_and_its_share_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr("services.engine.launch.runs_on_cpu", lambda: False)
    (tmp_path / "config.json").write_text("{}")
    shared = config(explorer=engines([0, 1]), trainer={"devices": [1]}, engine={"gpu_share": 0.4})
    address = shared.explorer.engines[0]
    line = " ".join(command_line(shared, address, "127.0.0.1", tmp_path))
    assert "--gpu-memory-utilization 0.4" in line and "--tensor-parallel-size 2" in line
    assert visible_devices(address.devices) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert visible_devices(None) == {}


def test_engines_of_two_machines_may_name_the_same_gpu():
    two = [{"name": f"e{n}", "url": f"http://10.0.0.{n + 1}:8101", "devices": [0]} for n in range(2)]
    config(explorer={"engines": two})
    loopback = [{"name": f"e{n}", "url": f"http://127.0.0.{n + 1}:810{n}", "devices": [0]} for n in range(2)]
    with pytest.raises(ValidationError, match="both name GPU 0"):
        config(explorer={"engines": loopback})


def test_a_trainer_on_a_machine_of_its_own_may_name_the_gpus_that_an_engine_has_elsewhere():
    config(explorer=engines([0, 1], host="10.0.0.5"), trainer={"ranks": 2, "devices": [0, 1]})


def test_after_a_request_to_stop_a_rank_waits_as_long_as_rank_0_may_write(monkeypatch):
    store, stop = dist.HashStore(), StopRequest()
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.01)
    monkeypatch.setattr(ranks, "_LOOK_EVERY_S", 0.05)
    stop.set()
    Timer(0.5, ranks.Ranks(0, 2, store, 60.0).order, ("join_save",)).start()
    assert ranks.Ranks(1, 2, store, 60.0)._next_order(stop)[0] == "join_save"
