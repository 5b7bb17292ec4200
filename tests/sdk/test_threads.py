"""The threads for a user's sync functions: bounded, used again, and left without waiting."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import flywheel
import pytest
from flywheel.threads import DaemonThreads


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_no_more_threads_run_than_were_asked_for_and_idle_ones_are_used_again():
    with DaemonThreads(2, "bounded") as threads:
        gate = threading.Barrier(3)
        both = [threads.submit(gate.wait, 60) for _ in range(2)]
        third = threads.submit(lambda: threading.current_thread().name)
        assert {thread.name for thread in named("bounded")} == {"bounded_0", "bounded_1"}
        gate.wait(60)
        assert third.result(60) in {"bounded_0", "bounded_1"}
        assert len({future.result(60) for future in both}) == 2
    with DaemonThreads(2, "again") as threads:
        for _ in range(20):
            threads.submit(int).result(60)
        assert 1 <= len(named("again")) <= 2


def test_an_exception_of_a_function_reaches_its_caller_and_its_thread_continues():
    with DaemonThreads(1, "raising") as threads:
        for error in (KeyError("own"), SystemExit(3)):
            with pytest.raises(type(error)):
                threads.submit(_raises, error).result(60)
        assert threads.submit(int).result(60) == 0


def _raises(error: BaseException) -> None:
    raise error


def test_a_call_that_was_cancelled_before_it_began_is_never_made():
    made, release = [], threading.Event()
    with DaemonThreads(1, "cancelled") as threads:
        threads.submit(release.wait, 120)
        assert threads.submit(made.append, 1).cancel()
        release.set()
        assert threads.submit(list, made).result(60) == []


def test_leaving_cancels_what_has_not_begun_and_waits_for_nothing():
    begun, release = threading.Event(), threading.Event()
    with DaemonThreads(1, "left") as threads:
        hanging = threads.submit(lambda: (begun.set(), release.wait(120)))
        waiting = threads.submit(int)
        assert begun.wait(60)
    assert not hanging.done()
    with pytest.raises(CancelledError):
        waiting.result(60)
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(int)
    release.set()
    for thread in named("left"):
        thread.join(60)
    assert (hanging.done(), named("left")) == (True, [])


def test_an_idle_thread_holds_nothing_of_the_call_that_it_made():
    class Big:
        pass

    with DaemonThreads(1, "holding") as threads:
        given, made = Big(), threads.submit(Big)
        gone = [weakref.ref(given), weakref.ref(made.result(60))]
        threads.submit(id, given).result(60)
        del given, made
        threads.submit(int).result(60)
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


def test_no_threads_at_all_are_refused():
    with pytest.raises(flywheel.ConfigError, match="at_once=0"):
        DaemonThreads(0, "none")
