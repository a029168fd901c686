"""What the flow needs of an engine. `engine/` implements these; tests may, too.

All calls come from the scheduler's thread, between two iterations of its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import numpy as np

from sglang_persist.model import Pool, Space
from sglang_persist.plan.loading import Slice
from sglang_persist.plan.tree import Content, TreeNode, TreeNodes

#: What a step of a long job waits for, called with a timeout in seconds; None: the step did work of its own.
Waiting = Callable[[float], object] | None


class Tree(Protocol):
    """The live radix tree."""

    page_tokens: int

    def scan(self, at_once: bool = False) -> Generator[None, None, TreeNodes]:
        """Every node with KV on the device, parents before children, the path that is evicted first before others.

        In slices, between which the engine serves: what it adds meanwhile may be missing, a node that it splits may be
        there as a whole and, again, in part. `at_once`: in one go, at one instant.
        """

    def content(self, node: TreeNode) -> Content | None:
        """Token ids and page hashes of a node as it was shown, also after a split; None once it is gone."""

    def slots(self, node: TreeNode, start: int, end: int):
        """Slots of positions [start, end) of the path that ends with this node; None once it is gone.

        Right also after a split: the id stays with the lower half, whose path still holds the positions asked for.
        """

    def state(self, node_id: int):
        """The slot of the state that the model has after the path that ends with this node; None where there is none
        any more."""

    def insert(
        self, space: Space, tokens: np.ndarray, slots, matched: int, absent: Sequence[int] = (), state=None
    ) -> int | None:
        """Insert a path whose first `matched` positions are there already. Returns the id of its last node.

        `slots` covers the whole path. `absent`: pools beside the first that hold nothing of what is new. `state`: the
        slot of the state after it, without which a tree of states takes nothing. None: the tree did not take it, and
        its new slots are still the caller's.
        """

    def matched(self, space: Space, tokens: np.ndarray) -> tuple[int, Any]:
        """(how many positions of a path are there, from its start; their slots)."""

    def leaves(self) -> list[int]:
        """Where paths end that nothing holds, the one that is evicted first before others."""

    def use(self, node_id: int) -> None:
        """Make a path the most recently used one."""

    def refresh(self, space: Space, tokens: np.ndarray, node_id: int) -> None:
        """The same of a path whose tokens are at hand, and the node that it ends with."""


class Ranks(Protocol):
    """The processes that share a tree: each has its own part of every token's KV, and the same nodes."""

    alone: bool

    def gather(self, value: Any) -> list[Any]:
        """`value` of each rank, in the same order everywhere. Every rank must call it as often as the others."""


class Alone:
    alone = True

    def gather(self, value: Any) -> list[Any]:
        return [value]


ALONE = Alone()


class Gathered(Protocol):
    """KV bytes that were read, perhaps still on their way from a device."""

    raw: np.ndarray

    def arrived(self) -> object:
        """Returns once `raw` holds them. From any thread, letting others run meanwhile."""

    def done(self) -> object:
        """Nobody looks at `raw` any more: its memory may be used again. From any thread."""


class Pages(Protocol):
    """The KV pools and their allocator."""

    pools: tuple[Pool, ...]

    def of_pool(self, pool: int, slots):
        """Where another pool than the first has what it holds of these slots of the first; None where it has not all
        of it."""

    def gather(self, pool: int, slots: Sequence) -> Gathered:
        """KV bytes of these runs of slots, buffer after buffer, in memory that nobody writes to any more. From now on
        the slots may be given to others."""

    def size(self) -> int:
        """Tokens that the first pool holds in all."""

    def capacity(self, pool: int = 0) -> int:
        """Slots that a restore may take: one for each token, or, of a pool of states, for each state."""

    def allocate(self, count: int, pool: int = 0):
        """So many slots, or None."""

    def free(self, slots, pool: int = 0) -> None: ...

    def link(self, pool: int, slots, others) -> None:
        """Slots of the first pool that are about to be inserted: another pool has what it holds of them in `others`."""

    def staging(self, size: int) -> np.ndarray:
        """Memory from which `scatter` is fast."""

    def scatter(
        self, pool: int, slots, raw: np.ndarray, tokens: int, first: int, stored: Pool | None = None,
        slices: Sequence[Slice] | None = None,
    ) -> None:  # fmt: skip
        """Write those of a record of `tokens` tokens that stand from token `first` on to these slots. With `slices`,
        the record is of another pool, `stored`, and only these parts of its rows belong here."""

    def slot_numbers(self, slots) -> np.ndarray | None:
        """The numbers of these slots, where they are in this process's memory; None where they are not."""

    def memory(self, pool: int, first: int, count: int) -> list[np.ndarray]:
        """The bytes of so many slots from number `first` on, in each buffer, to be written from any thread. They must
        not be anybody's yet."""

    def settle(self) -> None:
        """Wait until everything that was scattered is there."""
