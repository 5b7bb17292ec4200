"""`flywheel trainer`: builds the trainer and runs its loop."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shared.chain import copy_version, read_chain
from shared.config import Config, is_loopback
from shared.errors import ConfigError, RolledBack, StartupError, VersionError
from shared.experience import Experience, Purpose
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import TrainerRow, VersionRow, find_trainer, find_versions, kept_versions, live_trainers
from shared.log import StageLogger, configure_logging
from shared.process import process_name, visible_devices
from shared.stop_request import StopRequest
from shared.versions import read_manifest, verify_version, version_path

if TYPE_CHECKING:
    from trainer_service.learner import Preparation
    from trainer_service.loop import Trainer
    from trainer_service.ranks import Ranks

log = StageLogger("trainer")
T = TypeVar("T", bound="Trainer")

LONGEST_START_S = 86_400.0
DEFAULT_RATES = {"full": 1e-6, "lora": 1e-4}


def run_trainer(config: Config, work: Callable[[Config, Ranks, StopRequest], None] | None = None) -> int:
    """Run until a signal. work: for rank 0; None: `lead`. Returns the exit status."""
    configure_logging("trainer", config.log_level)
    stop = StopRequest().listen()
    os.environ.update(visible_devices(config.trainer.devices))
    with only_the_last_core():
        import torch  # slow to import: only after the configuration is checked

    from trainer_service.ranks import join_ranks, together
    from trainer_service.watch.writer import require_packages

    require_packages(config.trainer.watch)  # before a wait for a first signal, which may take hours
    if config.trainer.devices is not None and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.devices={list(config.trainer.devices)}, and PyTorch sees no GPU; remove it to train on the CPU, "
            "or install PyTorch's build for CUDA and NVIDIA's driver"
        )
    torch.manual_seed(config.trainer.seed)
    torch.set_num_threads(cpu_threads(config))
    ranks = join_ranks(config.trainer.rank_timeout_s)
    with together():
        if ranks.is_first:
            log.info("loading", model=config.model.path, ranks=ranks.size)
            (work or lead)(config, ranks, stop)
        else:
            follow(config, ranks, stop)
        ranks.leave()
    return 0


def lead(config: Config, ranks: Ranks, stop: StopRequest) -> None:
    """Run rank 0, which is often the only one: ledger, folder and loop."""
    from trainer_service.errors import Stopped
    from trainer_service.loop import Trainer

    begins = True
    while begins:
        try:
            with resumed(config, ranks, stop, Trainer) as trainer:
                begins = trainer.run()
        except Stopped:  # during a wait for a teacher or a first signal, with nothing claimed
            log.info("stopped")
            begins = False
        except RolledBack as error:
            log.warning("starting again", reason=str(error))
        ranks.end()
    ranks.end()


@contextlib.contextmanager
def resumed(
    config: Config, ranks: Ranks, stop: StopRequest, kind: type[T], rows: Sequence[Experience] | None = None
) -> Iterator[T]:
    """Yield a trainer with its ledger, folder and models, resumed from its state. rows: those of a file to train on."""
    from trainer_service.agreement import Agreement
    from trainer_service.base_version import ensure_base_version
    from trainer_service.choice import chosen, chosen_for
    from trainer_service.heartbeat import shown_while_it_starts
    from trainer_service.learner import Learner
    from trainer_service.leftovers import remove_leftovers
    from trainer_service.resume import StateStore
    from trainer_service.watch.writer import Watch

    model = config.model
    if model.kind == "lora" and model.lora.rank != model.lora.engine_rank:
        log.info("engines reserve the next higher rank", rank=model.lora.rank, reserved=model.lora.engine_rank)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger, contextlib.ExitStack() as starting:
        ensure_base_version(config, ledger)
        compared = Agreement(ledger, config) if rows is None else contextlib.nullcontext()
        with contextlib.closing(StateStore(config.root, config.trainer.name)) as states, compared:
            row = remove_leftovers(config.root, ledger, config.trainer.name)
            warn_of_others(ledger, config.trainer.name)
            starting.enter_context(shown_while_it_starts(ledger, config.trainer, stop))
            config = chosen(config, ledger, row, stop) if rows is None else chosen_for(config, rows, row)
            start = 0 if row is not None and row.state_path is not None else begin_with(ledger, config.trainer.name)
            folder = _folder_to_start_from(config, ledger, row, start, states.folder)
            prepare = preparations(config, stop)
            ranks.order("begin", str(folder.relative_to(config.root)), config.trainer.parts)
            build, again = (
                partial(build_update, config, one, ranks) for one in (folder, config.root / version_path(0))
            )
            learner = Learner(build, ranks, states, prepare, again)
            try:
                with contextlib.closing(Watch(config.trainer, states.folder)) as watch:
                    trainer = kind(config, ledger, learner, states, stop, watch)
                    trainer.resume(row, start)
                    starting.close()
                    yield trainer
            except RolledBack:  # the models are loaded again in this process
                learner.close()
                raise
            learner.close()


def _folder_to_start_from(config: Config, ledger: Ledger, row: TrainerRow | None, start: int, private: Path) -> Path:
    """Return the folder with the weights that a trainer starts from. private: the trainer's folder.

    row: the trainer's, with its saved state. start: see `begin_with`. Raises StartupError.
    """
    from trainer_service.state_files import require_same_critic

    if row is not None and row.state_path is not None:
        require_same_critic(config.root / row.state_path, config.trainer)
    rows_of = ledger.fetch(partial(find_versions, numbers={0, start}))
    for version in sorted(rows_of):
        _require_whole(config, rows_of[version])
    return _whole_folder(config, rows_of[start], private)


def warn_of_others(ledger: Ledger, trainer: str) -> None:
    """Log that trainers with other names use this ledger."""
    others = [name for name in ledger.fetch(live_trainers) if name != trainer]
    if others:
        log.warning(
            "other trainers are at work on this ledger: all claim from the same rows, and publish versions in turn, "
            "each from its own weights; unless that is meant, end them, or set trainer.name to theirs once they ended",
            trainers=", ".join(others),
        )


def preparations(config: Config, stop: StopRequest) -> list[Preparation]:
    """Return the steps before training that algorithms in use need. Raises ConfigError, StartupError and Stopped."""
    from trainer_service.hints import HintWriter
    from trainer_service.teachers import RemoteTeacher, load_tokenizer, require_same_vocabulary

    base, settings = config.root / version_path(0), config.trainer
    asked: list[Preparation] = []
    if "hint" in settings.parts:
        asked.append(HintWriter.load(base, settings.hint).write)
    if "distill" in settings.parts:
        tokenizer = load_tokenizer(base, "model.path")
        if settings.distill.path is not None:
            require_same_vocabulary(tokenizer, settings.distill)
        else:
            teacher = RemoteTeacher(settings.distill, stop)
            teacher.require_same_tokenizer(tokenizer)
            asked.append(teacher.teach)
    return asked


def follow(config: Config, ranks: Ranks, stop: StopRequest) -> None:
    """Run another rank: it repeats rank 0's work on the models. It reads versions and never opens the ledger."""
    from trainer_service.choice import with_choice
    from trainer_service.learner import Learner

    while (begun := ranks.begin(stop)) is not None:
        start, algorithms = begun
        chosen = with_choice(config, algorithms)
        build, again = (partial(build_update, chosen, config.root / one, ranks) for one in (start, version_path(0)))
        learner = Learner(build, ranks, build_for_state=again)
        learner.follow(stop)
        learner.close()


