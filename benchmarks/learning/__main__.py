"""How fast, how well and how robustly each algorithm learns from each form of feedback.

    python -m benchmarks.learning [--cases sparse,wrong/clean] [--first-seed N] [--seeds N] [--curves FOLDER]
                                 [--out FILE] [--peers PYTHON]

The support desk on the trainer's own code, sampled from its own policy (see world.py and run.py). A case is one of
cases.py, or `styles`: two tasks of opposite style learnt one after the other, with and without rehearsal. Prints JSON:
for each case the figures of each seed, their medians and ranges. An existing file is completed: its cases do not run
again.

Cases of corrections also report the worth of replies in three departments that nobody corrects: `uncorrected_before`,
`uncorrected_after`, and the difference, `uncorrected_lost`. With --peers, the Python of a virtual environment with
requirements/peers.txt, TRL's trainers learn from the same customers (see peers.py): `sparse/TRL GRPO` and others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.cases import CASES, correction, each, reversed_correction
from benchmarks.learning.peers import PEERS, open_trl
from benchmarks.learning.run import Contestant, Curve, Plan, learn, open_desk
from benchmarks.learning.world import DEPARTMENTS, STEPS, World, make_base, worth
from examples.support_desk import desk
from examples.support_desk.base_model import base_model, teacher

REACHABLE = 1.0  # a ticket determines both, its desk and its priority
ENOUGH = 0.9
SMOOTH = 5  # versions in the running mean of a curve
STYLES = ("styles/no rehearsal", "styles/rehearsal")
OTHERS = ("devices", "network", "travel")  # departments of the second task
JUDGED = 400  # replies
CORRECTED = "corrections/"  # cases whose replies in other departments are judged too
JUDGED_ELSEWHERE = 4000  # enough for a difference of 0.02


def main() -> None:
    """Run the requested cases and print their figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", metavar="PYTHON", type=lambda text: str(Path(text).absolute()))
    args = parser.parse_args()
    parts, names = args.cases.split(","), [*CASES, *STYLES, *(PEERS if args.peers else ())]
    chosen = [[part] if part in names else [name for name in names if name.startswith(part)] for part in parts]
    if not all(chosen):
        parser.error(f"--cases: no case begins with {parts[chosen.index([])]!r} (those of peers need --peers)")
    wanted = list(dict.fromkeys(name for some in chosen for name in some))
    torch.set_num_threads(1)
    source = base_model(lambda *_: None)
    base = make_base(source, source.parent / f"{source.name}-follows-hints-{STEPS}")
    if "sparse/distill" in wanted:
        teacher(lambda *_: None)
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in wanted:
            runs = found.setdefault(name, {"seeds": {}})["seeds"]
            if str(seed) not in runs:
                runs[str(seed)] = run_case(name, base, seed, args.peers)
                found[name] |= summary(list(runs.values()))
                if args.out:
                    save(found, args.out)
    if args.curves:
        from benchmarks.learning.pictures import draw

        draw(found, args.curves)
    print(json.dumps({name: {k: v for k, v in one.items() if k != "seeds"} for name, one in found.items()}, indent=1))


def save(found: dict[str, Any], file: Path) -> None:
    """Write the figures, a line for each case."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    file.write_text(f"{{\n{lines}\n}}\n")


def run_case(name: str, base: Path, seed: int, peers: str | None = None) -> dict[str, Any]:
    """The figures of one case with one seed. peers: the Python that runs TRL's cases."""
    curve = run_styles(base, seed, name) if name in STYLES else play(base, seed, name, peers)
    smooth = [statistics.mean(curve.rewards[max(0, n - SMOOTH + 1) : n + 1]) for n in range(len(curve.rewards))]
    enough = next((n for n, value in enumerate(smooth) if n >= SMOOTH and value >= ENOUGH * REACHABLE), None)
    return {
        "first": round(curve.rewards[0], 4),
        "best": round(max(smooth), 4),
        "last": round(statistics.mean(curve.rewards[-2 * SMOOTH :]), 4),
        "episodes": None if enough is None else (enough + 1) * curve.per_version,
        "versions": None if enough is None else enough + 1,
        "seconds": round(curve.seconds, 1),
        **curve.after,
        "figures": curve.last,
        "rewards": [round(one, 4) for one in curve.rewards],
    }


def play(base: Path, seed: int, name: str, peers: str | None) -> Curve:
    """Run one case, ours or a peer's."""
    world, elsewhere = World(base), World(base, OTHERS)
    with contextlib.ExitStack() as stack:
        if name in PEERS:
            assert peers is not None
            plan = PEERS[name].plan
            contestant: Contestant = stack.enter_context(open_trl(base, world, PEERS[name], seed, peers))
        else:
            plan = CASES[name]
            contestant = stack.enter_context(open_desk(base, plan, seed))
        if not name.startswith(CORRECTED):
            return learn(contestant, world, plan, seed)
        before = mean_worth(elsewhere, contestant)
        curve = learn(contestant, world, plan, seed)
        after = mean_worth(elsewhere, contestant)
    figures = {"before": before, "after": after, "lost": before - after}
    curve.after = {f"uncorrected_{name}": round(value, 4) for name, value in figures.items()}
    return curve


def mean_worth(world: World, contestant: Contestant) -> float:
    """The mean worth of a policy's replies; the tickets are always the same."""
    return statistics.mean(map(worth, world.sample(contestant.policy, random.Random(9), JUDGED_ELSEWHERE)))


def run_styles(base: Path, seed: int, name: str) -> Curve:
    """Learn two tasks, one after the other; measure the first one's worth before and after the second."""
    settings = {"algorithm": "sft", "rehearse": 0.25 if name == STYLES[1] else 0.0}
    first = Plan(settings, each(correction), share=0.2, rows=16, versions=100)
    second = replace(first, say=each(reversed_correction))
    one, other = World(base, DEPARTMENTS), World(base, OTHERS)
    with open_desk(base, first, seed) as at_work:
        curve = learn(at_work, one, first, seed)
        policy = at_work.learner.policy
        kept = [statistics.mean(map(worth, one.sample(policy, random.Random(9), JUDGED)))]
        learn(at_work, other, second, seed, first.versions)
        kept.append(statistics.mean(map(worth, one.sample(policy, random.Random(9), JUDGED))))
        turned = [reply for reply in other.sample(policy, random.Random(9), JUDGED) if is_reversed(reply)]
    curve.after = {"learnt": kept[0], "kept": kept[1] / kept[0], "second": len(turned) / JUDGED}
    return curve


def is_reversed(reply: Any) -> bool:
    """Whether the reply is right in the second task's style."""
    priority, _, at = (part.strip() for part in reply.text.partition(","))
    return bool((at, priority) == (reply.ticket.desk, reply.ticket.priority) and at in desk.DESKS)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and range of each figure over the seeds; of episodes only over runs that reached ENOUGH."""
    figures: dict[str, Any] = {"runs": len(runs), "reached": sum(run["episodes"] is not None for run in runs)}
    for name in runs[0]:
        values = [run[name] for run in runs if isinstance(run[name], int | float)]
        if values:
            figures[name] = {"median": statistics.median(values), "range": [min(values), max(values)]}
    return figures


if __name__ == "__main__":
    main()
