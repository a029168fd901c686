"""The save story: one snapshot, from the live tree to a committed generation.

decide   plan_save: which nodes, which of their pages the store has, which records to write
move     a record at a time: gather on the scheduler's thread; encode, checksum and write behind a bounded queue
settle   the nodes that are whole, prefix-closed
commit   segments durable, then the manifest: its rename is the moment from which the generation counts
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import numpy as np

from sglang_persist.errors import FormatError, StoreBusy, StoreError, StoreFull
from sglang_persist.format.codec import Codec, choose
from sglang_persist.format.segment import RecordKey, SegmentIndex
from sglang_persist.log import logger
from sglang_persist.model import HASH_BYTES, Identity, Manifest, SegmentRef
from sglang_persist.plan import RecordPlan, Settled, plan_merge, plan_save, select, settle
from sglang_persist.ports import Pages, Tree
from sglang_persist.store.home import Home
from sglang_persist.store.shard import Segment, open_segment
from sglang_persist.store.verify import store_bytes
from sglang_persist.store.writer import SegmentWriter, commit, merge

#: What a step waits for: called with a timeout in seconds. None: the step did work of its own.
Waiting = Callable[[float], object] | None

#: A record is at most this long and, above 64 tokens, at most this large before coding.
RECORD_TOKENS, MIN_RECORD_TOKENS, RECORD_BYTES = 256, 64, 8 << 20


@dataclass(frozen=True)
class SaveRequest:
    """One snapshot to take. `deadline` is on the monotonic clock: past it, what is written by then is committed."""

    generation: int
    reason: str
    shards: tuple[str, ...]
    deadline: float | None = None


@dataclass(frozen=True)
class SaveResult:
    generation: int
    tokens: int
    new_tokens: int
    new_bytes: int
    seconds: float
    left_out_tokens: int = 0
    store_bytes: int | None = None


def record_pages(pages: Pages, page_tokens: int) -> int:
    token_bytes = max(1, pages.pools[0].bytes(1, page_tokens) // page_tokens)
    tokens = max(MIN_RECORD_TOKENS, min(RECORD_TOKENS, RECORD_BYTES // token_bytes))
    return max(1, tokens // page_tokens)


def save(
    tree: Tree, pages: Pages, home: Home, identity: Identity, request: SaveRequest, settings
) -> Generator[Waiting, None, SaveResult]:
    """Take a snapshot, as a generator of bounded slices on the scheduler's thread.

    Yields None after a slice of work, and something to wait for when only other threads have work left. Returns a
    SaveResult. Closed early, it leaves the store as it was, or, once it is committing, with the new generation. Raises
    StoreError and FormatError.
    """
    began = time.monotonic()
    request, room, complete = yield from _finish(home.run(lambda: _prepare(home, request, settings)))
    nodes = select(tree.nodes(), settings.hottest, settings.min_tokens)
    # A layout that changed without its revision changing must not be mixed with ours.
    segments = {k: index for k, index in home.segments.items() if index.pools == pages.pools}
    plan = plan_save(nodes, tree.content, home.known, segments, tree.page_tokens, record_pages(pages, tree.page_tokens))
    if not nodes or (not plan.records and complete and home.is_current(plan)):
        # Nothing new, or nothing at all: an emptied tree must not stand above the last one that held something.
        tokens = home.manifest.tokens if home.manifest else 0
        return SaveResult(home.generation, tokens, 0, 0, time.monotonic() - began)
    expected = _expected_bytes(pages, plan.new_pages * tree.page_tokens, settings)
    if expected > room:
        raise StoreFull(f"{home.root}: about {expected} bytes of new KV, room for {max(0, room)}")
    yield None

    def new_writer() -> SegmentWriter:
        return SegmentWriter(
            home.fs, home.path, home.namespace, pages.pools, tree.page_tokens, settings.compression, settings.threads
        )

    writer = new_writer()
    try:
        kept: list[int] = []
        for record in plan.records:
            while not writer.ready():
                yield writer.ready
            if request.deadline and time.monotonic() > request.deadline:
                break
            count, raw = _gather(tree, pages, plan.nodes, record)
            kept.append(count)
            if count:
                writer.submit(_first_pages(record.key, count, tree.page_tokens), raw)
            yield None
        yield from _finish(writer.seal())

        places = iter(writer.placed)
        settled = settle(plan, [(*(next(places) if n else (b"", 0)), n) for n in kept])
        if not settled.nodes:  # everything was evicted, or out of time, before it was read
            yield from _finish(home.run(home.sweep))
            return SaveResult(home.generation, 0, 0, 0, time.monotonic() - began, settled.left_out_tokens)
        written = list(writer.indexes)
        new_bytes, store_bytes = yield from _finish(
            home.run(
                lambda: _commit(
                    home, settled, written, new_writer, room - expected, pages, tree.page_tokens, identity, request
                )
            )
        )
    except (StoreError, FormatError):
        # Segments that are durable already, but that no manifest will name.
        yield from _finish(home.run(home.sweep))
        raise
    finally:
        writer.abort()
    new_tokens = sum(kept) * tree.page_tokens
    return SaveResult(
        request.generation, settled.tokens, new_tokens, new_bytes, time.monotonic() - began, settled.left_out_tokens,
        store_bytes,
    )  # fmt: skip


def _gather(tree: Tree, pages: Pages, nodes, record: RecordPlan) -> tuple[int, np.ndarray | None]:
    """The record's KV as far as its nodes are still there: (pages, bytes)."""
    runs, count = [], 0
    for source in record.sources:
        node = nodes[source.node]
        start = node.start + source.first * tree.page_tokens
        slots = tree.slots(node, start, start + source.pages * tree.page_tokens)
        if slots is None:  # evicted since it was planned, so everything below it is gone as well
            break
        runs.append(slots)
        count += source.pages
    return count, pages.gather(record.key.pool, runs) if runs else None


