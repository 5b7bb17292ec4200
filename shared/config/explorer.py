"""Section `explorer`: the service that agents talk to."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from shared.config.base import (
    NUMBER,
    Count,
    Devices,
    Flag,
    Name,
    NonNegative,
    Port,
    Positive,
    Section,
    require_distinct,
)
from shared.config.keys import KeyConfig


class EngineAddress(Section):
    """Where one vLLM server listens."""

    name: Name
    """A short name for logs and metrics."""
    url: Annotated[str, Field(pattern=r"^https?://[^/]+$")]
    """Its address, e.g. http://127.0.0.1:8101"""
    devices: Devices | None = None
    """The GPUs that this engine sees, by number; several share the model's tensors; null: vLLM takes the first."""

    @model_validator(mode="after")
    def _check_url(self) -> EngineAddress:
        if "@" in self.url:
            raise ValueError(f"explorer.engines {self.name!r}: a url has no user and password in it; take them out")
        try:
            _ = self.port
        except ValueError as exc:
            raise ValueError(f"explorer.engines {self.name!r}: the url's port is no port; correct it") from exc
        return self

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80


class Tolerance(Section):
    """How far an engine's logprobs of a probe may be from the trainer's."""

    per_token: Positive
    """The largest difference of one logprob."""
    mean: Positive
    """The mean difference."""


class ReloadConfig(Section):
    """How engines change to a new version."""

    poll_interval_s: Positive = 1.0
    """Seconds between two queries for a newer version."""
    streams: Literal["go_on", "finish"] = "go_on"
    """What running requests do in a reload. go_on: they stand still while the engine loads, and the new version samples
    the rest of them. finish: they have `drain_s` to end under their own version, while new chats wait."""
    drain_s: NonNegative = 5.0
    """With `streams: finish`, how long running requests may take to end before the engine is paused under them."""
    min_interval_s: NonNegative = 0.0
    """Seconds between two reloads of one engine. Versions that are overtaken meanwhile are not loaded."""
    timeout_s: Positive = 600.0
    """How long an engine may take to load a version."""
    answer_timeout_s: Positive = 30.0
    """How long an engine may take for anything else that a reload asks of it: to pause, to resume, to score a probe."""
    appear_s: NonNegative = 60.0
    """How long a version whose folder, or a file of it, is missing is looked for before it is rejected."""
    retry_s: Positive = 5.0
    """Seconds until an engine that did not take a version up tries again; twice as long after each failure, up to a
    hundred times."""
    unpin_after_s: Positive = 600.0
    """With model.kind: lora, how long a version that callers have pinned stays in service after its last use."""
    tolerance: Tolerance | None = None
    """Allowed difference between engine and trainer; null: by the type of the weights, and by what the engine showed
    when it was first started on version 0."""


class ExplorerConfig(Section):
    """The service that agents talk to."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs keys."""
    port: Port = 8010
    """Port to listen on."""
    workers: Count = 1
    """Processes that share the port; together they behave as one. Limits of keys count in each."""
    engines: Annotated[tuple[EngineAddress, ...], Field(min_length=1)] = (
        EngineAddress(name="e0", url="http://127.0.0.1:8101"),
    )
    """The vLLM servers behind the explorer."""
    keys: tuple[KeyConfig, ...] = ()
    """Keys and their roles; with none the explorer listens on loopback only."""
    open_feedback_from: tuple[str, ...] = ()
    """Networks (CIDR) whose feedback and commits need no key."""
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], ...] = ()
    """Names by which callers reach an explorer without keys, beside localhost and loopback addresses; no ports."""
    max_connections: Count = 8_000
    """Connections of callers at once, in each worker, as far as the limit of open files allows. For one more the one
    that has been without a complete request for the longest time is closed."""
    max_head_bytes: Count = 65_536
    """A larger head of a request answers 431."""
    max_headers: Count = 100
    """More headers of a request answer 431."""
    head_timeout_s: Positive = 20.0
    """A connection on which no whole head of a request has arrived by then is closed."""
    max_body_bytes: Count = 8 * 1024 * 1024
    """A larger request body answers 413."""
    max_unfinished_bytes: Count = 256 * 1024 * 1024
    """Of request bodies that have not arrived whole, all callers' together, in each worker; one that would make it more
    answers 503. Bodies of up to 64 KiB do not count."""
    max_body_values: Count = 250_000
    """A request body with more opening brackets and colons than this answers 400: decoding it would hold up others."""
    body_timeout_s: Positive = 60.0
    """A request body that has not arrived by then answers 408. A caller who does not read its answer for so long loses
    its connection, and its place at the engine."""
    engine_wait_s: NonNegative = 30.0
    """How long a chat waits while every engine is full or loads a version, before it answers 503."""
    max_in_flight: Count | None = None
    """Chats at one engine at once; more of them wait. null: the engine queues them itself."""
    max_waiting: Count = 1000
    """Chats that may wait for an engine; more of them answer 503."""
    request_timeout_s: Positive = 600.0
    """How long one engine request may take."""
    max_reply_bytes: Count = 128 * 1024 * 1024
    """A larger reply of an engine answers 503; a larger stream ends with an error."""
    max_messages: Count = 10_000
    """More messages in one chat answer 400."""
    store_text: Flag = True
    """Keep requests and replies as text beside their tokens, for reading and for supervised fine-tuning."""
    commit_every_s: Positive | None = None
    """Commit all rewarded rows this often; null: only when asked to."""
    expire_after_s: Positive | None = None
    """Rows are discarded when they are this old and nothing that is learned from was said of their run or conversation;
    null: never."""
    reload: ReloadConfig = ReloadConfig()
    """How engines change to a new version."""
    ledger_timeout_s: Annotated[float, Field(ge=1, le=60), NUMBER] = 4.0
    """A chat, feedback or commit that the database has not stored by then answers 503."""
    max_choices: Count = 64
    """A chat that asks for more choices (`n`) answers 400; each of them is a row."""

    @model_validator(mode="after")
    def _check_together(self) -> ExplorerConfig:
        if not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"explorer.host={self.host!r} is not loopback and explorer.keys is empty, so anyone could chat and "
                "steer the model; set explorer.keys, or explorer.host: 127.0.0.1"
            )
        require_distinct("explorer.engines, name", (engine.name for engine in self.engines))
        require_distinct("explorer.engines, url", (engine.url for engine in self.engines))
        ours = ("localhost", "127.0.0.1") if self.host in ("localhost", "127.0.0.1") else (self.host,)
        for engine in self.engines:  # what listens on all addresses takes those of loopback
            is_ours = engine.host in ours or (self.host in ("0.0.0.0", "::") and is_loopback(engine.host))
            if is_ours and engine.port == self.port:
                raise ValueError(
                    f"explorer.port={self.port} is the port of explorer.engines {engine.name!r}; give each its own"
                )
        require_distinct("explorer.keys, name", (key.label for key in self.keys))
        for network in self.open_feedback_from:
            try:
                ipaddress.ip_network(network)
            except ValueError as exc:
                raise ValueError(
                    f"explorer.open_feedback_from={network!r} is not a network; write e.g. 10.0.0.0/8"
                ) from exc
        return self


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
