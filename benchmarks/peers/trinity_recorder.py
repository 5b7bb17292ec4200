"""Trinity-RFT 0.6.0's own SQL recorder, with many writers of single experiences. `benchmarks.ledger` runs it.

    PEERS_PYTHON -m benchmarks.peers.trinity_recorder DATABASE_URL WRITERS SECONDS N_PROMPT N_REPLY

Prints the records stored per second.
"""

from __future__ import annotations

import asyncio
import sys
import time
import types
import uuid


async def main() -> None:
    url, writers, seconds, n_prompt, n_reply = sys.argv[1], *(int(argument) for argument in sys.argv[2:6])
    stub = types.ModuleType("trinity.common.models.mm_utils")
    stub.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules["trinity.common.models.mm_utils"] = stub
    import torch
    from trinity.common.experience import Experience
    from trinity.explorer.proxy.recorder import HistoryRecorder

    torch.set_num_threads(1)
    recorder = HistoryRecorder(db_url=url, table_name="history")
    await recorder.prepare()
    stored = 0

    async def writer() -> None:
        nonlocal stored
        while time.perf_counter() < until:
            experience = Experience(
                tokens=torch.arange(n_prompt + n_reply, dtype=torch.int32),
                logprobs=torch.full((n_reply,), -0.5),
                prompt_length=n_prompt,
            )
            experience.eid.suffix = uuid.uuid4().hex
            experience.info["model_version"] = 1
            await recorder.record_history([experience])
            stored += 1

    started = time.perf_counter()
    until = started + seconds
    await asyncio.gather(*(writer() for _ in range(writers)))
    print(stored / (time.perf_counter() - started))


if __name__ == "__main__":
    asyncio.run(main())