@contextlib.contextmanager
def only_the_last_core() -> Iterator[None]:
    """Bind this thread to the last core, because vLLM binds its workers to the first cores; see decision 10."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _require_whole(config: Config, row: VersionRow) -> None:
    """Raise StartupError if a version that training starts from is damaged, or is not the one in the ledger."""
    try:
        verify_version(config.root / row.path, row.manifest_sha256)
    except VersionError as exc:
        raise StartupError(f"version {row.version} cannot be trained from: {exc}; restore its folder") from exc


def _whole_folder(config: Config, row: VersionRow, private: Path) -> Path:
    """Return a version's folder with all its weights: for a delta, a copy in the trainer's private folder."""
    folder, copy = config.root / row.path, private / "start"
    shutil.rmtree(copy, ignore_errors=True)
    if read_manifest(folder).form == "whole":
        return folder
    try:
        copy.mkdir()
        copy_version(read_chain(config.root, row.version, row.manifest_sha256), copy)
    except (VersionError, OSError) as exc:
        raise StartupError(f"version {row.version} cannot be trained from: {exc}; restore it, or free space") from exc
    return copy


def cpu_threads(config: Config) -> int:
    """Return the number of PyTorch's threads: more than the free cores would make threads wait at every operation;
    see decision 5."""
    engines_here = sum(is_loopback(engine.host) for engine in config.explorer.engines)
    return config.trainer.cpu_threads or max(1, ((os.cpu_count() or 1) - engines_here) // config.trainer.ranks)


def build_update(config: Config, start: Path, ranks: Ranks):  # type: ignore[no-untyped-def]  # torch is imported inside
    """Build the models and their optimizer. Returns the updater and the policy inside it.

    start: folder of the version that the policy starts from.
    """
    from trainer_service.algorithms.registry import algorithm
    from trainer_service.assembly import assemble, frozen_teachers
    from trainer_service.backends.deepspeed import DeepSpeedBackend, configuration, has_bf16, learning_rate
    from trainer_service.packing import fewest
    from trainer_service.parts import Part, needs_of
    from trainer_service.past_policy import PastPolicy
    from trainer_service.self_test import check_rows
    from trainer_service.update import Updater

    settings = config.trainer
    parts = {name: Part(algorithm(name, settings), weight) for name, weight in settings.parts.items()}
    bf16 = settings.precision == "bf16" or (settings.precision == "auto" and has_bf16())
    models = assemble(config, start, needs_of(parts.values()), bf16=bf16)
    deepspeed = configuration(settings.learning_rate or DEFAULT_RATES[config.model.kind], settings.deepspeed, bf16=bf16)
    rate = learning_rate(deepspeed)
    groups: list[dict[str, Any]] = [{"params": models.own, "lr": rate}]
    if models.critic:
        groups.append({"params": models.critic, "lr": settings.ppo.critic_learning_rate or 10 * rate})
    backend = DeepSpeedBackend(models.module, groups, settings.max_grad_norm, deepspeed, ranks)
    reference = models.reference and models.reference(backend.device)
    teachers, of_teachers = frozen_teachers(config, backend.device, bf16=bf16)
    slow = "hint" in parts and settings.hint.teacher != "live"
    past = PastPolicy(backend, models.own, settings.hint) if slow else None
    rows = fewest((check_rows(models.policy, *models.others), of_teachers))
    return Updater(backend, reference, parts, settings, rows, teachers, past), models.policy


def begin_with(ledger: Ledger, trainer: str) -> int:
    """Return the version that a trainer without a saved state starts from: the newest proven one, or else the newest.

    After a rollback, it is the version that the operator went back to, if that may serve: another trainer may have
    published since. Its files are leased for the trainer until it is announced, but not for longer than a start takes:
    it may die.
    """
    lease: dict[str, Any] = {"reader": trainer, "purpose": Purpose.PARENT}
    with ledger.write() as connection:
        own = find_trainer(connection, trainer)
        returned_to = own.version if own is not None and own.rollbacks else None
        rows = [row for row in kept_versions(connection) if row.may_serve]
        order = {row.version: (row.version == returned_to, row.served_at is not None, row.version) for row in rows}
        for row in sorted(rows, key=lambda row: order[row.version], reverse=True):
            if transitions.lease_version(
                connection, row.version, **lease, owner=process_name(), lasts_s=LONGEST_START_S
            ):
                transitions.release_version(connection, **lease, but=row.version)
                return row.version
    return 0
