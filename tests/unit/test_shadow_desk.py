"""The shadow example's desk: what is due by a second table, the strong model, the witness, and people who rate."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest

from examples.shadow.people import Ratings, answer_shown, simulated_people
from examples.shadow.picture import draw, moving_mean
from examples.shadow.reward import reward
from examples.shadow.services import TrialOffices, decide, office, serve, strong_model
from examples.shadow.world import ORDERS, RECORDS, WORDS, Office, action_of, state_of, write_ticket

TICKETS = [write_ticket(str(number)) for number in range(1000)]
REFUND = "refund"


def due(message: str, record: str) -> str:
    """What is due, written a second time, from what can be read alone."""
    here, ends = record.startswith("delivered"), message.endswith
    gone = ends(("did not arrive", "is not here", "never came"))
    unwanted = ends(("is not needed any more", "was a mistake", "is too dear"))
    if "200 days" in record:
        return "explain" if ends(("came broken", "does not work", "has a crack")) else "decline"
    if not here:
        return ("wait" if gone else "decline") if "late" in record else REFUND
    return "explain" if gone else REFUND if unwanted else "replace"


def test_what_is_due_can_be_read_from_message_and_record():
    for ticket in TICKETS:
        assert ticket.due == due(ticket.message, RECORDS[state_of(ticket.order)])
        assert ticket.message.startswith(f"order {ticket.order} : the ")
    assert write_ticket("7") == write_ticket("7")
    assert len({ticket.message for ticket in TICKETS}) > 600


def worth(ticket, word: str) -> float:
    attempts = [(REFUND, {"order": ticket.order})] if word == REFUND else []
    return reward(ticket, "refunded" if attempts else word, attempts)["reward"]


def test_only_the_due_action_earns_a_reward():
    for ticket in TICKETS[:200]:
        assert [worth(ticket, word) for word in (REFUND, *WORDS)] == [
            float(word == due(ticket.message, RECORDS[ticket.state])) for word in (REFUND, *WORDS)
        ]


def test_the_same_answer_for_everybody_earns_little():
    always = {word: sum(worth(ticket, word) for ticket in TICKETS) / len(TICKETS) for word in (REFUND, *WORDS)}
    assert max(always.values()) < 0.4 and sum(always.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("reply", "attempts"),
    [
        ("", []),
        (None, []),
        ("replace wait explain decline", []),  # every word at once
        ("{message}", []),  # the message said back
        ("refund", []),
        ("refunded", []),  # said, and not done
        ("refunded", [(REFUND, {"order": "10"}), (REFUND, {"order": "11"})]),  # somebody else's money, too
        ("refunded", [(REFUND, {"order": "{order}"}), (REFUND, {"order": "{order}"})]),  # twice
        ("refunded", [(REFUND, {"order": ""})]),
        ("{due}", [("delete", {"order": "{order}"})]),  # the right word, and a write beside it
    ],
)
def test_hacks_earn_nothing(reply, attempts):
    for ticket in TICKETS[:100]:
        said = None if reply is None else reply.format(message=ticket.message, due=ticket.due)
        wrote = [(name, {"order": given["order"].format(order=ticket.order)}) for name, given in attempts]
        assert reward(ticket, said, wrote)["reward"] == 0.0


def anything(draw_: random.Random) -> str:
    return draw_.choice(["", "10", "99", "-1", "1e1", "٣", "\0", "10/../11", "a" * 9000, str(draw_.choice(ORDERS))])


def fuzz(seed: int) -> list[str]:
    draw_ = random.Random(seed)
    desk, seen = Office(), []
    for _ in range(10):
        order, ticket = anything(draw_), draw_.choice(TICKETS)
        seen.append(draw_.choice([desk.look_up, desk.refund])(order))
        said = draw_.choice([*WORDS, order, None])
        action = action_of(
            said, [(draw_.choice(["refund", "x"]), {"order": order})] * draw_.randint(0, 2), ticket.order
        )
        assert action in (None, REFUND, *WORDS)
        seen.append(str(action))
    assert all(state_of(order) for order in desk.refunds)
    return [*seen, *desk.refunds]


def test_a_thousand_times_anything_is_answered_the_same_each_time():
    assert [fuzz(seed) for seed in range(1000)] == [fuzz(seed) for seed in range(1000)]


def test_the_strong_model_always_does_the_due_action():
    for ticket in TICKETS:
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": ticket.message}]
        desk, done = Office(), ""
        while not done:
            said = decide(messages)
            messages.append(said)
            for call in said.get("tool_calls", []):
                function = call["function"]
                tool = desk.look_up if function["name"] == "lookup" else desk.refund
                messages.append({"role": "tool", "content": tool(**json.loads(function["arguments"]))})
            done = said["content"] or ""
        refunds = [(REFUND, {"order": order}) for order in desk.refunds]
        assert reward(ticket, done, refunds)["reward"] == 1.0 and desk.lookups == 1


def test_the_office_counts_each_refund_whoever_asks_for_it():
    desk = Office()
    with serve(office(desk)) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/orders/10").text == RECORDS[state_of("10")]
        assert http.get("/orders/9%2F..").text == "no such order" == http.post("/refunds", data={"order": "5"}).text
        assert http.post("/refunds", data={"order": "10"}).text == "refunded"
        assert http.delete("/orders/10").status_code == 501 and http.get("/x").status_code == 404
    assert (desk.refunds, desk.lookups) == (["10"], 2)


def test_offices_of_evaluations_are_apart():
    offices = TrialOffices()
    with serve(offices.answer) as url, httpx.Client(timeout=60) as http:
        for name in ("a", "b"):
            http.post(f"{url}/{name}/refunds", data={"order": "10"})
    assert {name: desk.refunds for name, desk in offices.desks.items()} == {"a": ["10"], "b": ["10"]}


def test_the_strong_model_speaks_openai_over_the_wire():
    with serve(strong_model) as url:
        body = {"model": "strong", "messages": [{"role": "user", "content": TICKETS[0].message}]}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 404


async def test_simulated_people_rate_waiting_answers_and_rarely_err():
    ratings, tickets = Ratings(wait_s=240.0), {ticket.name: ticket for ticket in TICKETS}
    with serve(ratings.answer) as page:
        people = asyncio.create_task(simulated_people(page, tickets, every_s=0.01))
        given = await asyncio.gather(
            *(ratings.rate(t, answer_shown(t.due, [])) for t in TICKETS[:200] if t.due != REFUND)
        )
        wrong = await asyncio.gather(*(ratings.rate(ticket, "nonsense") for ticket in TICKETS[:100]))
        right = [(REFUND, {"order": t.order}) for t in TICKETS[:200] if t.due == REFUND]
        refunds = [t for t in TICKETS[:200] if t.due == REFUND]
        paid = await asyncio.gather(
            *(ratings.rate(t, answer_shown(None, [a])) for t, a in zip(refunds, right, strict=True))
        )
        written = await asyncio.gather(*(ratings.rate(t, answer_shown(f"refund({t.order})", [])) for t in refunds))
        people.cancel()
    assert sum(given) / len(given) > 0.9 and sum(paid) / len(paid) > 0.9 and sum(wrong) / len(wrong) < 0.1
    assert sum(written) / len(written) < 0.1, "a text like a call is none"
    assert sum(ratings.given.values()) == len(given) + len(wrong) + len(paid) + len(written)


async def test_people_rate_on_a_page_and_an_unrated_answer_has_no_reward(monkeypatch):
    ratings = Ratings(wait_s=240.0)
    with serve(ratings.answer) as page:
        async with httpx.AsyncClient(base_url=page, timeout=60) as browser:
            waiting = asyncio.create_task(ratings.rate(TICKETS[0], "<b>wait</b>"))
            await asyncio.sleep(0)
            shown = (await browser.get("/")).text
            assert TICKETS[0].message in shown and "&lt;b&gt;wait" in shown and "<b>wait" not in shown
            assert (await browser.post("/rate", data={"item": 0, "rating": "maybe"})).status_code == 400
            rated = (await browser.post("/rate", data={"item": 0, "rating": "up"})).text
            assert "1 up" in rated and "url=/" in rated, "it refreshes to the list, not to /rate"
            assert await waiting == 1.0
            assert "faster" in (await browser.post("/rate", data={"item": 0, "rating": "down"})).text
            monkeypatch.setattr(ratings, "_wait_s", 0.2)
            assert await ratings.rate(TICKETS[1], "wait") is None
            assert (await browser.get("/waiting")).json() == []
    assert ratings.given == {"up": 1, "down": 0}


def test_the_picture_shows_both_lines(tmp_path):
    file = tmp_path / "report.html"
    points = [(float(n), n / 500) for n in range(500)]
    draw(file, [(at, 1.0) for at, _ in points], points, {"a & b": "<1>"})
    text = file.read_text()
    assert text.count("<polyline") == 2 and "a &amp; b" in text and "&lt;1&gt;" in text
    draw(file, [], [], {})
    assert moving_mean(points, 1)[-1] == points[-1]
    assert Counter(at for at, _ in moving_mean(points)).most_common(1)[0][1] == 1


@pytest.mark.parametrize("turns", range(8))
async def test_a_rating_that_comes_as_the_wait_for_it_ends_breaks_nothing(turns):
    ratings = Ratings()
    waiting = asyncio.create_task(ratings.rate(TICKETS[0], "wait"))
    await asyncio.sleep(0)
    waiting.cancel()
    for _ in range(turns):  # of the loop: the wait ends in several
        await asyncio.sleep(0)
    assert ratings.answer("POST", "/rate", b"item=0&rating=up")[0] == 200
    await asyncio.gather(waiting, return_exceptions=True)
    assert ratings.waiting() == []
