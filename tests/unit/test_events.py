"""A stream's bytes as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from hypothesis import given
from hypothesis import strategies as st

from explorer_service.chat.stream import split_events


async def events_of(parts: Iterable[bytes]) -> list[bytes]:
    async def chunks() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return [event async for event in split_events(chunks())]


DATA = st.lists(st.sampled_from([b"\n", b"a", b"bc"]), max_size=30).map(b"".join)


@given(data=DATA, cuts=st.sets(st.integers(1, 50)))
async def test_events_are_the_same_wherever_packets_end(data, cuts):
    ends = sorted({cut for cut in cuts if cut < len(data)})
    parts = [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]
    *whole, _ = data.split(b"\n\n")
    assert await events_of(part for part in parts if part) == [event + b"\n\n" for event in whole]
