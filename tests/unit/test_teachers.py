"""A teacher behind an endpoint: real HTTP, scripted answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.config import DistillConfig
from shared.errors import ConfigError
from shared.reward import Signal
from shared.stop_request import StopRequest
from tests.support.batches import rows_batch
from tests.support.experiences import rows
from tests.support.scripted_teacher import Body, ScriptedTeacher, as_vllm
from tests.unit.test_hints import TOKENIZER, byte_tokenizer
from trainer_service import teachers
from trainer_service.errors import Stopped
from trainer_service.teachers import RemoteTeacher, require_same_vocabulary

scripted = as_vllm(TOKENIZER)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedTeacher]:
    monkeypatch.setattr(teachers, "_FIRST_PAUSE_S", 0.01)
    running = ScriptedTeacher(scripted)
    yield running
    running.close()


def teacher_of(server: ScriptedTeacher, stop: StopRequest | None = None, **settings: Any) -> RemoteTeacher:
    return RemoteTeacher(
        DistillConfig(url=server.url, **{"model": "big", **settings}), StopRequest() if stop is None else stop
    )


def test_replies_get_the_teachers_logprobs_of_their_own_tokens(server):
    asked = [replace(row, id=number) for number, row in enumerate(rows(3), start=1)]
    tokens = replace(asked[1].tokens, reply_ids=np.array([7, 9], np.int32), logprobs=np.full(2, -1, np.float32))
    asked[1] = replace(asked[1], tokens=tokens)
    taught = teacher_of(server).teach(asked)
    assert [row.teacher.tolist() for row in taught] == [
        pytest.approx([-0.02]),
        pytest.approx([-0.07, -0.09]),
        pytest.approx([-0.02]),
    ]
    assert sorted(body["prompt"] for _, body, _ in server.asked) == [[1, 2], [1, 2], [1, 7, 9]]
    batch = rows_batch(taught)
    assert {place: one.tolist() for place, one in batch.taught.items()} == {
        0: pytest.approx([-0.02]),
        1: pytest.approx([-0.07, -0.09]),
        2: pytest.approx([-0.02]),
    }


def test_the_teacher_is_not_asked_about_rehearsed_rows_whose_replies_are_not_learned_from(server):
    fresh, rehearsed = rows(2)
    taught = teacher_of(server).teach([fresh, replace(rehearsed, is_rehearsal=True)])
    assert [row.teacher is None for row in taught] == [False, True]
    assert len(server.asked) == 1


def test_the_teacher_is_not_asked_about_demonstrations_which_nobody_sampled(server):
    sampled, shown = rows(2)
    taught = teacher_of(server).teach([sampled, replace(shown, signals=(Signal("demonstration"),))])
    assert [row.teacher is None for row in taught] == [False, True]
    assert len(server.asked) == 1


def test_the_same_tokenizer_is_taken_and_the_only_model_found(server):
    teacher = teacher_of(server, model=None)
    teacher.require_same_tokenizer(TOKENIZER)
    teacher.teach(rows(1))
    assert server.asked[-1][1]["model"] == "big"
    compared = [token for path, body, _ in server.asked if path == "/detokenize" for token in body["tokens"]]
    assert compared == list(range(len(TOKENIZER)))


def test_another_tokenizer_is_refused_by_key_value_and_remedy(server):
    def swapped(path: str, body: Body) -> tuple[int, Any]:
        if path != "/detokenize":
            return scripted(path, body)
        return 200, {"prompt": TOKENIZER.decode([{40: 41, 41: 40}.get(token, token) for token in body["tokens"]])}

    server.answer = swapped
    with pytest.raises(ConfigError, match=rf"trainer\.distill\.url={server.url}: its tokenizer is not .*; name a"):
        teacher_of(server).require_same_tokenizer(TOKENIZER)


@pytest.mark.parametrize("odd", [{"choices": [{}]}, {"choices": []}, {}, []])
def test_a_server_without_prompt_logprobs_is_refused_at_start(odd, server):
    server.answer = lambda path, body: (200, odd) if path == "/v1/completions" else scripted(path, body)
    with pytest.raises(ConfigError, match=r"cannot be a teacher .*name a vLLM server"):
        teacher_of(server).require_same_tokenizer(TOKENIZER)


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        (401, "in trainer.distill.key_env the variable with a key that it takes"),
        (403, "in trainer.distill.key_env the variable with a key that it takes"),
        (404, "a vLLM server of the model's own family, without /v1, and one of its models in trainer.distill.model"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/detokenize", "/v1/completions"])
def test_a_server_that_rejects_the_first_request_is_refused_with_reason_and_fix(path, status, fix, server):
    server.answer = lambda asked, body: (status, {}) if asked == path else scripted(asked, body)
    with pytest.raises(ConfigError) as error:
        teacher_of(server, model=None).require_same_tokenizer(TOKENIZER)
    reason = f"trainer.distill.url={server.url} cannot be a teacher (status {status} for {path}); name "
    assert str(error.value) == reason + fix


@pytest.mark.parametrize("status", [500, 503, 429, 401, 404])
def test_an_unavailable_teacher_is_waited_for_and_logged_once(status, server, caplog):
    answers = iter([status, status, 200])

    def answer(path: str, body: Body) -> tuple[int, Any]:
        now = next(answers, 200)
        return scripted(path, body) if now == 200 else (now, {})

    server.answer = answer
    with caplog.at_level("INFO"):
        [taught] = teacher_of(server, requests_in_flight=1).teach(rows(1))
    assert taught.teacher is not None
    away, back = (record.message for record in caplog.records if record.name == "flywheel.teacher")
    assert "the teacher is away or slow; waiting" in away and f"status {status} for /v1/completions" in away
    assert "the teacher answers again" in back
    assert len(server.asked) == 3


def test_an_answer_that_comes_too_late_is_asked_for_again(server):
    late, first = threading.Event(), threading.Event()

    def answer(path: str, body: Body) -> tuple[int, Any]:
        if not first.is_set():
            teacher._client.timeout = 60.0  # of the next request
            first.set()
            late.wait(60)
        return scripted(path, body)

    server.answer = answer
    teacher = teacher_of(server, timeout_s=1.0)
    [taught] = teacher.teach(rows(1))
    late.set()
    assert taught.teacher is not None and len(server.asked) == 2


def test_a_stop_ends_the_wait(server):
    stop = StopRequest()

    def answer(_path: str, _body: Body) -> tuple[int, Any]:
        stop.set()
        return 503, {}

    server.answer = answer
    with pytest.raises(Stopped):
        teacher_of(server, stop).teach(rows(3))


def test_a_row_that_the_teacher_refuses_is_counted_and_delays_no_other_row(server):
    def answer(path: str, body: Body) -> tuple[int, Any]:
        return (400, {"error": "too long"}) if body["prompt"][1] == 7 else scripted(path, body)

    server.answer = answer
    asked = [replace(row, id=number) for number, row in enumerate(rows(2), start=1)]
    asked[0] = replace(asked[0], tokens=replace(asked[0].tokens, reply_ids=np.array([7], np.int32)))
    taught = teacher_of(server).teach(asked)
    assert [row.unused for row in taught] == [("teacher_refused",), ()]
    batch = rows_batch(taught)
    assert (dict(batch.unused), list(batch.taught)) == ({"teacher_refused": 1}, [1])


def test_a_row_on_which_the_teacher_fails_each_time_holds_no_other_up_while_it_answers_those(server):
    """As vLLM does where a logprob is no number."""
    stop, asked = StopRequest(), rows(2)
    asked[0] = replace(asked[0], tokens=replace(asked[0].tokens, reply_ids=np.array([7], np.int32)))
    server.answer = lambda path, body: (500, {}) if body["prompt"][1] == 7 else scripted(path, body)
    limit = threading.Timer(20, stop.set)
    limit.start()
    assert [row.unused for row in teacher_of(server, stop).teach(asked)] == [("teacher_refused",), ()]
    limit.cancel()


def test_the_key_comes_from_its_variable(server, monkeypatch):
    with pytest.raises(ConfigError, match=r"trainer\.distill\.key_env=TEACHER_KEY: the variable is not set"):
        teacher_of(server, key_env="TEACHER_KEY")
    monkeypatch.setenv("TEACHER_KEY", "sesame")
    teacher_of(server, key_env="TEACHER_KEY").teach(rows(1))
    assert server.asked[-1][2] == "Bearer sesame"


def test_a_key_from_a_file_with_a_line_end_is_sent_without_it(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "abc\r\n")
    stop = StopRequest()
    limit = threading.Timer(5, stop.set)
    limit.start()
    teacher_of(server, stop, key_env="TEACHER_KEY").teach(rows(1))
    limit.cancel()
    assert server.asked[-1][2] == "Bearer abc"


@pytest.mark.parametrize("key", ["schlüssel", "abc\ndef"])
def test_a_key_that_no_header_may_have_is_refused_and_not_shown(key, server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", key)
    with pytest.raises(ConfigError, match=r"key_env=TEACHER_KEY: the variable holds characters that no") as refused:
        teacher_of(server, key_env="TEACHER_KEY")
    assert key not in str(refused.value)


def test_the_tokenizer_of_a_folder_is_compared_entry_by_entry(tmp_path):
    TOKENIZER.save_pretrained(tmp_path / "same")
    other = byte_tokenizer()
    other.add_tokens(["<one more>"])
    other.save_pretrained(tmp_path / "other")
    require_same_vocabulary(TOKENIZER, DistillConfig(path=str(tmp_path / "same")))
    with pytest.raises(ConfigError, match=r"trainer\.distill\.path=.*other: .*\(1 entries differ\); name a teacher"):
        require_same_vocabulary(TOKENIZER, DistillConfig(path=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match=r"trainer\.distill\.path=.*nowhere has no tokenizer"):
        require_same_vocabulary(TOKENIZER, DistillConfig(path=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("logprob", [-np.inf, -9999.0])  # the second is what vLLM sends in place of the first
@pytest.mark.parametrize("place", [0, 1])
def test_a_reply_with_a_token_that_is_impossible_to_the_teacher_is_left_out(place, logprob, server):
    def answer(path: str, body: Body) -> tuple[int, Any]:
        status, said = scripted(path, body)
        said["choices"][0]["prompt_logprobs"][1 + place] = {str(body["prompt"][1 + place]): {"logprob": logprob}}
        return status, said

    server.answer = answer
    [row] = rows(1)
    ids = {"prompt_ids": np.array([1, 5], np.int32), "reply_ids": np.array([7], np.int32)}
    [taught] = teacher_of(server).teach([replace(row, tokens=replace(row.tokens, **ids))])
    assert taught.unused == ((), ("teacher_refused",))[place], "what it thinks of the prompt counts for nothing"
