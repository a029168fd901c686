"""The processes that share a tree, and what they tell each other before the first request is served."""

from __future__ import annotations

from typing import Any

import torch.distributed


class Group:
    """`ports.Ranks`: the ranks of an engine that keep the same tree as this one. `shards` names them, None where this
    rank could not even tell that.

    Each rank of the whole engine must make the same calls in the same order, whatever befell it: they go through
    SGLang's group of all of them, whose time limit bounds them.
    """

    def __init__(self, parallel, shards: tuple[str, ...] | None):
        self.alone = parallel.tp_size * parallel.pp_size == 1
        self._parallel, self._shards = parallel, shards

    def gather(self, value: Any) -> list[Any]:
        if self.alone:
            return [value]
        group = self._parallel.world_group.cpu_group
        everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everyone, (self._shards, value), group=group)
        # A rank that could not tell its shards concerns all.
        return [v for s, v in everyone if s is None or self._shards is None or s == self._shards]
