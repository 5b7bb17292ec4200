"""What the ledger costs: empty and full, alone and beside its peer, on SQLite and PostgreSQL. Prints one JSON line.

    .venv/bin/python -m benchmarks.ledger [--peers PYTHON] [--only PART ...] [--rows 1000000]

record: durable records a second, 64 writers of single chats; beside it all rows by executemany in one transaction, and
Trinity-RFT's recorder on the same disk (--peers: see front_door.py, and asyncpg). flat: the slowest hundredth of
record, feedback, claim and publish with so many rows over that with 10,000, measured in turns. snapshot: claims a
second while someone holds a snapshot open on PostgreSQL, over those on a database beside it of which nobody does, in
turns. bytes: of an experience, indexes included. conversations: of ten turns, with what their prompts share stored
once, and whole. All databases are durable (fsync on).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from sqlalchemy import select, text, update

from explorer_service.conversation import DIGEST_BYTES
from explorer_service.record import Recorder
from shared.config import RewardConfig, TrainerConfig
from shared.experience import Sample, Sampling, Tokens, new_message_id
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.prefix import load_tokens, split_off
from shared.ledger.tables import experiences
from shared.lifecycle import StopRequest
from shared.metrics import ExplorerMetrics
from shared.reward import Signal
from tests.postgres import Postgres
from trainer_service.claim import Claimer

REPOSITORY = Path(__file__).parents[1]
N_PROMPT, N_REPLY = 100, 64
WRITERS = 64
SMALL = 10_000
Figures = dict[str, float]
_draw = np.random.default_rng(0)


def make_sample(n_prompt: int = N_PROMPT, n_reply: int = N_REPLY, **more: Any) -> Sample:
    """A chat of its own conversation, with ids of a vocabulary of 150,000."""
    tokens = Tokens(
        _draw.integers(0, 150_000, n_prompt, dtype=np.int32),
        _draw.integers(0, 150_000, n_reply, dtype=np.int32),
        -_draw.random(n_reply, dtype=np.float32),
    )
    name = new_message_id("chatcmpl-")
    more = {"exchange": os.urandom(DIGEST_BYTES), **more}
    return Sample(name, 0, 0, 0, tokens, Sampling(), "stop", time.time(), 0.1, **more)


class Databases:
    """Empty durable databases of both kinds on one disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = Postgres(folder, durable=True)

    def url(self, kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{self._folder / uuid.uuid4().hex}.sqlite3"
        return self._server.new_database()

    def open(self, kind: str) -> Ledger:
        return Ledger.open(self.url(kind).replace("postgresql://", "postgresql+psycopg://"))

    def stop(self) -> None:
        self._server.stop()


# ------------------------------------------------------------------------------------------------------ record


def measure_record(databases: Databases, kind: str, peers: str | None, seconds: int = 5, turns: int = 3) -> Figures:
    """In turns: what the disk and the machine do meets both; medians of them. The peer comes last."""
    records, rows_at_once = [], []
    with closing(databases.open(kind)) as ledger:  # not counted: a new PostgreSQL makes the files of its log first
        asyncio.run(_write_with_64(ledger, seconds))
    for _ in range(turns):
        os.sync()  # nothing of making the database is still on its way to the disk
        with closing(databases.open(kind)) as ledger:
            records.append(asyncio.run(_write_with_64(ledger, seconds)))
        with closing(databases.open(kind)) as ledger:
            rows_at_once.append(_write_at_once(ledger, 20_000))
    result = {"records_per_s": statistics.median(records), "one_transaction_per_s": statistics.median(rows_at_once)}
    result["of_one_transaction"] = result["records_per_s"] / result["one_transaction_per_s"]
    if peers:
        module = [peers, "-m", "benchmarks.peers.trinity_recorder", databases.url(kind)]
        numbers = [str(number) for number in (WRITERS, 2 * seconds, N_PROMPT, N_REPLY)]
        ended = subprocess.run([*module, *numbers], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"the peer's recorder failed: {ended.stderr[-2000:]}")
        result["trinity_per_s"] = float(ended.stdout.split()[-1])
        result["times_trinity"] = result["records_per_s"] / result["trinity_per_s"]
    return result


def _write_at_once(ledger: Ledger, rows: int) -> float:
    """Rows a second, all by executemany in one transaction."""
    samples = [make_sample() for _ in range(rows)]
    started = time.perf_counter()
    with patch("shared.ledger.transitions.record._MANY", math.inf), ledger.write() as connection:
        transitions.record(connection, samples)
    return rows / (time.perf_counter() - started)


async def _write_with_64(ledger: Ledger, seconds: int) -> float:
    recorder = Recorder(ledger, ExplorerMetrics())
    recorder.start()
    sample = make_sample()
    stored = 0

    async def writer() -> None:
        nonlocal stored
        while time.perf_counter() < until:
            await recorder.record([replace(sample, msg_id=new_message_id("chatcmpl-"))])
            stored += 1

    started = time.perf_counter()
    until = started + seconds
    await asyncio.gather(*(writer() for _ in range(WRITERS)))
    took = time.perf_counter() - started
    await recorder.stop()
    return stored / took


# -------------------------------------------------------------------------------------------------------- flat


def fill(ledger: Ledger, rows: int) -> None:
    """Rows that were trained on, as nearly all of an old ledger are."""
    for done in range(0, rows, 5000):
        with ledger.write() as connection:
            transitions.record(connection, [make_sample(32, 16) for _ in range(min(5000, rows - done))])
            connection.execute(update(experiences).where(experiences.c.state == "RECORDED").values(state="CONSUMED"))
        print(f"filled {done + 5000} of {rows}", file=sys.stderr, end="\r")
    tidy(ledger)


def tidy(ledger: Ledger) -> None:
    """What PostgreSQL does by itself sooner or later."""
    if not ledger.shown_url.startswith("sqlite"):
        with ledger._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))


