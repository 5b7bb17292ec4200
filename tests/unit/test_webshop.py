"""The web shop: rewards counted again, search by brute force, anything that may be said, pages of a browser."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from http.client import HTTPConnection

import httpx
import pytest

from examples.webshop import catalogue, reward, site
from examples.webshop.world import MAX_INVALID, MAX_STEPS, PAGE_SIZE, Purchase, Shop, parse_action
from tests.support.forms import FULL

SHOP = Shop()
GOALS = SHOP.catalogue.goals
PRODUCTS = SHOP.catalogue.products


def points(purchase, goal) -> float:
    """The reward counted by hand, from the instruction's words alone: another kind has none of its title's nouns."""
    attribute, kind, rest = re.fullmatch(r"buy a (\w+) (\w+) , (.*) dollars", goal.instruction).groups()
    said = dict(part.rsplit(" ", 1) for part in rest.split(" , "))
    if purchase.product.kind != kind:
        return 0.0
    met = int(attribute in purchase.product.title.split()) + int(purchase.price <= int(said.pop("price below")))
    met += sum(purchase.options.get(name) == value for name, value in said.items())
    return met / (2 + len(said))


def any_purchase(draw: random.Random) -> Purchase:
    product = draw.choice(list(PRODUCTS.values()))
    options = {name: draw.choice(values) for name, values in product.options.items() if draw.random() < 0.8}
    return Purchase(product, options, product.price_with(options))


def test_rewards_equal_a_second_count_of_the_instruction_words():
    draw = random.Random(0)
    for goal in GOALS:
        kin = [product for product in PRODUCTS.values() if product.category == goal.category]
        for purchase in [any_purchase(draw) for _ in range(10)]:
            near = replace(purchase, product=draw.choice(kin))
            for one in (purchase, near):
                assert reward.reward(one, goal)["reward"] == pytest.approx(points(one, goal))


def test_every_goal_can_be_met_and_brute_force_finds_no_purchase_above_1():
    """Of each product in the options that are asked for: others are worth less."""
    for goal in GOALS:
        best = 0.0
        for product in PRODUCTS.values():
            offers = all(value in product.options[name] for name, value in goal.options.items())
            if offers and len(product.options) == len(goal.options):
                bought = Purchase(product, goal.options, product.price_with(goal.options))
                best = max(best, reward.reward(bought, goal)["reward"])
        assert best == 1.0


def test_the_kind_of_a_product_counts_in_webshops_steps():
    goal = replace(GOALS[0], kind="kettle", title="one two three four five six seven eight nine ten eleven")
    far = replace(PRODUCTS["b000"], kind="rug", category=("garden", "pond"))
    of_kind, of_categories = replace(far, kind="kettle"), replace(far, category=goal.category)
    for title, worth, alike in (
        ("nothing", 0.0, 0.0),
        ("one", 0.1, 0.1),
        ("one two", 0.5, 1.0),
        ("one two three", 1.0, 1.0),
    ):
        assert reward.type_reward(replace(far, title=title), goal) == worth
        assert [reward.type_reward(replace(one, title=title), goal) for one in (of_kind, of_categories)] == [alike] * 2


def test_search_ranks_as_bm25_written_out():
    documents = {code: f"{p.title} {' '.join(p.category)}".split() for code, p in PRODUCTS.items()}
    mean = sum(map(len, documents.values())) / len(documents)
    for goal in GOALS[:20]:
        words = [*goal.title.split(), goal.category[0], "unheard"]
        scores = {}
        for code, document in documents.items():
            score = 0.0
            for word in words:
                holders = sum(word in other for other in documents.values())
                idf = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
                n = document.count(word)
                score += idf * n * 2.2 / (n + 1.2 * (0.25 + 0.75 * len(document) / mean))
            scores[code] = score
        found = SHOP.index.find(" ".join(words))
        assert [round(scores[code], 9) for code in found] == sorted(
            (round(s, 9) for s in scores.values() if s), reverse=True
        )[:50]


def good_actions(goal) -> list[str]:
    """A way to the whole reward, with a look at each page of results."""
    wanted = next(c for c, p in PRODUCTS.items() if p.title == goal.title and points_ok(p, goal))
    found = SHOP.index.find(goal.title)
    pages = found.index(wanted) // PAGE_SIZE
    return [f"search[{goal.title}]", *["click[next]"] * pages, f"click[{found.index(wanted) % PAGE_SIZE + 1}]",
            *[f"click[{value}]" for value in goal.options.values()], "click[buy now]"]  # fmt: skip


def points_ok(product, goal) -> bool:
    offers = all(value in product.options[name] for name, value in goal.options.items())
    return offers and product.price_with(goal.options) <= goal.price_below


def test_a_shopper_who_follows_the_instruction_earns_1_within_the_steps():
    for goal in GOALS:
        session = Shop(SHOP.catalogue).session(str(goal.number))
        answers = [session.act(action) for action in good_actions(goal)]
        assert all(answer.valid for answer in answers) and answers[-1].done
        assert reward.reward(session.bought, goal) == {
            "reward": 1.0,
            "metrics": {"bought": 1.0, "type": 1.0, "attributes": 1.0, "options": 1.0, "price": 1.0, "solved": 1.0},
        }


def test_a_value_may_be_named_with_its_option_and_with_no_other():
    session = Shop(SHOP.catalogue).session("3")
    *way, _, _, _, _ = good_actions(session.goal)
    for action in way:
        session.act(action)
    colour, size = session.goal.options["colour"], session.goal.options["size"]
    assert session.click(f"colour {colour}").valid and session.chosen == {"colour": colour}
    assert not session.click(f"colour {size}").valid and not session.click("colour").valid


def test_the_sparse_form_pays_for_all_that_is_wanted_and_takes_from_a_visit_without_a_purchase():
    goal = GOALS[3]
    product = next(p for p in PRODUCTS.values() if p.title == goal.title and points_ok(p, goal))
    whole = Purchase(product, goal.options, product.price_with(goal.options))
    part = replace(whole, options={**goal.options, "size": "none"})
    assert [reward.reward(one, goal, sparse=True)["reward"] for one in (whole, part, None)] == [1.0, 0.0, -0.1]
    assert reward.reward(part, goal)["reward"] == pytest.approx(0.8)


def said_by_anyone(draw: random.Random, session) -> str:
    words = " ".join(
        draw.choices([*catalogue.ATTRIBUTES, "shirt", "tent", "]", "[", "\0", "Ω", ""], k=draw.randint(0, 4))
    )
    label = draw.choice([*session.labels(), "buy now", "next", "previous", "back to search", "b999", words])
    return draw.choice(
        [f"search[{words}]", f"click[{label}]", f"click[{label}]", words, "search[]", "CLICK [ Buy  Now ]"]
    )


def play(seed: int) -> list[str]:
    """A visit in which anything is said, as a transcript."""
    draw = random.Random(seed)
    session = Shop(SHOP.catalogue).session(str(seed % len(GOALS)))
    seen = []
    for _ in range(MAX_STEPS + MAX_INVALID):
        action = said_by_anyone(draw, session)
        before = session.steps
        answer = session.act(action)
        assert session.steps - before == answer.valid
        seen.append(f"{action} -> {answer}")
        if answer.done:
            break
    assert session.done and session.steps <= MAX_STEPS
    assert 0.0 <= reward.reward(session.bought, session.goal)["reward"] <= 1.0
    return seen


def test_visits_of_nonsense_end_without_an_error_and_the_same_each_time():
    seeds = range(1000 if FULL else 200)
    assert [play(seed) for seed in seeds] == [play(seed) for seed in seeds]
    assert catalogue.make_catalogue(5) == catalogue.make_catalogue(5) != catalogue.make_catalogue(6)


def test_actions_that_are_not_possible_are_answered_and_not_counted():
    session = Shop(SHOP.catalogue).session("1")
    for action in ("", "buy", "click[buy now]", "click[red]", "search[ ]"):
        answer = session.act(action)
        assert answer.text.startswith("not possible: ") and not answer.valid and not answer.done
    assert session.steps == 0


@pytest.mark.parametrize(
    "hack",
    [
        ["", "", ""],  # nothing
        ["click[buy now]"],  # a purchase without a product
        ["{instruction}", "search[{instruction}]", "{instruction}"],  # the instruction said back
        ["search[shirt]", "search[shirt]"] * 8,  # looking on and on
        ["click[buy now] search[{title}] click[buy now]"],  # all at once
    ],
)
def test_no_purchase_no_reward(hack):
    for goal in GOALS[:50]:
        session = Shop(SHOP.catalogue).session(str(goal.number))
        for action in hack:
            session.act(action.format(instruction=goal.instruction, title=goal.title))
        assert reward.reward(session.bought, goal)["reward"] == 0.0


def earned(goal, actions) -> float:
    session = Shop(SHOP.catalogue).session(str(goal.number))
    for action in actions(session):
        session.act(action)
    assert session.bought
    return reward.reward(session.bought, goal)["reward"]


def test_buying_anything_earns_far_less_than_buying_the_wanted_product():
    draw = random.Random(0)

    def first_hit(session):
        yield f"search[{session.goal.instruction}]"
        yield "click[1]"
        yield "click[buy now]"

    def first_hit_any_options(session):
        yield f"search[{session.goal.instruction}]"
        yield "click[1]"
        yield from (f"click[{draw.choice(values)}]" for values in session.product.options.values())
        yield "click[buy now]"

    def anything(session):
        yield f"search[{draw.choice(catalogue.ATTRIBUTES)}]"
        yield f"click[{draw.randint(1, len(session.shown))}]"
        yield "click[buy now]"

    means = [sum(earned(goal, f) for goal in GOALS) / len(GOALS) for f in (anything, first_hit, first_hit_any_options)]
    assert means[0] < 0.25 and means[1] < 0.45 and means[2] < 0.6


def test_of_several_actions_in_one_text_the_first_is_done():
    assert parse_action("click[b001] click[buy now]") == ("click", "b001")
    assert parse_action("click[]") == ("click", "") and parse_action("click red") is None


def test_a_browser_walks_through_the_shop_by_its_own_buttons():
    with (
        site.serve(Shop(SHOP.catalogue)) as url,
        httpx.Client(base_url=url, timeout=60, follow_redirects=True) as browser,
    ):
        assert GOALS[7].instruction in browser.get("/").text
        page = browser.get("/s/7").text
        assert GOALS[7].instruction in page and "name=words" in page
        page = browser.post("/s/7", data={"words": GOALS[7].title}).text
        for action in good_actions(GOALS[7])[1:]:
            assert f'value="{action}"' in page, "each step is a button"
            page = browser.post("/s/7", data={"action": action}).text
        assert "bought" in page and "<button" not in page


def test_an_agent_reads_the_same_shop_as_json_and_visits_are_apart():
    shop = Shop(SHOP.catalogue)
    agent = {"Accept": "application/json"}
    with site.serve(shop) as url, httpx.Client(base_url=url, timeout=60, headers=agent) as http:
        assert http.get("/s/7.a").json() == {"text": "search[words]", "done": False, "valid": True}
        first = http.post("/s/7.a", data={"action": "search[tent]"}).json()
        assert first["valid"] and "[1] " in first["text"]
        assert not http.post("/s/7.b", data={"action": "click[next]"}).json()["valid"]
        assert {name: session.steps for name, session in shop.sessions.items()} == {"7.a": 1, "7.b": 0}


@pytest.mark.parametrize("text", ["*" * 9000, "买" * 3000])
def test_a_long_text_is_answered_as_impossible(text):
    agent = {"Accept": "application/json"}
    with site.serve(Shop(SHOP.catalogue)) as url, httpx.Client(base_url=url, timeout=60, headers=agent) as http:
        answer = http.post("/s/1", data={"action": text})
        assert answer.status_code == 200
        assert not answer.json()["valid"] and answer.json()["text"].startswith("not possible: ")


def test_the_site_refuses_unknown_sessions_and_escapes_text():
    with site.serve(Shop(SHOP.catalogue)) as url, httpx.Client(base_url=url, timeout=60) as http:
        for path in ("/s/200", "/s/-1", "/s/x.1", "/s/", "/else", "/s/%3Cb%3E"):
            assert http.get(path).status_code == 404 and "<b>" not in http.get(path).text
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request("POST", "/s/1", headers={"Content-Length": str(site.MAX_BODY_BYTES + 1)})
        refused = connection.getresponse()
        assert (refused.status, refused.headers["Connection"]) == (413, "close"), "its body was not read"
        connection.close()
        assert http.post("/s/1", content=b"\xff\xfe=%zz&action").status_code == 303
        page = http.get("/s/1.%22%3E%3Cscript%3E").text
        assert "<script>" not in page
