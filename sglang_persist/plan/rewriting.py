"""Which segments to write again: small ones where there are many, and those that are mostly dead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sglang_persist.format.segment import SegmentIndex

#: Of segments that may be joined, a generation refers to at most so many; then the smaller ones are joined.
MAX_SEGMENTS = 8


def plan_merge(
    indexes: Sequence[SegmentIndex], used: Iterable[tuple[bytes, int]], segment_bytes: int
) -> list[SegmentIndex]:
    """Segments to rewrite into one: those that are mostly dead, and the smallest where there are too many.

    Joined are at least two, and as long as the next is not larger than what is joined already, so that a byte is
    rewritten a number of times that grows with the logarithm of the store, not with its age. What fills half of the
    largest segment that is written, `segment_bytes`, or of the largest index, is left as it is.
    """
    live = _live(indexes, used)
    dead = [i for i in indexes if live[i.id] * 2 < int(i.stored.sum())]
    rest = [i for i in indexes if i not in dead and live[i.id] * 2 < segment_bytes and not i.is_full]
    rest.sort(key=lambda i: live[i.id])
    chosen, total = list(dead), sum(live[i.id] for i in dead)
    excess = len(rest) + bool(chosen) - MAX_SEGMENTS
    for count, index in enumerate(rest):
        if excess <= 0 or (count > excess and live[index.id] > total):
            break
        chosen.append(index)
        total += live[index.id]
    return chosen if len(chosen) > 1 or dead else []


def plan_reclaim(indexes: Sequence[SegmentIndex], used: Iterable[tuple[bytes, int]]) -> list[SegmentIndex]:
    """Segments a quarter of which is dead, in the order in which rewriting them frees most for what it copies."""
    live = _live(indexes, used)
    sizes = {i.id: int(i.stored.sum()) for i in indexes}
    worth = [i for i in indexes if live[i.id] * 4 <= sizes[i.id] * 3]
    return sorted(worth, key=lambda i: live[i.id] / max(1, sizes[i.id]))


def _live(indexes: Sequence[SegmentIndex], used: Iterable[tuple[bytes, int]]) -> Counter:
    """Bytes of each segment's records that are used."""
    by_id = {i.id: i for i in indexes}
    live = Counter()
    for segment, record in used:
        live[segment] += int(by_id[segment].stored[record])
    return live