class Paces:
    """Latencies of each step on one ledger, in seconds."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.took: dict[str, list[float]] = {}
        self._version = 0

    def _step(self, name: str, work: Callable[[Any], Any]) -> Any:
        started = time.perf_counter()
        with self.ledger.write() as connection:
            result = work(connection)
        self.took.setdefault(name, []).append(time.perf_counter() - started)
        return result

    def chat_and_rate(self) -> None:
        sample = make_sample(32, 16)
        said = [Signal("reward", value=1.0)]
        self._step("record", lambda c: transitions.record(c, [sample]))
        self._step(
            "feedback",
            lambda c: transitions.apply_feedback(
                c, msg_ids=[sample.msg_id], task_id=None, run_id=None, said=said, rule=RewardConfig()
            ),
        )

    def commit(self) -> None:
        self._step("commit", transitions.commit)

    def train(self, rows: int) -> None:
        claim = {"owner": "t", "at_least": rows, "at_most": rows, "lease_s": 60.0}
        batch = self._step("claim", lambda c: transitions.claim(c, **claim))
        assert batch is not None
        self._version += 1
        about = {"version": self._version, "parent": None, "kind": "full", "step": self._version, "trainer": "t"}
        self._step("publish", lambda c: transitions.publish(c, **about, batch_ids=[batch]))


def measure_flat(databases: Databases, kind: str, rows: int, rounds: int = 800) -> dict[str, Any]:
    paces = []
    for count in (SMALL, rows):
        ledger = databases.open(kind)
        fill(ledger, count)
        paces.append(Paces(ledger))
    for _ in range(rounds):
        for _ in range(8):
            for pace in paces:  # in turns: what the disk and the machine do meets both
                pace.chat_and_rate()
        for pace in paces:
            pace.commit()
        for _ in range(2):
            for pace in paces:
                pace.train(4)
    for pace in paces:
        pace.ledger.close()
    small, large = (pace.took for pace in paces)
    return {name: _compare(small[name], large[name]) for name in small}


def _compare(small: list[float], large: list[float]) -> Figures:
    p50, p99 = ((_percentile(small, part), _percentile(large, part)) for part in (0.5, 0.99))
    return {
        "p50_ms_small": 1000 * p50[0],
        "p50_ms_large": 1000 * p50[1],
        "p99_ms_small": 1000 * p99[0],
        "p99_ms_large": 1000 * p99[1],
        "p50_ratio": p50[1] / p50[0],
        "p99_ratio": p99[1] / p99[0],
    }


def _percentile(values: list[float], part: float) -> float:
    return sorted(values)[int(len(values) * part)]


# ---------------------------------------------------------------------------------------------------- snapshot


class Learner:
    """A trainer that claims and publishes, and trains nothing, on a PostgreSQL database of its own."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        fill(ledger, SMALL)
        self._config = TrainerConfig.model_validate({"batch_size": 64, "poll_interval_s": 0.01})
        self._claimer = Claimer(ledger, self._config, StopRequest())
        self._version = 0
        self.spent = 0.0  # seconds, in claims with loading their rows
        self.claims = 0

    def learn(self, batches: int = 20) -> None:
        """Rows come as fast as they are claimed."""
        with self.ledger.write() as connection:
            transitions.record(connection, [make_sample(32, 16) for _ in range(64 * batches)])
            fresh = update(experiences).where(experiences.c.state == "RECORDED")
            connection.execute(fresh.values(state="READY", reward=1.0))
        for _ in range(batches):
            started = time.perf_counter()
            lease = self._claimer.next()
            self.spent += time.perf_counter() - started
            self.claims += 1
            assert lease is not None
            self._version += 1
            with self.ledger.write() as connection:
                transitions.publish(
                    connection,
                    version=self._version,
                    parent=None,
                    kind="full",
                    step=self._version,
                    trainer=self._config.name,
                    batch_ids=[lease.batch_id],
                )