def _first_pages(key: RecordKey, count: int, page_tokens: int) -> RecordKey:
    if count == key.pages:
        return key
    tokens = key.tokens[: count * page_tokens + key.space.extra_tokens]
    return replace(key, tokens=tokens, hashes=key.hashes[: count * HASH_BYTES])


def _commit(
    home: Home, settled: Settled, written: list[SegmentIndex], new_writer: Callable[[], SegmentWriter], room: int,
    pages: Pages, page_tokens: int, identity: Identity, request: SaveRequest,
) -> tuple[int, int]:  # fmt: skip
    """On the store's thread: join segments where that is due and there is room, then make the generation count.

    Returns (bytes added, bytes of the whole store).
    """
    new_bytes = sum(i.file_bytes for i in written)
    segments = {**home.segments, **{i.id: i for i in written}}
    if request.reason != "shutdown":
        written += _merge(home, settled, segments, new_writer, room)
    used = settled.used()
    named = [segments[s] for s in dict.fromkeys(s for s, _ in sorted(used))]
    manifest = Manifest(
        generation=request.generation,
        created=time.time(),
        reason=request.reason,
        shard=home.path.name,
        shards=request.shards,
        page_tokens=page_tokens,
        identity=identity,
        pools=pages.pools,
        spaces=tuple(settled.spaces),
        segments=tuple(SegmentRef(i.id, i.file_bytes, i.index_digest, i.records) for i in named),
        nodes=tuple(settled.nodes),
        tokens=settled.tokens,
        raw_bytes=sum(n.pages for n in settled.nodes) * pages.pools[0].bytes(1, page_tokens),
        stored_bytes=sum(int(segments[s].stored[r]) for s, r in used),
        left_out_tokens=settled.left_out_tokens,
    )
    new_bytes += commit(home.fs, home.path, manifest)
    # Here, not by whoever waits for it: a snapshot that is given up at this point has been taken all the same.
    home.adopt(manifest, settled.known, written)
    try:
        home.retire()
    except StoreError as error:  # the generation counts all the same
        logger.warning("older generations were not retired: %s", error)
    return new_bytes, store_bytes(home.fs, home.root)[1]


def _merge(
    home: Home, settled: Settled, segments: dict, new_writer: Callable[[], SegmentWriter], room: int
) -> list[SegmentIndex]:
    """Rewrite what `plan_merge` chooses; the settled tree then refers to the new segments. No merge is no failure."""
    used = settled.used()
    chosen = {i.id for i in plan_merge([segments[s] for s in {s for s, _ in used}], used)}
    if not chosen:
        return []
    records = sorted(r for r in used if r[0] in chosen)
    if sum(int(segments[s].stored[r]) for s, r in records) > room:
        return []
    opened: dict[bytes, Segment] = {}
    writer = new_writer()
    try:
        for name in chosen:
            opened[name] = open_segment(home.fs, home.path, name)
        settled.move(merge(writer, opened, records))
    except (FormatError, StoreError) as error:
        logger.warning("segments were not joined: %s", error)
        return []
    finally:
        writer.abort()
        for segment in opened.values():
            segment.close()
    segments.update({i.id: i for i in writer.indexes})
    return writer.indexes


def _prepare(home: Home, request: SaveRequest, settings) -> tuple[SaveRequest, int, bool]:
    """On the store's thread: hold the lock and number the generation. Tells by how many bytes the store may grow, and
    whether its newest generation is complete."""
    home.become_writer()
    number = home.next_generation()
    if request.generation < number:
        # Another server wrote here since ours was numbered. Several ranks cannot renumber one by one.
        if len(request.shards) > 1:
            raise StoreBusy(f"{home.path}: generation {request.generation} is taken, the next is {number}")
        request = replace(request, generation=number)
    return request, home.room(settings.max_bytes, settings.min_free), home.is_complete()


def _expected_bytes(pages: Pages, tokens: int, settings) -> int:
    """What so many new tokens will take on disk: a little more than 16-bit KV really does; other types as they are."""
    raw = pages.pools[0].bytes(tokens, 1)
    return (
        raw * 3 // 4
        if all(choose(settings.compression, b.dtype) is Codec.ROT16 for b in pages.pools[0].buffers)
        else raw
    )


def _finish(future: Future) -> Generator[Waiting, None, object]:
    """Let the scheduler go on until another thread is done; returns or raises what it did."""
    while not future.done():
        yield lambda timeout: wait([future], timeout)
    return future.result()
