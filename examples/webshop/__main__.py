"""`python -m examples.webshop`: a shopper learns to buy the product that the instruction asks for."""

from __future__ import annotations

import sys
import uuid
from typing import Any

from flywheel import Model

from examples.run import Example, parser, run
from examples.webshop import tiny
from examples.webshop.agent import shop_by_loop, shop_by_tools
from examples.webshop.reward import reward
from examples.webshop.site import serve
from examples.webshop.world import Purchase, Shop

ABOUT = "webshop: 300 products behind real pages; learned: open what fits, choose the options that were asked for, buy"
TRAINING = 150  # goals from this one on are held out


def main() -> int:
    options = parser("webshop", ABOUT)
    options.add_argument("--loop", action="store_true", help="the plain search[…]/click[…] loop instead of the SDK")
    options.add_argument(
        "--sparse", action="store_true", help="reward 1 for all that is wanted, -0.1 for nothing, else 0"
    )
    args = options.parse_args()
    shop = Shop()
    shopper, recipe = (shop_by_loop, tiny.loop_recipe) if args.loop else (shop_by_tools, tiny.tools_recipe)
    agent_options = {} if args.url else tiny.LOOP if args.loop else tiny.TOOLS
    tasks = [{"goal": goal.number, "instruction": goal.instruction} for goal in shop.catalogue.goals]

    async def workflow(task: dict[str, Any], model: Model) -> Purchase | None:
        name = f"{task['goal']}.{uuid.uuid4().hex}"
        session = shop.session(name)
        try:
            await shopper({"shop": url, "session": name, "instruction": task["instruction"]}, model, **agent_options)
        finally:
            shop.close(name)
        return session.bought

    def judge(task: dict[str, Any], reply: Purchase | None) -> dict[str, Any]:
        return reward(reply, shop.catalogue.goals[task["goal"]], sparse=args.sparse)

    engine = tiny.ENGINE if args.loop else tiny.ENGINE | {"tool_parser": "hermes"}
    example = Example(
        "webshop", ABOUT, workflow, judge, tasks[:TRAINING], tasks[TRAINING:], recipe, engine, tiny.TRAINER, tiny.LEARN,
        variant=("loop",) if args.loop else ("tools",),
    )  # fmt: skip
    with serve(shop) as url:
        print(f"the shop is at {url}", file=sys.stderr)
        return run(example, args)


if __name__ == "__main__":
    sys.exit(main())
