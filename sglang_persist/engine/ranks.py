"""The processes that share a tree, and what they tell each other before the first request is served."""

from __future__ import annotations

from typing import Any

import torch.distributed


class Group:
    """`ports.Ranks`: the ranks of an engine that keep the same tree as this one. `shards` names them, None where this
    rank could not even tell that.

    Each rank of the whole engine must make one, and each rank of a group the same calls in the same order, whatever
    befell it. What bounds them is the time limit of the group: SGLang's where that is all ranks, else torch's.
    """

    def __init__(self, parallel, shards: tuple[str, ...] | None):
        alone = parallel.tp_size * parallel.pp_size == 1
        self._group = None if alone else _group(parallel.world_group.cpu_group, shards)

    @property
    def alone(self) -> bool:
        return self._group is None

    def gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else _gather(self._group, value)


def _group(world, shards: tuple[str, ...] | None):
    """Of all ranks those with the same shards; None where that is this one alone. With attention data parallelism there
    are several such groups, each of which goes its own way."""
    everyone = _gather(world, shards)
    groups = list(dict.fromkeys(everyone))
    # A rank that could not tell its shards concerns all.
    if len(groups) == 1 or None in groups:
        return world
    ranks = torch.distributed.get_process_group_ranks(world)
    own = None
    for members in groups:  # every rank takes part in making each of them
        of_group = [rank for rank, theirs in zip(ranks, everyone, strict=True) if theirs == members]
        made = torch.distributed.new_group(of_group, backend="gloo")
        if members == shards and len(of_group) > 1:
            own = made
    return own


def _gather(group, value: Any) -> list[Any]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, value, group=group)
    return everyone
