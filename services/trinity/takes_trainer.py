"""Conversions of values, beyond a change of name: of the algorithm, the data and the trainer."""

from __future__ import annotations

from typing import Any

from services.trinity import algorithms, rows, workflow
from services.trinity.key import Given, NoCounterpart, NotNeeded, Settings, Take
from services.trinity.takes import database_url, is_on, publish_every
from shared.config import ALGORITHMS

STAND_IN = "k2"  # replaces an estimator that is missing here
ESTIMATORS = {  # our estimators for Trinity's, in the reward and in the loss
    "k1": {"reward": "k1"},
    "k2": {"reward": "k2", "loss": "k2"},
    "k3": {"reward": "k3", "loss": "k3"},
    "low_var_kl": {"reward": "k3", "loss": "k3"},
    "corrected_k3": {"reward": "k3"},
    "abs": {},
}
_ONE_TERM = "KL counts in the reward or in the loss, and Trinity has both; kl_in: reward is written"
_LOSS_ARGUMENTS = "algorithm.policy_loss_fn_args"
_BY_TOKEN, _BY_SEQUENCE = "token-mean", "seq-mean-token-mean"
_MEANS = {_BY_TOKEN: "tokens", _BY_SEQUENCE: "sequences"}
_NAME_IT = "name it in policy_loss_fn_args, too, if it is to count"
SHUFFLED = "learn draws a new order of the tasks in each epoch; to begin with easy ones, learn them first"
_KEYS_OF_KL = {"reward": "algorithm.kl_penalty_fn", "loss": "algorithm.kl_loss_fn"}


def database(value: Any, given: Given) -> Settings:
    """Return the ledger's address if Trinity stores experiences in a database."""
    if rows.are_in_a_file(given):
        raise NoCounterpart(rows.what_to_import(value, given), changes_training=True)
    if given.get("buffer.trainer_input.experience_buffer.storage_type") in ("queue", "file"):
        raise NotNeeded("rows wait in the ledger, not in a queue's file")
    return database_url(value, given)


def batch_size(value: Any, given: Given) -> Settings:
    """Return the trainer's batch if only the tasks of a step determine it."""
    if given.get("buffer.train_batch_size"):
        raise NotNeeded("learn keeps the trainer's pace by the rows that wait")
    runs = given.whole("algorithm.repeat_times", "explorer.repeat_times", default=1)
    return {"trainer.batch_size": int(value) * runs}


def epochs(value: Any, given: Given) -> Settings:
    """Return the passes over the tasks, if no number of steps is set."""
    if given.get("buffer.total_steps") or given.get("trainer.total_steps"):
        raise NotNeeded("total_steps counts")
    if given.get("mode") == "train" and int(value) > 1:
        raise NoCounterpart(
            "`flywheel trainer` reads each row once; to read the rows of the ledger more often, do not start it, but "
            "`flywheel export -c flywheel.yaml --tokens --out rows.jsonl` and then, with trainer.ranks: 1, "
            f"`flywheel train -c flywheel.yaml --from rows.jsonl --epochs {value}`",
            changes_training=True,
        )
    return {"learn.epochs": value}


def entropy(value: Any, given: Given) -> Settings:
    """Return the coefficient of the entropy bonus, if Trinity computes the entropy."""
    own = "none" if algorithms.theirs(given) in algorithms.WITHOUT_ENTROPY else "default"
    if str(given.first("algorithm.entropy_loss_fn", default=own)) == "none":
        raise NotNeeded("with entropy_loss_fn none, Trinity ignores it")
    return {"trainer.ALGORITHM.entropy_coef": value}


