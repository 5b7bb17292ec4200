"""The gain from a second rank: seconds of one update of `mix` by one rank and by two, one thread each.

Unlike the other figures, these are elapsed times, since ranks wait for each other: each rank needs an idle core.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.trainer.cases import rows
from benchmarks.trainer.updates import begin, config_of, experiences, learner_of
from shared.process import die_with_parent
from shared.stop_request import StopRequest
from trainer_service.ranks import join_ranks

ALGORITHM = "reinforce_pp"
UPDATES = 4  # the first is not counted


def measure(repository: Path, folder: Path) -> dict[str, float]:
    """Seconds of an update, and the speedup from two ranks."""
    found = {}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as root:
            begin(config_of(ALGORITHM, str(folder), root))
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command = [sys.executable, "-m", *launcher, "-m", "benchmarks.trainer.ranks", str(folder), root]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=True,
                cwd=repository,
                preexec_fn=die_with_parent(),
            )
            found[f"seconds_by_{ranks}"] = statistics.median(json.loads(done.stdout.splitlines()[-1]))
    return {**found, "times_as_fast": found["seconds_by_1"] / found["seconds_by_2"]}


def main() -> None:
    ranks = join_ranks(600)
    learner = learner_of(config_of(ALGORITHM, *sys.argv[1:]), ranks)
    if not ranks.is_first:
        learner.follow(StopRequest())
        ranks.leave()
        return
    seconds, found = [], experiences(rows("mix"))
    for step in range(UPDATES):
        began = time.perf_counter()
        learner.train(found, step=step, version=step)
        seconds.append(time.perf_counter() - began)
    ranks.end()
    ranks.leave()
    print(json.dumps(seconds[1:]), flush=True)


if __name__ == "__main__":
    main()
