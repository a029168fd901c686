"""What ranks must agree on before the first request: the same tree on each of them, or an empty one on all."""

from __future__ import annotations

from typing import Any

import torch.distributed


def gather(parallel, shards: tuple[str, ...] | None, value: Any) -> list[Any]:
    """`value` of every rank that shares this rank's tree. Each rank of the engine must call it, whatever befell it."""
    if parallel.tp_size * parallel.pp_size == 1:
        return [value]
    group = parallel.world_group.cpu_group
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, (shards, value), group=group)
    # A rank that could not even tell its shards concerns all.
    return [v for s, v in everyone if s is None or shards is None or s == shards]
