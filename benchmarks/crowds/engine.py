"""The fake engine of crowds: its streams never end, and are as fast as their readers.

python -m benchmarks.crowds.engine PORT PROMPT_TOKENS REPLY_TOKENS
"""

from __future__ import annotations

import asyncio

import uvloop

from benchmarks.upstream import ID, Upstream, serve

HIGH_WATER = 256 * 1024  # bytes not yet taken by the kernel


class FloodingUpstream(Upstream):
    """The fake engine's whole replies, and endless streams."""

    async def _stream(self, name: bytes) -> None:
        transport = self._transport
        assert transport is not None
        transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        event = self.events[1].replace(ID, name, 1).removesuffix(b"\n\n") + b" " * 16_000 + b"\n\n"
        while not transport.is_closing():
            has_room = transport.get_write_buffer_size() < HIGH_WATER
            if has_room:
                transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            await asyncio.sleep(0 if has_room else 0.05)


if __name__ == "__main__":
    uvloop.run(serve(FloodingUpstream))
