"""CPU of storing one chat in its own transaction, warm, as the explorer's writer does.

Compared, alternating, with the same statements and values sent through the driver alone. CPU of the thread, without the
database server's; `p05` is the 5th percentile, least disturbed on a machine that does other work.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import event

from benchmarks.ledger.databases import Databases, Figures, make_sample
from explorer_service.chat.conversation import DIGEST_BYTES
from shared.experience import Sample, new_message_id
from shared.ledger import transitions
from shared.ledger.connect import DedicatedConnection, Ledger

_WARM = 100  # chats that are not counted


def measure(databases: Databases, kind: str, chats: int = 3000) -> Figures:
    """Median and p05 of each way in µs, and their difference."""
    with closing(databases.open(kind)) as ledger, closing(DedicatedConnection(ledger)) as dedicated:
        model = make_sample()
        statements = _statements(ledger, model)
        with ledger._engine.connect() as lent:
            driver: Any = lent.connection.driver_connection
            ours, drivers = [], []
            for _ in range(_WARM + chats):
                sample = _new(model)
                ours.append(_cpu_us(partial(dedicated.write, partial(transitions.record, samples=[sample]))))
                values = _renamed(statements, model)
                drivers.append(_cpu_us(partial(_by_driver, driver, values)))
    result: Figures = {}
    for name, took in (("record", ours[_WARM:]), ("driver", drivers[_WARM:])):
        result[f"{name}_us"] = statistics.median(took)
        result[f"{name}_p05_us"] = statistics.quantiles(took, n=20)[0]
    result["over_driver_p05_us"] = result["record_p05_us"] - result["driver_p05_us"]
    return result


def _new(model: Sample) -> Sample:
    return replace(model, msg_id=new_message_id("chatcmpl-"), exchange=os.urandom(DIGEST_BYTES))


def _cpu_us(work: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - started) / 1000


_Statement = tuple[str, tuple[Any, ...]]


def _statements(ledger: Ledger, sample: Sample) -> list[_Statement]:
    """The statements that the driver gets to store this chat."""
    seen: list[_Statement] = [("BEGIN IMMEDIATE", ())] if ledger.is_sqlite else []

    def keep(_connection: object, _cursor: object, statement: str, values: Any, *_: object) -> None:
        seen.append((statement, values))

    with ledger.write() as connection:
        event.listen(connection, "before_cursor_execute", keep)
        transitions.record(connection, [sample])
        event.remove(connection, "before_cursor_execute", keep)
    return seen


def _renamed(statements: list[_Statement], model: Sample) -> list[_Statement]:
    """The statements of this chat for another one: with its own id and exchange, as in `_new`."""
    new = {model.msg_id: new_message_id("chatcmpl-"), model.exchange: os.urandom(DIGEST_BYTES)}
    return [(text, tuple(new.get(value, value) for value in values)) for text, values in statements]


def _by_driver(driver: Any, statements: list[_Statement]) -> None:
    cursor = driver.cursor()
    for statement, values in statements:
        cursor.execute(statement, values)
    driver.commit()
    cursor.close()
