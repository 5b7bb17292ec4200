"""The demo's world: desk, pictures, and a root folder that deletes nothing of the user's."""

from __future__ import annotations

import asyncio
import random
import subprocess
import threading
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples import tiny_model
from examples.serving import Running, make_root
from examples.support_desk import agent, base_model
from examples.support_desk.customers import Episode, say_reward
from examples.support_desk.desk import DESKS, format_answer, parse_answer, satisfaction, write_ticket
from examples.support_desk.report import draw_report, first_and_last_tenth, moving_average
from examples.support_desk.view import Frame, View, sparkline
from services.commands.demo import LESSONS
from services.demo import MARKER, Plan, _play, write_config
from shared.config import HintConfig, load_config
from shared.errors import StartupError
from shared.reward import Signal
from tests.support.experiences import rows
from trainer_service.hints import HintWriter


def test_tickets_are_written_from_a_seed_in_varied_words():
    first, again = ([write_ticket(random.Random(n)) for n in range(300)] for _ in range(2))
    assert first == again
    assert len({ticket.text for ticket in first}) > 280
    assert {ticket.desk for ticket in first} == set(DESKS)


def test_no_word_belongs_to_two_desks():
    from examples.support_desk.desk import DEPARTMENTS

    matters = [matter for desks in DEPARTMENTS.values() for words in desks.values() for matter in words]
    assert len(matters) == len(set(matters))


@pytest.mark.parametrize(
    ("answer", "worth"),
    [("{desk} , {priority}", 1.0), ("{desk} , soon", 0.7), ("nowhere , {priority}", 0.3), ("", 0.0), (",,,", 0.0)],
)
def test_the_desk_counts_for_most_of_the_reward(answer, worth):
    ticket = write_ticket(random.Random(1))
    text = answer.format(desk=ticket.desk, priority=ticket.priority)
    assert satisfaction(ticket, *parse_answer(text)) == pytest.approx(worth)
    assert parse_answer(format_answer(ticket.desk, ticket.priority)) == (ticket.desk, ticket.priority)


def test_moving_average_by_hand():
    assert moving_average([1, 0, 0, 3], 2).tolist() == [1, 0.5, 0, 1.5]


def episodes(count: int) -> list[Episode]:
    return [Episode(float(n), n / count, n % 2 == 0, True) for n in range(count)]


def test_first_and_last_tenth():
    assert first_and_last_tenth(episodes(100)) == pytest.approx((0.045, 0.945))


def test_the_report_is_drawn_also_for_a_short_run(tmp_path):
    for count in (1, 50, 500):
        draw_report(tmp_path / "report.png", episodes(count), [(1, count / 2)], "title")
        assert (tmp_path / "report.png").stat().st_size > 10_000


def test_the_view_knows_how_long_it_will_take():
    frame = Frame(episodes(50), 100, 0, 30.0, None, 3, 0, {}, 4)
    assert frame.done == 0.5
    assert frame.to_go_s == pytest.approx(30.0)
    assert len(sparkline([0.0, 1.0] * 500)) == 60


def test_the_demo_folder_is_recreated_and_any_other_is_left_alone(tmp_path):
    root = tmp_path / "demo"
    make_root(root, MARKER)
    (root / "old").touch()
    make_root(root, MARKER)
    assert not (root / "old").exists()
    stranger = tmp_path / "thesis"
    stranger.mkdir()
    (stranger / "chapter-1").touch()
    with pytest.raises(StartupError, match="holds something that is no demo"):
        make_root(stranger, MARKER)
    assert (stranger / "chapter-1").exists()


@pytest.mark.parametrize("algorithm", LESSONS)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_demo_configuration_is_valid_and_customers_send_its_signals(tmp_path, algorithm, kind):
    plan = Plan(algorithm, kind, seed=3)
    _, file = write_config(tmp_path, tmp_path / "model", tmp_path if algorithm == "distill" else None, plan)
    config = load_config(file)
    assert (config.trainer.seed, config.model.kind) == (3, kind)
    assert plan.voice(write_ticket(random.Random(0)), 1.0).keys() <= config.trainer.learns_from


def test_a_hint_of_the_demo_equals_the_trainer_s_message_for_a_comment(tmp_path):
    """The base model that follows hints has learnt to follow these tokens."""
    tokenizer = tiny_model.make_tokenizer(base_model.recipe())
    said = (Signal("comment", text=format_answer("vpn", "urgent")),)
    [row] = HintWriter(tokenizer, HintConfig(comment=base_model.WORDING), 256).write([replace(*rows(1), signals=said)])
    chat = agent.messages("there is a problem")
    plain, hinted = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in (chat, [base_model.hint("vpn", "urgent"), *chat])
    )
    assert row.hint.tolist() + plain == hinted


def test_a_teacher_of_the_demo_has_the_tokenizer_of_the_base_model():
    assert base_model.recipe().texts == base_model.teachers_recipe().texts


def test_a_misled_teacher_is_shown_the_same_answers_at_other_tickets():
    def tickets_and_answers(recipe):
        messages = [one.messages for one in recipe.demonstrations]
        return [one[-2] for one in messages], [one[-1]["content"] for one in messages]

    (tickets, answers), (same, others) = (
        tickets_and_answers(make()) for make in (base_model.teachers_recipe, base_model.misled_teachers_recipe)
    )
    assert tickets == same and Counter(answers) == Counter(others)
    right = sum(a == b for a, b in zip(answers, others, strict=True)) / len(answers)
    assert right < 0.05  # of 36 desks with three priorities


class Unavailable(BaseHTTPRequestHandler):
    """An explorer whose database does not answer."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{"error": {}}')

    do_POST = do_GET


def test_a_demo_whose_explorer_answers_503_ends_with_one_line(tmp_path):
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server,
        subprocess.Popen(["sleep", "600"]) as up,
        View(quiet=True) as view,
    ):
        threading.Thread(target=server.serve_forever).start()
        url, running = f"http://127.0.0.1:{server.server_port}", Running(up, tmp_path / "flywheel.log")
        try:
            with pytest.raises(StartupError, match="no chat was answered"):
                asyncio.run(_play(url, running, view, Plan(), 2, None, say_reward, tmp_path / "report.png"))
        finally:
            server.shutdown()
            up.kill()
