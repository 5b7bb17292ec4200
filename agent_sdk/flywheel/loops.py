"""The program's event loop: the sync forms of async functions, and Ctrl-C while learn runs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from flywheel.errors import ConfigError

T = TypeVar("T")


def run_alone(call: Coroutine[Any, Any, T], instead: str) -> T:
    """Return the result of a call in an event loop of its own. instead: the form for a program whose loop runs."""
    try:
        return asyncio.run(call)
    except RuntimeError as exc:
        if inspect.getcoroutinestate(call) != inspect.CORO_CREATED:
            raise
        call.close()
        raise ConfigError(f"an event loop runs here, as in a notebook: write `await {instead}(…)` instead") from exc


class CtrlC(contextlib.AbstractContextManager[None]):
    """Ctrl-C calls the `stop` of each block in progress, in its loop; the next one goes to the program's own handler.

    A process has one handler of SIGINT, which only the main thread sets: blocks of other threads are stopped as long as
    one is in progress there. Handlers that the program gave to its event loop stay there, and are called, too.
    """

    _blocks: ClassVar[list[CtrlC]] = []  # in progress, in any thread
    _holding: ClassVar[list[CtrlC]] = []  # those of the main thread, for which the handler is in place
    _before: ClassVar[Any] = None  # the program's handler
    _placed: ClassVar[Any] = None  # the one in its place

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        self._blocks.append(self)
        found = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or found is None:
            return  # a handler that is not Python's could not be put back
        if not CtrlC._holding or found is not CtrlC._placed:
            CtrlC._before = found
        self._holding.append(self)
        self._place(CtrlC._press)

    @classmethod
    def _place(cls, handler: Any) -> None:
        cls._placed = handler
        signal.signal(signal.SIGINT, handler)

    @staticmethod
    def _press(*_: object) -> None:
        for block in list(CtrlC._blocks):
            with contextlib.suppress(RuntimeError):  # its loop is closed, perhaps just now by its thread
                block._loop.call_soon_threadsafe(block._stop)
        # asyncio's cancels the main task; if the program ignored SIGINT, the next one interrupts
        CtrlC._place(CtrlC._before if callable(CtrlC._before) else signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        self._blocks.remove(self)
        if self not in self._holding:
            return
        self._holding.remove(self)
        is_ours = signal.getsignal(signal.SIGINT) is CtrlC._placed  # else the program has set another one
        if is_ours and not self._holding:
            signal.signal(signal.SIGINT, CtrlC._before)
