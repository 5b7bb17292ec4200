"""A machine's GPUs as Trinity distributes them: engines first, then auxiliary models, then the trainer."""

from __future__ import annotations

import re
from typing import Any

from services.trinity.key import Given, NoCounterpart, NotNeeded, Settings
from services.trinity.takes import MOST_GPUS, ROLLOUT, engines, gpus_per_engine

WITHOUT_TRAINER = ("serve", "explore", "bench")
"""Trinity's modes in which nothing is trained."""
_AUXILIARY = re.compile(r"explorer\.auxiliary_models\.\d+")
_ENGINES = tuple(f"explorer.{place}{name}" for place in ("rollout_model.", "") for name in
                 ("engine_num", "tensor_parallel_size"))  # fmt: skip
_FEWER = "make engine_num or tensor_parallel_size smaller, or start the trainer on another machine, with \
trainer.ranks and trainer.devices of that one"
_MACHINES = "ranks are on one: set trainer.ranks and trainer.devices to GPUs that no engine has, and let each \
engine's url name its machine"
_PARALLEL = "an engine takes more GPUs than tensor_parallel_size says; set its devices, trainer.ranks and \
trainer.devices"
UNKNOWN = "trainer.devices is not set, and the trainer would begin on an engine's GPU: name those that no engine has, \
and in trainer.ranks their number"


def machines(_value: Any, given: Given) -> Settings:
    """Reject several machines: all ranks of a trainer are on one machine."""
    number = given.whole("cluster.node_num", default=1, most=MOST_GPUS)
    if number > 1 and _trains(given):
        raise NoCounterpart(f"{number} machines; {_MACHINES}", changes_training=True)
    raise NotNeeded("`flywheel up` starts all on one machine" if number == 1 else "each engine's url names its machine")


def trainer(_value: Any, given: Given) -> Settings:
    """Assign one rank to each GPU that engines and auxiliary models leave."""
    total = given.whole("cluster.gpu_per_node", default=1, most=MOST_GPUS)
    if not _trains(given):
        raise NotNeeded("nothing is trained in this mode")
    if given.get("mode") == "colocate":
        raise NotNeeded("trainer and engine share a GPU: engine.gpu_share is the engine's part")
    if given.whole("cluster.node_num", default=1, most=MOST_GPUS) > 1:
        raise NotNeeded("with cluster.node_num")
    if any(given.whole(f"{ROLLOUT}{name}_parallel_size", default=1) > 1 for name in ("pipeline", "data")):
        raise NoCounterpart(_PARALLEL, changes_training=True)
    taken = _of_engines(given) + _of_auxiliary_models(given)
    if taken >= total:
        raise NoCounterpart(
            f"engines and auxiliary models take {taken} of {total} GPUs, and trainer and engine e0 are both given "
            f"GPU 0; {_FEWER}",
            changes_training=True,
        )
    return {"trainer.ranks": total - taken, "trainer.devices": list(range(taken, total))}


def is_unknown(given: Given) -> bool:
    """Whether the trainer's GPUs are unspecified although engines have GPUs."""
    return given.first("cluster.gpu_per_node", "cluster.node_num") is None and given.first(*_ENGINES) is not None


def _trains(given: Given) -> bool:
    return given.get("mode") not in WITHOUT_TRAINER


def _of_engines(given: Given) -> int:
    if given.get("mode") == "train" and given.first(*_ENGINES) is None:
        return 0
    return len(engines(None, given)["explorer.engines"]) * gpus_per_engine(given)


def _of_auxiliary_models(given: Given) -> int:
    models = {found.group() for name in given if (found := _AUXILIARY.match(name))}
    sizes = ("engine_num", "tensor_parallel_size")
    counts = ([given.whole(f"{model}.{name}", default=1, most=MOST_GPUS) for name in sizes] for model in models)
    return sum(number * gpus for number, gpus in counts)
