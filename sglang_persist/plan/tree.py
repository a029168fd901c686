"""What a plan is made from: the nodes of the live tree, and what is known to be stored of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_persist.model import HASH_BYTES, Piece, Space

NO_PARENT = bytes(HASH_BYTES)


class TreeNode(NamedTuple):
    """A node of the live tree: positions [start, end) of its path; `parent` is an index into the same list or -1."""

    id: int
    parent: int
    start: int
    end: int


@dataclass(frozen=True)
class Content:
    """What identifies a live node's KV. `tokens` has one id more than positions in a bigram space."""

    space: Space
    tokens: np.ndarray
    hashes: bytes
    parent_hash: bytes

    def fits(self, node: TreeNode) -> bool:
        """Whether it is of this node, not of what was left of it when it was split since."""
        return len(self.tokens) == node.end - node.start + self.space.extra_tokens


class Known(NamedTuple):
    """A node whose KV the store holds, by positions and pieces."""

    start: int
    end: int
    space: Space
    pieces: tuple[Piece, ...]
