"""Collector: what passes is written down, streams included, and nothing of it disturbs the call."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import threading
from typing import Any

import flywheel
import numpy as np
import openai
import pytest
from flywheel import collect
from flywheel.replies import read_reply
from flywheel.transport import current_run

from tests.sdk.test_client import answering

HI = [{"role": "user", "content": "hi"}]


def lines(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_chats_streams_rewards_and_feedback_are_joined(explorer, scripted_engine, tmp_path):
    scripted_engine.script.message = {"reasoning_content": "a greeting"}
    with flywheel.Collector(tmp_path / "log.jsonl") as collector:
        with openai.OpenAI(base_url=f"{explorer.url}/v1", api_key="k", http_client=collector.http_client()) as client:
            first = client.chat.completions.create(model="agent", messages=HI)
            events = list(client.chat.completions.create(model="agent", messages=HI, stream=True))
            client.models.list()
        collector.reward(first.id, task_completion=0.8, efficiency=0.6)
        collector.feedback(first.id, rating=4, comment="good")
        assert collector.export(tmp_path / "out.jsonl") == 2
    whole, streamed = lines(tmp_path / "out.jsonl")
    assert whole["messages"][-1]["content"] == first.choices[0].message.content
    assert whole["thoughts"] == [{"step": 1, "content": "a greeting"}]
    assert (whole["reward"], whole["user_feedback"]) == (pytest.approx(1.4), {"rating": 4, "comment": "good"})
    assert whole["signals"] == [
        {"kind": "metric", "name": "task_completion", "value": 0.8},
        {"kind": "metric", "name": "efficiency", "value": 0.6},
        {"kind": "metric", "name": "rating", "value": 4.0},
        {"kind": "reward", "value": whole["reward"]},
        {"kind": "comment", "text": "good"},
    ]
    said = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert (streamed["msg_id"], streamed["messages"][-1]["content"]) == (events[0].id, said)
    assert (collector.stats.rows, collector.stats.failed, collector.stats.dropped) == (2, 0, 0)


async def test_the_async_client_collects_the_run_of_its_context(explorer, tmp_path):
    with flywheel.Collector(tmp_path / "log.jsonl", fields=("messages",)) as collector:
        http = collector.async_http_client()
        async with openai.AsyncOpenAI(base_url=f"{explorer.url}/v1", api_key="k", http_client=http) as client:
            await asyncio.gather(*(client.chat.completions.create(model="agent", messages=HI) for _ in range(8)))
    assert len(lines(tmp_path / "log.jsonl")) == 8
    assert "thoughts" not in lines(tmp_path / "log.jsonl")[0]


def chat(collector: flywheel.Collector, url: str) -> str | None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", http_client=collector.http_client()) as client:
        return client.chat.completions.create(model="agent", messages=HI).choices[0].message.content


def broken(row: Any) -> Any:
    raise RuntimeError("a bug in the redaction")


@pytest.mark.parametrize(
    ("options", "written", "failed", "dropped"),
    [({"redact": broken}, 0, 1, 0), ({"redact": lambda row: None}, 0, 0, 0), ({"max_mb": 0}, 0, 0, 1)],
)
def test_any_failure_is_counted_and_the_call_continues(explorer, tmp_path, options, written, failed, dropped):
    with flywheel.Collector(tmp_path / "log.jsonl", **options) as collector:
        assert chat(collector, explorer.url)
    assert len(lines(tmp_path / "log.jsonl")) == written
    assert (collector.stats.failed, collector.stats.dropped) == (failed, dropped)


def test_redaction_comes_before_anything_is_written(explorer, tmp_path):
    def redact(row: dict[str, Any]) -> dict[str, Any]:
        row["messages"][0]["content"] = "[redacted]"
        return row

    with flywheel.Collector(tmp_path / "log.jsonl", redact=redact) as collector:
        chat(collector, explorer.url)
    assert '"hi"' not in (tmp_path / "log.jsonl").read_text()


def test_an_answer_that_is_compressed_is_read(tmp_path):
    reply = {"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": "zipped"}}]}
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    server = answering(lambda n, request: (200, headers, gzip.compress(json.dumps(reply).encode())))
    with server as url, flywheel.Collector(tmp_path / "log.jsonl") as collector:
        assert chat(collector, url) == "zipped"
    assert lines(tmp_path / "log.jsonl")[0]["messages"][-1]["content"] == "zipped"


def test_a_streamed_tool_call_is_put_together():
    deltas = [{"index": 0, "id": "c1", "function": {"name": "search", "arguments": ""}}]
    deltas += [{"index": 0, "function": {"arguments": piece}} for piece in ('{"q":', ' "a"}')]
    events = [{"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]} for delta in deltas]
    content = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    _, _, messages = read_reply(content + b"data: [DONE]\n\n")
    assert messages[0]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q": "a"}'}
    with pytest.raises(ValueError, match="broke off"):
        read_reply(content)


def test_an_unknown_field_is_refused(tmp_path):
    with pytest.raises(flywheel.ConfigError, match="smell"):
        flywheel.Collector(tmp_path / "log.jsonl", fields=("smell",))


def test_a_log_whose_last_line_was_cut_by_a_crash_is_gone_on_with(explorer, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"messages": [], "msg_id": "whole"}\n{"messages": [{"role": "us')
    with flywheel.Collector(log) as collector:
        answer = chat(collector, explorer.url)
        assert collector.export(tmp_path / "out.jsonl") == 2
    first, second = lines(tmp_path / "out.jsonl")
    assert (first["msg_id"], second["messages"][-1]["content"]) == ("whole", answer)


def test_a_collector_that_is_closed_twice_exports(tmp_path):
    with flywheel.Collector(tmp_path / "chats.jsonl") as collector:
        collector.close()
    exporting = threading.Thread(target=collector.export, args=(tmp_path / "rows.jsonl",), daemon=True)
    exporting.start()
    exporting.join(60)
    assert not exporting.is_alive()


def test_a_part_of_a_reward_that_is_none_is_left_out(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [], "msg_id": "m"}\n')
    with flywheel.Collector(path) as collector:
        collector.reward("m", quality=np.float32(0.5), judged=None)
    assert collector.export(tmp_path / "rows.jsonl") == 1
    assert json.loads((tmp_path / "rows.jsonl").read_text())["reward"] == 0.5


def test_a_rating_is_any_type_s_finite_number(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [], "msg_id": "m"}\n')
    with flywheel.Collector(path) as collector:
        collector.feedback("m", rating=np.int64(4))
        with pytest.raises(flywheel.ConfigError, match="rating=nan"):
            collector.feedback("m", rating=float("nan"))
    collector.export(tmp_path / "rows.jsonl")
    assert json.loads((tmp_path / "rows.jsonl").read_text())["signals"][0]["value"] == 4.0


def test_an_export_onto_the_log_itself_is_refused_and_the_log_is_kept(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [], "msg_id": "m"}\n')
    with flywheel.Collector(path) as collector, pytest.raises(flywheel.ConfigError, match="the log itself"):
        collector.export(path)
    assert len(lines(path)) == 1


async def test_a_proxy_is_used_and_its_chats_are_recorded_and_belong_to_the_run(tmp_path):
    reply = {"id": "c", "choices": [{"message": {"role": "assistant", "content": "hi"}}]}
    seen: list[Any] = []

    def answer(number: int, request: Any) -> Any:
        seen.append((request.path, request.headers["X-Flywheel-Task"]))
        return 200, {"Content-Type": "application/json"}, json.dumps(reply).encode()

    target, body = "http://explorer.invalid:8010/v1/chat/completions", {"model": "agent", "messages": HI}
    run = flywheel.Client("http://explorer.invalid:8010").run("t")
    token = current_run.set(run)
    with answering(answer) as proxy, flywheel.Collector(tmp_path / "log.jsonl") as collector:
        for client in (collector.http_client(proxy=proxy), flywheel.http_client(proxy=proxy)):
            await asyncio.to_thread(client.post, target, json=body)
            client.close()
        for opened in (collector.async_http_client(proxy=proxy), flywheel.async_http_client(proxy=proxy)):
            async with opened:
                await opened.post(target, json=body)
    current_run.reset(token)
    assert seen == [(target, None), (target, "t")] * 2
    assert (collector.stats.rows, run.msg_ids) == (2, ["c", "c"])


def test_what_comes_after_the_close_is_dropped_and_an_export_does_not_wait_for_it(tmp_path):
    with flywheel.Collector(tmp_path / "chats.jsonl") as collector:
        pass
    collector.reward("m", quality=0.5)
    exporting = threading.Thread(target=collector.export, args=(tmp_path / "rows.jsonl",), daemon=True)
    exporting.start()
    exporting.join(60)
    assert not exporting.is_alive()
    assert collector.stats.dropped == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_close_does_not_wait_for_a_thread_that_has_ended(explorer, tmp_path):
    collector = flywheel.Collector(tmp_path / "chats.jsonl", redact=lambda row: sys.exit(), queue_size=1)
    chat(collector, explorer.url)
    collector._thread.join(60)
    collector.reward("m", quality=0.5)
    closing = threading.Thread(target=collector.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_a_reply_that_is_too_long_is_dropped_and_no_failure(explorer, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "_MOST_BYTES", 10)
    with flywheel.Collector(tmp_path / "chats.jsonl") as collector:
        assert chat(collector, explorer.url)
    assert (collector.stats.dropped, collector.stats.failed, collector.stats.last_error) == (1, 0, None)
