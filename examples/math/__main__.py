"""python -m examples.math: an AgentScope agent learns which operation a word problem asks for, in few steps."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from examples.run import Example, parser, run

ABOUT = "A ReAct agent learns which operation a word problem asks for: reward 3.0 correctness, -0.1 steps, 0.5 format."


def example(agentscope: int) -> Example:
    """Return the example, with the settings with which a tiny model learns. agentscope: major version of AgentScope."""
    if agentscope == 1:
        sys.path.insert(0, str(Path(sys.prefix) / "agentscope-1"))  # see requirements/agentscope-1.txt
        from examples.math.agent import agent
    else:
        from examples.math.agent_2 import agent
    from examples.math import tiny, world
    from examples.math.reward import reward

    held_out = [_task(world.make_problem(seed)) for seed in tiny.HELD_OUT]
    asked = {task["question"] for task in held_out}
    tasks = [_task(world.make_problem(seed)) for seed in tiny.TRAINING]
    return Example(
        name="math",
        about=ABOUT,
        workflow=agent,
        judge=reward,
        tasks=[task for task in tasks if task["question"] not in asked],
        held_out=held_out,
        recipe=partial(tiny.recipe, agentscope),
        engine=tiny.ENGINE,
        trainer=tiny.TRAINER,
        learn=tiny.LEARN,
        variant=(f"agentscope {agentscope}",),
    )


def _task(problem: tuple[str, str, str, int, int]) -> dict[str, str]:
    """Return the question for the agent and the right answer."""
    return {"question": problem[0], "answer": problem[1]}


if __name__ == "__main__":
    options = parser("math", ABOUT)
    options.add_argument("--agentscope", type=int, choices=(1, 2), default=1, help="which line of AgentScope")
    arguments = options.parse_args()
    sys.exit(run(example(arguments.agentscope), arguments))
