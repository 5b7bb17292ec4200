"""The shoppers by their real frameworks, in the real shop, with a model that does what is asked."""

from __future__ import annotations

import json

import flywheel
import pytest

from examples.webshop.agent import LOOP_PROMPT, shop_by_loop, shop_by_tools
from examples.webshop.reward import reward
from examples.webshop.site import serve
from examples.webshop.world import PAGE_SIZE, Shop
from tests.examples.loop import in_a_loop
from tests.examples.stub import call, stub

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


@pytest.mark.parametrize("number", [0, 7, 150])
@in_a_loop
async def test_both_shoppers_buy_what_is_asked_for(number):
    shop = Shop()
    steps = plan(shop, number)
    turns = {"tools": 0, "loop": 0}

    def by_tools(_body):
        verb, argument = steps[turns["tools"]]
        turns["tools"] += 1
        return call(verb, turns["tools"], **{"words" if verb == "search" else "label": argument})

    def by_loop(_body):
        verb, argument = steps[turns["loop"]]
        turns["loop"] += 1
        return {"content": f"Next: {verb}[{argument}]"}

    goal = shop.catalogue.goals[number]
    with serve(shop) as url:
        for name, answer, shopper in (("tools", by_tools, shop_by_tools), ("loop", by_loop, shop_by_loop)):
            request = {"shop": url, "session": f"{number}.{name}", "instruction": goal.instruction}
            with stub(answer) as (model, bodies):
                await shopper(request, flywheel.Model.of(model, "m"))
            assert reward(shop.session(f"{number}.{name}").bought, goal)["reward"] == 1.0
            assert len(bodies) == len(steps), "the visit ends with the purchase"
            sent = bodies[-1]["messages"]
            assert sent[0]["role"] == "system" and goal.instruction in str(sent[1]["content"])
            assert all(len(json.dumps(body)) < LONGEST for body in bodies)
            assert all(body["max_tokens"] >= 256 for body in bodies), "room for what Qwen says before it acts"


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