def measure_snapshot(databases: Databases, hold_s: float) -> Figures:
    """Claims a second on two databases in turns; a snapshot of the first is held open, for so long of its own time."""
    held, free = (Learner(databases.open("postgresql")) for _ in range(2))

    def claims_per_s(seconds: float) -> list[float]:
        for learner in (held, free):
            learner.spent, learner.claims = 0.0, 0
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            held.learn()
            free.learn()
        return [learner.claims / learner.spent for learner in (held, free)]

    before = claims_per_s(min(30.0, hold_s))
    with held.ledger._engine.connect() as report:
        report.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        report.execute(text("SELECT count(*) FROM experiences"))
        parts = [claims_per_s(2 * hold_s / 6) for _ in range(6)]
    held.ledger.close()
    free.ledger.close()
    return {
        "hold_s": hold_s,
        "claims_per_s_before": before[0],
        "claims_per_s_first_sixth": parts[0][0],
        "claims_per_s_last_sixth": parts[-1][0],
        "claims_per_s_before_free": before[1],
        "claims_per_s_last_sixth_free": parts[-1][1],
        "rate_kept": parts[-1][0] / parts[-1][1],
        "rate_kept_of_before": parts[-1][0] / before[0],
    }


# ------------------------------------------------------------------------------------------------------- bytes


