"""Peak memory of TRL's logprobs in chunks, run by the peers' Python; see benchmarks/trainer/memory.py.

TRL divides the vocabulary, for 4,096 tokens at once: its chunk is a tile of tokens times columns.
"""

from __future__ import annotations

import os
import sys

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

from torch import Tensor, nn
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from benchmarks.trainer.peak import CHUNK_BYTES, TOKENS, measure


def main() -> None:
    way, step, spread = sys.argv[1:]
    columns = CHUNK_BYTES // (4 * TOKENS) if way == "equal" else _CHUNKED_LOGPROB_CHUNK_SIZE

    def score(layer: nn.Linear, hidden_KD: Tensor, actions_K: Tensor) -> Tensor:
        found: Tensor = ChunkedLogProbFunction.apply(
            hidden_KD, layer.weight, None, actions_K, 1.0, columns, None, 1.0, ()
        )[0]
        return found

    print(measure(float(spread), score, update=step == "update"))


if __name__ == "__main__":
    main()
