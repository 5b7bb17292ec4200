"""The process groups of DeepSpeed's collectives."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist


class DataParallel:
    """A model parallelism unit, in DeepSpeed's terms: all ranks share the data, each has the whole model.

    DeepSpeed's own groups would ignore `trainer.rank_timeout_s`: a rank that hangs in the reduction of a gradient would
    block the others for PyTorch's 30 minutes.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        """Called on all ranks, in the same order."""
        timeout = timedelta(seconds=timeout_s)
        self._rank, self._size = rank, size
        self._all: dist.ProcessGroup = dist.new_group(list(range(size)), timeout=timeout)
        groups: list[dist.ProcessGroup] = [dist.new_group([number], timeout=timeout) for number in range(size)]
        self._alone = groups[rank]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._all

    def get_data_parallel_group_ranks(self) -> range:
        return range(self._size)

    def get_data_parallel_rank(self) -> int:
        return self._rank

    def get_data_parallel_world_size(self) -> int:
        return self._size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1
