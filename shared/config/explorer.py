"""Section `explorer`: the service that agents talk to."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from shared.config.base import (
    NUMBER,
    Count,
    Devices,
    FileName,
    Flag,
    NonNegative,
    Port,
    Positive,
    Section,
    matches,
    require_distinct,
)
from shared.config.keys import KeyConfig

_ADDRESS = re.compile(r"https?://[^/?#]+")
_HOST = matches(r"[A-Za-z0-9._-]+|[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}", "a host name or an IP address, without a port")


class EngineAddress(Section):
    """Address of one vLLM server."""

    name: FileName
    """A short name for logs and metrics."""
    url: str
    """The server's address, e.g. http://127.0.0.1:8101"""
    devices: Devices | None = None
    """GPUs that this engine may use, by number; several share the model's tensors; null: vLLM uses the first."""

    @model_validator(mode="after")
    def _check_url(self) -> EngineAddress:
        if not _ADDRESS.fullmatch(self.url):
            raise ValueError(
                f"explorer.engines {self.name!r}: the url is no address; write http://HOST:PORT, without a path"
            )
        if "@" in self.url:
            raise ValueError(f"explorer.engines {self.name!r}: a url has no user and password in it; take them out")
        try:
            if urlsplit(self.url).port == 0:
                raise ValueError("port 0")
            self.host.encode("idna")
        except ValueError as exc:
            raise ValueError(f"explorer.engines {self.name!r}: the url's host or port is none; correct it") from exc
        return self

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def machine(self) -> str:
        """The host; one name for all loopback addresses."""
        return "localhost" if is_loopback(self.host) else self.host

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def plain_url(self) -> str:
        """The url in one spelling: 127.0.0.1 for every loopback address, lower case, always with the port."""
        host = "127.0.0.1" if is_loopback(self.host) else self.host
        return f"{urlsplit(self.url).scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


class Tolerance(Section):
    """How far an engine's logprobs of a probe may differ from the trainer's."""

    per_token: Positive
    """The largest difference of one logprob."""
    mean: Positive
    """The mean difference."""


class ReloadConfig(Section):
    """How engines change to a new version."""

    poll_interval_s: Positive = 1.0
    """Seconds between two queries for a newer version."""
    streams: Literal["go_on", "finish"] = "go_on"
    """What happens to running requests in a reload. go_on: they pause while the engine loads, and the new version
    samples their remaining tokens. finish: they get `drain_s` to end under their own version, while new chats wait."""
    drain_s: NonNegative = 5.0
    """With `streams: finish`, how long running requests may take to end before the engine is paused anyway."""
    min_interval_s: NonNegative = 0.0
    """Seconds between two reloads of one engine. Versions that are superseded meanwhile are not loaded."""
    timeout_s: Positive = 600.0
    """Time limit for an engine to load a version."""
    answer_timeout_s: Positive = 30.0
    """Time limit for an engine's other steps in a reload: to pause, to resume, to score a probe."""
    appear_s: NonNegative = 60.0
    """How long to wait for a version whose folder, or a file in it, is missing before it is rejected."""
    retry_s: Positive = 5.0
    """Seconds before an engine that failed to load a version tries again. The delay doubles after each failure, up to a
    hundred times this value."""
    unpin_after_s: Positive = 600.0
    """With model.kind: lora, how long a pinned version stays in service after its last use."""
    tolerance: Tolerance | None = None
    """Allowed difference between engine and trainer; null: by the type of the weights, and by the difference that the
    engine had when it was first started on version 0."""


class ExplorerConfig(Section):
    """The service that agents talk to."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other than loopback requires keys."""
    port: Port = 8010
    """Port to listen on."""
    workers: Count = 1
    """Number of processes that share the port and behave as one. The limits of keys apply to each process."""
    engines: Annotated[tuple[EngineAddress, ...], Field(min_length=1)] = (
        EngineAddress(name="e0", url="http://127.0.0.1:8101"),
    )
    """The vLLM servers behind the explorer."""
    keys: tuple[KeyConfig, ...] = ()
    """Keys and their roles; without keys the explorer listens on loopback only."""
    open_feedback_from: tuple[str, ...] = ()
    """Networks (CIDR) that may send feedback and commits without a key."""
    allowed_hosts: tuple[Annotated[str, _HOST], ...] = ()
    """Host names and addresses of an explorer without keys, besides loopback; without ports and brackets."""
    max_connections: Count = 8_000
    """Maximum number of connections in each worker, within the limit of open files. A further connection closes the one
    that has been without a complete request for the longest time."""
    max_head_bytes: Count = 65_536
    """A larger request head is answered with 431."""
    max_headers: Count = 100
    """A request with more headers is answered with 431."""
    head_timeout_s: Positive = 20.0
    """A connection is closed if no complete request head has arrived within this time."""
    max_body_bytes: Count = 8 * 1024 * 1024
    """A larger request body is answered with 413."""
    max_unfinished_bytes: Count = 256 * 1024 * 1024
    """Total size of incomplete request bodies of all callers in each worker; a body that would exceed it is answered
    with 503. Bodies of up to 64 KiB do not count."""
    max_body_values: Count = 250_000
    """A body with more opening brackets and colons is answered with 400: decoding it would delay other requests. Four
    commas count as one bracket."""
    body_timeout_s: Positive = 60.0
    """A body that has not arrived within this time is answered with 408. A caller that does not read its answer for so
    long loses its connection, and its slot at the engine."""
    engine_wait_s: NonNegative = 30.0
    """How long a chat waits while every engine is full or loads a version, before it is answered with 503."""
    max_in_flight: Count | None = None
    """Maximum number of chats at one engine at once; others wait. null: the engine queues them itself."""
    max_waiting: Count = 1000
    """Maximum number of chats that wait for an engine; others are answered with 503."""
    request_timeout_s: Positive = 600.0
    """Time limit of an engine's whole answer. A chat that exceeds it is answered with 503, and not sent to another
    engine."""
    max_reply_bytes: Count = 128 * 1024 * 1024
    """A larger reply of an engine is answered with 503; a larger stream ends with an error."""
    max_messages: Count = 10_000
    """A chat with more messages is answered with 400."""
    store_text: Flag = True
    """Store requests and replies as text next to their tokens, for reading and for supervised fine-tuning."""
    commit_every_s: Positive | None = None
    """Commit all rewarded rows at this interval; null: only on request."""
    expire_after_s: Positive | None = None
    """Age at which rows are discarded if their run or conversation has no signal that is learned from; null: never."""
    reload: ReloadConfig = ReloadConfig()
    """How engines change to a new version."""
    ledger_timeout_s: Annotated[float, Field(ge=1, le=60), NUMBER] = 4.0
    """A chat, feedback or commit that the database has not stored within this time is answered with 503."""
    max_choices: Count = 64
    """A chat that requests more choices (`n`) is answered with 400; each choice is a row."""

    @model_validator(mode="after")
    def _check_together(self) -> ExplorerConfig:
        if not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"explorer.host={self.host!r} is not loopback and explorer.keys is empty, so anyone could chat and "
                "steer the model; set explorer.keys, or explorer.host: 127.0.0.1"
            )
        require_distinct("explorer.engines, name", (engine.name for engine in self.engines))
        require_distinct("explorer.engines, url", (engine.plain_url for engine in self.engines))
        ours = ("localhost", "127.0.0.1") if self.host in ("localhost", "127.0.0.1") else (self.host,)
        for engine in self.engines:  # a listener on all addresses also occupies those of loopback
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
    """Whether only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
