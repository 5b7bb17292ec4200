"""Adapters after a rollback: the earlier version answers, and no caller gets a rejected one."""

from __future__ import annotations

from tests.support.adapters import publish_and_wait, said, state
from tests.support.scripted_adapters import publish_adapter
from tests.support.servers import served, wait_until


def test_chats_go_back_to_the_earlier_adapter_and_a_pin_of_a_rejected_one_ends(explorer):
    publish_and_wait(explorer, 1, 2, 3)
    assert said(explorer.chat(model="agent@2")) == "v000002"
    assert explorer.http.post("/rollback", json={"to": 1}).json()["rejected"] == [2, 3]
    wait_until(lambda: served(explorer) == "1")
    assert said(explorer.chat()) == "v000001"
    wait_until(lambda: explorer.chat(model="agent@2").status_code == 404)
    assert (state(explorer, 1), state(explorer, 2), state(explorer, 3)) == ("SERVING", "REJECTED", "REJECTED")
    publish_adapter(explorer, 4)
    wait_until(lambda: served(explorer) == "4")


def test_back_to_the_base_it_answers_by_itself(explorer):
    publish_and_wait(explorer, 1)
    assert explorer.http.post("/rollback", json={"to": 0}).json()["rejected"] == [1]
    wait_until(lambda: served(explorer) == "0")
    assert said(explorer.chat()) == "v000000"
