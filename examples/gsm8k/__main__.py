"""python -m examples.gsm8k: grade-school problems; on a CPU, what half a million parameters can learn of them."""

from __future__ import annotations

import sys

from examples.gsm8k import tiny, world
from examples.gsm8k.agent import agent
from examples.gsm8k.reward import reward
from examples.run import Example, parser, run

ABOUT = "Grade-school word problems: reward 1 for the right number, 0.1 for the form."
TINY = (
    "A tiny model cannot reason: it gets short problems with answers up to 20, and learns the form and which answers "
    "are likely. The real task is for --url with a model that can, and --data."
)


def example(data: str | None, is_tiny: bool) -> Example:
    """Return the example, with the settings with which a tiny model learns. data: source of the real problems."""
    if data:
        problems = world.load(data)
        tasks, held_out = world.split(tiny.short(problems, data) if is_tiny else problems)
    elif is_tiny:
        tasks, held_out = tiny.problems()
    else:
        tasks, held_out = world.split(world.generated(5000, seed=1))
    return Example(
        name="gsm8k",
        about=f"{ABOUT} {TINY}" if is_tiny else ABOUT,
        workflow=agent,
        judge=reward,
        tasks=tasks,
        held_out=held_out[:200],
        recipe=tiny.recipe,
        engine=tiny.ENGINE,
        trainer=tiny.TRAINER,
        learn=tiny.LEARN,
    )


if __name__ == "__main__":
    options = parser("gsm8k", ABOUT)
    options.add_argument("--data", help="GSM8K: a .jsonl or .parquet file, or a data set of Hugging Face")
    arguments = options.parse_args()
    try:
        chosen = example(arguments.data, is_tiny=not arguments.url)
    except (world.CannotRead, OSError, ValueError) as error:
        sys.exit(f"gsm8k: {error}")
    sys.exit(run(chosen, arguments))
