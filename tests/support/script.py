"""What a scripted engine does, and how it fails; a test changes it while the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.engine.stage import Stage


@dataclass
class Script:
    """The engine's state, and the faults that are put in."""

    healthy: bool = True
    reply_ids: list[int] = field(default_factory=lambda: [11, 12, 13])
    logprobs: list[float] = field(default_factory=lambda: [-0.5, -0.25, -0.125])
    prompt_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    message: dict[str, Any] = field(default_factory=dict)  # fields of each reply's message, unless it is streamed
    delay_s: float = 0.0
    reload_s: float = 0.0
    reloads: list[tuple[float, float]] = field(default_factory=list)  # from when to when, time.monotonic()
    gap_s: float = 0.0
    reply_id: str | None = None  # that of every reply, whatever was asked for
    models: set[str] = field(default_factory=lambda: {"agent"})  # the names that it answers to
    held_back: int = 0  # tokens whose text waits for a later one, as a tool parser makes them
    break_after_events: int | None = None  # a stream breaks off
    fails_after_tokens: int | None = None  # a stream reports an error and is done, as vLLM's API process does
    wrong_probe_for: set[str] = field(default_factory=set)  # folders after whose load the logprobs are off
    noise: float = 0.0  # by which all logprobs of a probe are off
    failed_loads: set[str] = field(default_factory=set)  # folders whose load answers 500 and leaves no weights
    hung_loads: set[str] = field(default_factory=set)  # folders whose load does not end while they are in here
    deadly_loads: set[str] = field(default_factory=set)  # folders whose load the engine does not survive
    refused: set[str] = field(default_factory=set)  # paths that answer 500
    hung: set[str] = field(default_factory=set)  # paths that do not answer while they are in here
    deadly: set[str] = field(default_factory=set)  # paths that the engine does not survive, once each
    on_call: dict[str, Callable[[], None]] = field(default_factory=dict)  # what happens when a path is asked for
    broken: bool = False  # it sampled from no weights: every stream breaks off
    dead: bool = False  # nothing answers
    deaths: int = 0
    dead_s: float = 0.2  # until it comes back
    starts_on: Path | None = None  # the version's folder that it holds when it comes back from the dead
    stage: Stage | None = None  # where its machine stages versions; None: it has no such route
    keeps_labels: bool = True
    label: str = "default"
    tells_weights: bool = False  # the logprob of each token is minus the version that sampled it
    told_step: float = 1.0  # times this
    die_on_chat: bool = False  # take the request and break off
    aborted: int = 0  # chats whose caller went away
    events: int = 0  # of streams, written
    padding: str = ""  # after the text of each event
    adapters: dict[str, str] = field(default_factory=dict)  # that it has: name → folder
    ever_loaded: list[tuple[str, str]] = field(default_factory=list)  # names and folders
    gone: list[str] = field(default_factory=list)  # adapters that it had when their files were gone
    routes_lora: bool = True  # it was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING
    refuses_lora: str | None = None  # why every load answers 500
    without_effect: set[str] = field(default_factory=set)  # names under which it computes as the base does
    say: Callable[[str], object] = lambda _: None  # told of every load and unload of an adapter
    loaded: str = "start"
    probes: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    pause_modes: list[str] = field(default_factory=list)  # as they were asked for
    bodies: list[dict[str, Any]] = field(default_factory=list)
