"""A shadow run of smolagents' CodeAgent: python code_agent_program.py URL POLICY TIMEOUT_S; prints what became of it.

It runs in the clients' environment with agent_sdk on its path. The model's reply is code that calls `refund`.
"""

import json
import sys

import flywheel
from smolagents import CodeAgent, LogLevel, tool

wrote = []
POLICIES = {"read_only": flywheel.ReadOnlyTools(), "recorded": flywheel.RecordedTools()}


@tool
def refund(order: str) -> str:
    """Refunds an order.

    Args:
        order: Its number.
    """
    wrote.append(order)
    return "refunded"


def main(url, policy, timeout_s):
    (guarded,) = flywheel.guard([refund])

    def agent(request, model):
        if model is None:
            return guarded(order="A1")
        limits = {"timeout_seconds": json.loads(timeout_s)}
        options = {"max_steps": 2, "verbosity_level": LogLevel.OFF, "executor_kwargs": limits}
        return str(CodeAgent([guarded], model.smolagents(), **options).run(request))

    runner = flywheel.TrainingRunner(
        url, agent, lambda run, reply: 1.0, select=flywheel.SamplingRate(1.0), tools=POLICIES[policy]
    )
    runner.start()
    runner.watch(agent)("please refund A1")
    runner.stop(120.0)
    stats = runner.stats
    print(json.dumps({"wrote": wrote, "unsafe": stats.unsafe, "rewarded": stats.rewarded, "error": stats.last_error}))


main(*sys.argv[1:])
