"""The behaviour of a scripted engine, and its faults; a test changes them while the engine runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.engine.stage import Stage


class Hold:
    """For `Script.on_call`: each request of the path waits until `release` is set."""

    def __init__(self) -> None:
        self.held = 0  # requests that came to wait
        self.release = threading.Event()
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.held += 1
        self.release.wait(240)


@dataclass
class Script:
    """The engine's state, and its injected faults."""

    healthy: bool = True
    identity: str | None = None  # that it answers as `flywheel engine` does; None: it has no such route
    reply_ids: list[int] = field(default_factory=lambda: [11, 12, 13])
    logprobs: list[float] = field(default_factory=lambda: [-0.5, -0.25, -0.125])
    prompt_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    message: dict[str, Any] = field(default_factory=dict)  # fields of the message of each reply, not of streams
    finish_reason: str = "stop"  # of each chat
    delay_s: float = 0.0
    reload_s: float = 0.0
    reloads: list[tuple[float, float]] = field(default_factory=list)  # begin and end, time.monotonic()
    gap_s: float = 0.0
    streams_wait: bool = False  # before their last event
    chats_wait: bool = False  # before their reply; those that are no streams
    reply_id: str | None = None  # the id of every reply, whatever the request says
    models: set[str] = field(default_factory=lambda: {"agent"})  # the model names that it accepts
    most_messages: int = 1_000_000  # that its context holds
    too_long: str = "This model's maximum context length is 2048 tokens. However, …"  # its error for more
    held_back: int = 0  # tokens whose text comes with a later one, as with a tool parser
    break_after_events: int | None = None  # after so many events a stream breaks off
    fails_after_tokens: int | None = None  # then a stream reports an error and ends normally, like vLLM's
    wrong_probe_for: set[str] = field(default_factory=set)  # folders whose load gives other logprobs
    noise: float = 0.0  # added to all logprobs of a probe
    failed_loads: set[str] = field(default_factory=set)  # folders whose load answers 500 and leaves no weights
    hung_loads: set[str] = field(default_factory=set)  # folders whose load does not end while they are listed
    deadly_loads: set[str] = field(default_factory=set)  # folders whose load kills the engine
    refused: set[str] = field(default_factory=set)  # paths that answer 500
    hung: set[str] = field(default_factory=set)  # paths that do not answer while they are listed
    deadly: set[str] = field(default_factory=set)  # paths that kill the engine, once each
    on_call: dict[str, Callable[[], None]] = field(default_factory=dict)  # called at each request of a path
    broken: bool = False  # it resumed without weights: every stream breaks off
    dead: bool = False  # nothing answers
    deaths: int = 0
    dead_s: float = 0.2  # until it restarts
    starts_on: Path | None = None  # the version's folder that it holds after a restart
    stage: Stage | None = None  # stages versions on its machine; None: no such route
    keeps_labels: bool = True
    label: str = "default"
    tells_weights: bool = False  # the logprob of each token is minus the version that sampled it
    told_step: float = 1.0  # a factor for `tells_weights`
    die_on_chat: bool = False  # accept the request and break off
    aborted: int = 0  # chats whose caller left
    events: int = 0  # events of streams written
    padding: str = ""  # after the text of each event
    adapters: dict[str, str] = field(default_factory=dict)  # loaded ones: name → folder
    ever_loaded: list[tuple[str, str]] = field(default_factory=list)  # names and folders
    gone: list[str] = field(default_factory=list)  # adapters that were loaded when their files were gone
    routes_lora: bool = True  # it was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING
    refuses_lora: str | None = None  # why every load answers 500
    without_effect: set[str] = field(default_factory=set)  # names under which it computes like the base
    say: Callable[[str], object] = lambda _: None  # called at every load and unload of an adapter
    loaded: str = "start"
    probes: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    pause_modes: list[str] = field(default_factory=list)  # as requested
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def holds_chat(self, is_stream: bool) -> bool:
        """Whether the reply does not begin yet."""
        return self.paused or (self.chats_wait and not is_stream)

    def holds_event(self, number: int, count: int) -> bool:
        """Whether a stream waits before this one of its events."""
        return (self.paused and number != 1) or (self.streams_wait and number == count - 1)

    def stream_slowly(self) -> None:
        """Every reply has so many tokens that a stream goes on until `gap_s` is 0."""
        self.reply_ids, self.logprobs, self.gap_s = list(range(3000)), [-0.5] * 3000, 0.1

    def end_streams_after_a_load(self) -> None:
        """From now on streams wait before their last token until a load has begun: the engine is paused then."""
        self.streams_wait, self.tells_weights = True, True
        self.on_call["/collective_rpc"] = lambda: setattr(self, "streams_wait", False)