def measure_bytes(databases: Databases, kind: str, rows: int = 20_000) -> Figures:
    raw = 4 * (N_PROMPT + 2 * N_REPLY)
    texts = {"request": b"x" * 900, "reply": b"y" * 300}
    sizes = []
    for more in ({}, texts):
        ledger = databases.open(kind)
        for _ in range(rows // 500):
            with ledger.write() as connection:
                transitions.record(connection, [make_sample(**more) for _ in range(500)])
        tidy(ledger)
        sizes.append(_size(ledger) / rows)
        ledger.close()
    return {
        "raw_arrays": raw,
        "bytes_without_text": sizes[0],
        "bytes_allowed": 1.1 * raw + 200,
        "bytes_of_1200_of_text": sizes[1] - sizes[0],
    }


def _size(ledger: Ledger) -> int:
    """Bytes of rows and payloads, with their indexes."""
    size = "SELECT pg_total_relation_size('experiences') + pg_total_relation_size('payloads')"
    if ledger.shown_url.startswith("sqlite"):
        size = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    with ledger.read() as connection:
        return int(connection.execute(text(size)).scalar_one())


# ----------------------------------------------------------------------------------------------- conversations

TURNS, FIRST_PROMPT, TOLD = 10, 300, 100  # tokens of a conversation's first prompt, and told before each next turn


def measure_conversations(databases: Databases, kind: str, agents: int = 400) -> Figures:
    """Ten turns each, linked: with the tokens that their prompts share stored once, and whole."""
    result: Figures = {}
    for name, keeps in (
        ("shared", split_off),
        ("whole", lambda _connection, turns: [(turn, None) for turn, _ in turns]),
    ):
        with patch("shared.ledger.transitions.record.split_off", keeps):
            result |= {f"{figure}_{name}": value for figure, value in _talk(databases, kind, agents).items()}
    return result


def _talk(databases: Databases, kind: str, agents: int) -> Figures:
    ledger = databases.open(kind)
    last: list[Sample | None] = [None] * agents
    took = 0.0
    for _ in range(TURNS):
        turns = [_next_turn(before) for before in last]
        for start in range(0, agents, WRITERS):  # as a busy explorer commits them
            started = time.perf_counter()
            with ledger.write() as connection:
                transitions.record(connection, turns[start : start + WRITERS])
            took += time.perf_counter() - started
        last = [*turns]
    tidy(ledger)
    rows = agents * TURNS
    result = {"bytes_a_turn": _size(ledger) / rows, "turns_per_s": rows / took, "read_ms_of_64": _read_ms(ledger)}
    ledger.close()
    return result


def _next_turn(before: Sample | None) -> Sample:
    if before is None:
        return make_sample(FIRST_PROMPT)
    new = make_sample(TOLD)
    prompt = np.concatenate((before.tokens.prompt_ids, before.tokens.reply_ids, new.tokens.prompt_ids))
    assert before.exchange is not None
    return replace(new, tokens=replace(new.tokens, prompt_ids=prompt), extends=(before.exchange,))


def _read_ms(ledger: Ledger) -> float:
    """The tokens of the last turns of 64 conversations, whose other turns are not in the lease."""
    with ledger.read() as connection:
        newest = select(experiences.c.id).order_by(experiences.c.id.desc()).limit(64)
        ids = connection.execute(newest).scalars().all()
        started = time.perf_counter()
        for _ in range(10):
            load_tokens(connection, ids)
        return 100 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=None)
    parser.add_argument("--only", nargs="+", default=["record", "flat", "snapshot", "bytes", "conversations"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--hold-s", type=float, default=180.0)
    args = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="flywheel-ledger-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        databases = Databases(folder)
        try:
            for part in args.only:
                if part == "snapshot":
                    report[part] = measure_snapshot(databases, args.hold_s)
                    continue
                report[part] = {kind: _measure(part, databases, kind, args) for kind in ("sqlite", "postgresql")}
        finally:
            databases.stop()
    print(json.dumps(report, default=float))


def _measure(part: str, databases: Databases, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    print(f"{part} on {kind}", file=sys.stderr)
    if part == "record":
        return measure_record(databases, kind, args.peers)
    if part == "flat":
        return measure_flat(databases, kind, args.rows)
    return measure_bytes(databases, kind) if part == "bytes" else measure_conversations(databases, kind)


if __name__ == "__main__":
    main()