def steps(value: Any, given: Given) -> Settings:
    """Return the versions after which learn ends, and as many passes over the tasks as they need at most."""
    if not value:
        raise NotNeeded("epochs count")
    if not given.has_tasks:
        raise NoCounterpart("a trainer trains as long as there are rows; stop it after so many", changes_training=True)
    versions = {"learn.versions": -(-int(value) // publish_every(value, given)["trainer.publish_every"])}
    if workflow.example(given) is not None:
        return versions
    tasks = given.whole(*(f"{section}.batch_size" for section in ("buffer", "data", "global_config")), default=1)
    return {**versions, "learn.epochs": int(value) * tasks}


def save_every(value: Any, given: Given) -> Settings:
    """Return the versions between two saved states; Trinity counts updates."""
    if not value:
        raise NotNeeded("0 saves at the end alone; trainer.save_every is 1")
    return {"trainer.save_every": max(1, int(value) // publish_every(value, given)["trainer.publish_every"])}


def keep(value: Any, _given: Given) -> Settings:
    """Return the number of versions that keep their files."""
    if not value:
        raise NoCounterpart("versions.max_versions bounds the folder; `flywheel versions tag` keeps one for good")
    return {"versions.max_versions": max(3, int(value))}


def algorithm(_value: Any, given: Given) -> Settings:
    """Return our algorithm, if there is one."""
    name, found = algorithms.theirs(given), algorithms.counterpart(given)
    if name not in algorithms.TRINITY:
        raise NoCounterpart(f"Trinity has no algorithm {name!r}; choose one of ours", changes_training=True)
    if not found.ours:
        raise NoCounterpart(f"{found.note}; flywheel.yaml says {algorithms.DEFAULT}", changes_training=True)
    surrogate = {"trainer.ALGORITHM.surrogate": found.surrogate} if found.surrogate else {}
    return {"trainer.algorithm": found.ours, **surrogate}


def same_as_algorithm(value: Any, given: Given) -> Settings:
    """Accept a part that Trinity's algorithm has by itself; another part makes another algorithm."""
    if value in algorithms.counterpart(given).parts:
        raise NotNeeded("a part of the algorithm")
    raise NoCounterpart("a part of the algorithm with us; choose one that has it", changes_training=True)


def _kl_terms(given: Given) -> dict[str, tuple[Any, str]]:
    """Return coefficient and estimator of Trinity's KL terms: in the reward, in the loss, in both or in neither."""
    own = "none" if algorithms.theirs(given) in algorithms.WITHOUT_KL else "k2"
    defaults = {"reward": "none", "loss": own}
    found = {}
    for where, key in _KEYS_OF_KL.items():
        estimator = str(given.first(key, default=defaults[where]))
        coefficient = given.first(f"{key}_args.kl_coef", default=0.001)
        if estimator != "none" and coefficient:
            found[where] = coefficient, estimator
    return found


def kl(_value: Any, given: Given) -> Settings:
    """Return the KL term: the one in the reward, or else the one in the loss."""
    terms = _kl_terms(given)
    if not terms:
        return {"trainer.ALGORITHM.kl_coef": 0.0}
    where = next(iter(terms))
    coefficient, theirs = terms[where]
    own = ESTIMATORS.get(theirs, {}).get(where, STAND_IN)
    return {"trainer.ALGORITHM.kl_coef": coefficient, "trainer.ALGORITHM.kl": own, "trainer.ALGORITHM.kl_in": where}


def kl_term(where: str) -> Take:
    """Return a take for a KL term's estimator. It reports two terms, and missing estimators, as changes of training."""

    def take(value: Any, given: Given) -> Settings:
        terms, ours = _kl_terms(given), algorithms.ours(given)
        if where not in terms:
            if terms:
                raise NotNeeded("off")
            return kl(value, given)
        if "kl_coef" not in ALGORITHMS[ours].model_fields:
            raise NoCounterpart(f"{ours} has no KL term here; go without it", changes_training=True)
        if len(terms) > 1 and (where == "loss" or given.get(_KEYS_OF_KL["loss"]) is None):
            raise NoCounterpart(_ONE_TERM, changes_training=True)
        if where not in ESTIMATORS.get(str(value), {}):
            raise NoCounterpart(f"in the {where} KL is {_known(where)}; {STAND_IN} is written", changes_training=True)
        return kl(value, given)

    return take


def _known(where: str) -> str:
    *others, last = sorted({ours[where] for ours in ESTIMATORS.values() if where in ours})
    return f"{', '.join(others)} or {last}"


def kl_coef(where: str) -> Take:
    """Return a take for the coefficient of a KL term, unless the other term is used."""

    def take(value: Any, given: Given) -> Settings:
        terms = _kl_terms(given)
        if terms and where != next(iter(terms)):
            raise NotNeeded(f"the KL term in the {next(iter(terms))} counts")
        return kl(value, given)

    return take


def _loss_mode(given: Given) -> str:
    """Return what Trinity's policy loss averages over.

    Trinity replaces the mode among the loss's arguments by the algorithm's; arguments without a mode have the loss's.
    """
    has_arguments = any(name.startswith(f"{_LOSS_ARGUMENTS}.") for name in given)
    if has_arguments and f"{_LOSS_ARGUMENTS}.loss_agg_mode" not in given:
        return _BY_SEQUENCE if algorithms.theirs(given) == "gspo" else _BY_TOKEN
    return str(given.first("algorithm.loss_agg_mode", default=_BY_TOKEN))


def loss_mean(value: Any, given: Given) -> Settings:
    """Return what the loss averages over."""
    mode = _loss_mode(given)
    if str(value) != mode:
        raise NoCounterpart(f"Trinity's policy loss does not read it, and is {mode}; {_NAME_IT}", changes_training=True)
    if mode not in _MEANS:
        raise NoCounterpart("a loss is a mean over tokens, or over sequences their means", changes_training=True)
    return {"trainer.ALGORITHM.mean": _MEANS[mode]}


def own_mean(given: Given) -> Settings:
    """Return Trinity's mean where it differs from our default."""
    return {"trainer.ALGORITHM.mean": _MEANS[_BY_SEQUENCE]} if _loss_mode(given) == _BY_SEQUENCE else {}


def warmup(value: Any, _given: Given) -> Settings:
    """Return the updates over which the learning rate rises."""
    updates = int(value) if isinstance(value, str) else value
    if updates <= 0:
        raise NotNeeded("off")
    return {"trainer.warmup_updates": updates}


def staleness(value: Any, given: Given) -> Settings:
    """Return the bound on staleness in versions; Trinity counts steps."""
    steps = int(value)
    versions = steps // publish_every(value, given)["trainer.publish_every"]
    return {"trainer.max_staleness_versions": max(min(1, steps), versions)}


def order(value: Any, given: Given) -> Settings:
    """Accept a random order of tasks."""
    if given.get("mode") in ("train", "bench"):
        raise NotNeeded("no tasks are learned from")
    if str(value).lower() in ("shuffle", "random", ""):
        raise NotNeeded("as it is here")
    raise NoCounterpart(SHUFFLED, changes_training=True)


def critic(setting: str) -> Take:
    """Return a take for a setting of the critic, which only PPO has."""

    def take(value: Any, given: Given) -> Settings:
        if algorithms.theirs(given) != "ppo":
            raise NotNeeded("the algorithm has no critic")
        return {f"trainer.ppo.{setting}": value}

    return take


def clip_grad(value: Any, given: Given) -> Settings:
    """Return the optimizer's bound if the trainer has none of its own."""
    if given.get("trainer.grad_clip") is not None:
        raise NotNeeded("trainer.grad_clip counts")
    return {"trainer.max_grad_norm": value}


def task_file(argument_of_learn: str) -> Take:
    """Return a take for tasks, which are read from a file."""

    def take(value: Any, given: Given) -> Settings:
        if not str(value).endswith((".jsonl", ".csv")) and workflow.example(given) is None:
            raise NoCounterpart(f"write the rows of {value} into a .jsonl file, and give that to learn")
        return {argument_of_learn: value}

    return take


def offload(what: str) -> Take:
    """Return a take for DeepSpeed's offloading to the machine's memory; parameters are offloaded by ZeRO 3 alone."""

    def take(value: Any, _given: Given) -> Settings:
        if not is_on(value):
            raise NotNeeded("off")
        zero = "trainer.deepspeed.zero_optimization"
        stage = {f"{zero}.stage": 3} if what == "offload_param" else {}
        return {**stage, f"{zero}.{what}.device": "cpu"}

    return take
