"""Trinity-RFT 0.6.0's own serve-mode proxy with its own SQLite recorder, over one fixed engine. front_door/ runs it.

A replacement of its service object does the same for a chat (the same conversion and the same recorder), because the
real one needs Ray and an engine. vLLM-bound helpers that this path never calls are stubs.

    PEERS_PYTHON -m benchmarks.peers.trinity_proxy UPSTREAM PORT SQLITE_FILE
"""

from __future__ import annotations

import sys
import types
from typing import Any


def main() -> None:
    upstream, port, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    stub = types.ModuleType("trinity.common.models.mm_utils")
    stub.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules["trinity.common.models.mm_utils"] = stub
    import torch
    import uvicorn
    from trinity.common.experience import Experience
    from trinity.explorer.proxy.app import app
    from trinity.explorer.proxy.recorder import HistoryRecorder

    torch.set_num_threads(1)

    class Service:
        def __init__(self) -> None:
            self.recorder = HistoryRecorder(db_url=f"sqlite:///{file}", table_name="proxy_history")

        async def allocate_model(self, increase_count: bool = True) -> tuple[str, int]:
            return upstream, 1

        async def record_experience(self, response: dict[str, Any], model_version: int) -> None:
            experiences = []
            for choice in response["choices"]:
                ids = (
                    torch.tensor(part, dtype=torch.int32)
                    for part in (response["prompt_token_ids"], choice["token_ids"])
                )
                experience = Experience(
                    tokens=torch.cat(tuple(ids)),
                    logprobs=torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]]),
                    prompt_length=len(response["prompt_token_ids"]),
                )
                experience.eid.suffix = response["id"]
                experience.info["model_version"] = model_version
                experiences.append(experience)
            await self.recorder.record_history(experiences)

    app.state.service = Service()
    app.state.temperature = 1.0
    app.state.inference_timeout = 60
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
