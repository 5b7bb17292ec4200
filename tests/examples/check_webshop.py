"""The shoppers by their real frameworks, in the real shop, with a model that does what is asked."""

from __future__ import annotations

import json

import flywheel
import openai
import pytest

from examples.webshop.agent import LOOP_PROMPT, shop_by_loop, shop_by_tools
from examples.webshop.reward import reward
from examples.webshop.site import serve
from examples.webshop.world import PAGE_SIZE, Shop
from tests.examples.loop import in_a_loop
from tests.examples.stub import at_once, call, stub

FULL = ("maximum context length is 9", "longer than the maximum model length", "max_tokens must be at least 1, got 0")
LONGEST = 8000  # characters of a chat: Qwen has room for four times as much


def plan(shop: Shop, number: int) -> list[tuple[str, str]]:
    """Verbs and arguments that earn the whole reward."""
    goal = shop.catalogue.goals[number]
    found = shop.index.find(goal.title)
    wanted = next(
        code
        for code in found
        if (product := shop.catalogue.products[code]).title == goal.title
        and all(value in product.options[name] for name, value in goal.options.items())
        and product.price_with(goal.options) <= goal.price_below
    )
    pages = [("click", "next")] * (found.index(wanted) // PAGE_SIZE)
    options = [("click", value) for value in goal.options.values()]
    return [
        ("search", goal.title),
        *pages,
        ("click", str(found.index(wanted) % PAGE_SIZE + 1)),
        *options,
        ("click", "buy now"),
    ]


def as_call(number: int, verb: str, argument: str) -> dict:
    return call(verb, number, **{"words" if verb == "search" else "label": argument})


def as_text(_number: int, verb: str, argument: str) -> dict:
    return {"content": f"Next: {verb}[{argument}]"}


SHOPPERS = {"tools": (shop_by_tools, as_call), "loop": (shop_by_loop, as_text)}


async def visit(shop: Shop, session: str, shopper, replies: list[dict]):
    """A visit of a model that gives these replies. Returns its session and the bodies of its chats."""
    left = iter(replies)
    with serve(shop) as url, stub(lambda _: next(left)) as (model, bodies):
        request = {"shop": url, "session": session, "instruction": shop.session(session).goal.instruction}
        await shopper(request, flywheel.Model.of(model, "m"))
    return shop.session(session), bodies


@pytest.mark.parametrize("number", [0, 7, 150])
@in_a_loop
async def test_both_shoppers_buy_what_is_asked_for(number):
    shop = Shop()
    steps, goal = plan(shop, number), shop.catalogue.goals[number]
    for name, (shopper, said) in SHOPPERS.items():
        replies = [said(turn, *step) for turn, step in enumerate(steps)]
        session, bodies = await visit(shop, f"{number}.{name}", shopper, replies)
        assert reward(session.bought, goal)["reward"] == 1.0
        assert len(bodies) == len(steps), "the visit ends with the purchase"
        sent = bodies[-1]["messages"]
        assert sent[0]["role"] == "system" and goal.instruction in str(sent[1]["content"])
        assert all(len(json.dumps(body)) < LONGEST for body in bodies)
        assert all(body["max_tokens"] >= 256 for body in bodies), "room for what Qwen says before it acts"


@in_a_loop
async def test_the_calls_of_one_reply_are_done_in_their_order():
    shop = Shop()
    steps = [as_call(turn, *step) for turn, step in enumerate(plan(shop, 7))]
    for n in range(20):
        session, _ = await visit(shop, f"7.{n}", shop_by_tools, [*steps[:-4], at_once(steps[-4:])])
        assert reward(session.bought, session.goal)["reward"] == 1.0


@pytest.mark.parametrize("name", SHOPPERS)
@in_a_loop
async def test_a_shopper_still_buys_after_ten_impossible_actions(name):
    shop, (shopper, said) = Shop(), SHOPPERS[name]
    steps = [("click", "nothing")] * 10 + plan(shop, 7)
    session, bodies = await visit(shop, "7", shopper, [said(turn, *step) for turn, step in enumerate(steps)])
    assert reward(session.bought, session.goal)["reward"] == 1.0
    assert (session.invalid, len(bodies)) == (10, len(steps))


@pytest.mark.parametrize("name", SHOPPERS)
@in_a_loop
async def test_only_a_history_that_fills_the_context_ends_a_visit_without_an_error(name):
    shop, (shopper, said) = Shop(), SHOPPERS[name]
    begun = [said(turn, *step) for turn, step in enumerate(plan(shop, 7)[:3])]
    for number, words in enumerate(FULL):
        session, bodies = await visit(shop, f"7.{number}", shopper, [*begun, {"error": f"The {words}."}])
        assert session.bought is None and len(bodies) == 4
    for replies in ([{"error": FULL[0]}], [*begun, {"error": "no such tool"}]):
        with pytest.raises(openai.BadRequestError):
            await visit(shop, "7.refused", shopper, replies)


@in_a_loop
async def test_a_visit_ends_unrewarded_where_the_model_calls_a_tool_that_does_not_exist():
    shop = Shop()
    replies = [as_call(0, *plan(shop, 7)[0]), call("buy", 1)]
    session, bodies = await visit(shop, "7.unknown", shop_by_tools, replies)
    assert (session.bought, len(bodies)) == (None, 2)
    assert reward(session.bought, session.goal)["reward"] == 0.0


@in_a_loop
async def test_a_model_that_talks_ends_without_a_purchase():
    shop = Shop()
    with serve(shop) as url:
        for name, shopper in (("tools", shop_by_tools), ("loop", shop_by_loop)):
            request = {"shop": url, "session": f"3.{name}", "instruction": "buy"}
            with stub(lambda _: {"content": ""}) as (model, _):
                await shopper(request, flywheel.Model.of(model, "m"))
            assert shop.session(f"3.{name}").bought is None


@in_a_loop
async def test_the_tiny_prompt_stands_in_for_the_long_one():
    shop = Shop()
    with serve(shop) as url, stub(lambda _: {"content": ""}) as (model, bodies):
        request = {"shop": url, "session": "3", "instruction": "buy"}
        await shop_by_loop(request, flywheel.Model.of(model, "m"), prompt="shop")
        assert bodies[0]["messages"][0]["content"] == "shop" != LOOP_PROMPT
