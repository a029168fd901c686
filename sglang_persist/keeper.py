"""What is done to a shard on the store's thread: make room, make generations count, join and rewrite segments.

The budget belongs to the whole store: all namespaces, all ranks, temporary files. Of what the other namespaces leave,
each rank of ours has an equal part. Where a snapshot does not fit, old generations go first, oldest first, in whatever
namespace; then the coldest paths of our own tree, leaf before ancestor. What nothing refers to any more is gained by
deleting segments that are dead as a whole and rewriting those that are so in good part, one at a time: the overshoot is
one segment, and no segment is larger than a tenth of the budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_persist.errors import FormatError, SnapshotFailed, StoreBusy, StoreError, StoreFull
from sglang_persist.format.codec import Codec, choose
from sglang_persist.format.segment import SegmentIndex
from sglang_persist.log import logger
from sglang_persist.model import Identity, Manifest, Pool, Rates, SegmentRef
from sglang_persist.plan.breakeven import least_tokens
from sglang_persist.plan.fitting import newest_part
from sglang_persist.plan.rewriting import plan_merge, plan_reclaim
from sglang_persist.plan.saving import Settled
from sglang_persist.store import names, prune, shard
from sglang_persist.store.home import KEEP, RECENT, Home
from sglang_persist.store.shard import Segment, open_segment
from sglang_persist.store.verify import store_bytes
from sglang_persist.store.writer import SEGMENT_BYTES, SegmentWriter, commit, least_segment_bytes, merge

#: Of the budget: what a segment may take, and what a tree that does not fit is cut down to. The rest of it is for what
#: is dead in segments that are not worth rewriting yet.
SEGMENT_SHARE, TREE_SHARE = 0.1, 0.75
#: A record is at most this long and, above 64 tokens, at most this large before coding.
RECORD_TOKENS, MIN_RECORD_TOKENS, RECORD_BYTES = 256, 64, 8 << 20


@dataclass(frozen=True)
class SaveRequest:
    """One snapshot to take. `deadline` is on the monotonic clock: past it, what is written by then is committed.
    `last`: nothing is served any more, so nothing has to be sliced."""

    generation: int
    reason: str
    deadline: float | None = None
    last: bool = False
    #: The shortest path to save, where that was decided elsewhere.
    least_tokens: int | None = None
    #: Whether this rank answers for those that share its tree.
    leads: bool = False


@dataclass(frozen=True)
class Shape:
    """What all generations of one process have in common."""

    identity: Identity
    pools: tuple[Pool, ...]
    page_tokens: int
    shards: tuple[str, ...]
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """How many shards of this server share the bytes that others leave."""
        return len(self.shards) * self.replicas


@dataclass(frozen=True)
class Budget:
    """Bytes: of the whole store, what this shard may hold of them, and what it does hold."""

    total: int
    cap: int
    own: int

    @property
    def room(self) -> int:
        return self.cap - self.own

    @property
    def segment_bytes(self) -> int:
        return max(1, min(SEGMENT_BYTES, int(self.total * SEGMENT_SHARE)))

    @property
    def room_for_one(self) -> int:
        """The room where a segment may be written above the cap: one, not another one at every snapshot."""
        return max(self.room, self.segment_bytes + min(self.room, 0))


@dataclass(frozen=True)
class Ready:
    """The state of the store before a snapshot. `complete`: whether every rank has its newest generation, and none a
    newer one."""

    request: SaveRequest
    budget: Budget
    complete: bool


class Keeper:
    """Every method that does not only decide reads or changes files: they run through `Home.run`."""

    def __init__(self, home: Home, shape: Shape, settings):
        self.home, self.shape, self.settings = home, shape, settings
        #: What was measured in this process or, until then, by those before it.
        self.rates = Rates()
        #: Whether the other ranks' parts are waited for: not at the end, when they may wait for this rank.
        self.waits = True

    # -------------------------------------------------------------------------------------------- decide

    def expected_page_bytes(self) -> list[float]:
        """What a page will take on disk, in each pool: what those that are stored do, else a little more than 16-bit KV
        really does; other types as they are."""
        indexes = [i for i in self.home.segments.values() if i.pools == self.shape.pools]
        out = []
        for number, pool in enumerate(self.shape.pools):
            raw = size = pool.bytes(1, self.shape.page_tokens)
            if pages := sum(int(i.pages[i.pool == number].sum()) for i in indexes):
                size = min(raw, sum(int(i.stored[i.pool == number].sum()) for i in indexes) / pages)
            elif all(choose(self.settings.compression, b.dtype) is Codec.ROT16 for b in pool.buffers):
                size = raw * 3 / 4
            out.append(size + 16 + 8 * self.shape.page_tokens)  # and its hash and token ids
        return out

    def least_tokens(self) -> int:
        """The shortest path to save or restore: what the operator said, else break-even."""
        settings = self.settings
        if settings.min_tokens is not None:
            return settings.min_tokens
        return least_tokens(self.rates) if settings.hottest >= 1 else 0

    @property
    def at_ends(self) -> list[int]:
        return [number for number, pool in enumerate(self.shape.pools) if pool.at_ends]

    def record_pages(self, budget: Budget) -> list[int]:
        """How many pages a record may have, in each pool."""
        out, page_tokens = [], self.shape.page_tokens
        for pool in self.shape.pools:
            page_bytes = max(1, pool.bytes(1, page_tokens))
            pages = max(MIN_RECORD_TOKENS, RECORD_TOKENS) // page_tokens
            pages = min(pages, max(MIN_RECORD_TOKENS // page_tokens, RECORD_BYTES // page_bytes))
            # Two records at least in a segment, however small the budget makes it.
            out.append(1 if pool.at_ends else max(1, min(pages, budget.segment_bytes // 2 // page_bytes)))
        return out

    # ------------------------------------------------------------------------------------------- measure

    def budget(self) -> Budget:
        home = self.home
        free, whole = home.fs.space(home.root)
        # What else lies in the directory is not the store's.
        models = [e.name for e in home.fs.list(home.root) if e.is_dir and names.MODEL.fullmatch(e.name)]
        store = sum(store_bytes(home.fs, home.root / name)[1] for name in models)
        ours = sum(store_bytes(home.fs, p)[1] for p in self._shards())
        own = store_bytes(home.fs, home.path)[1]
        if whole:
            total = min(self.settings.max_bytes.of(whole), store + free - self.settings.min_free.of(whole))
        else:  # a file system that does not tell its size: only a limit in bytes can be held
            total = self.settings.max_bytes.bytes or 1 << 62
        return Budget(total, (total - (store - ours)) // self.shape.ranks, own)

    def _shards(self) -> list[Path]:
        """The directories of this server's ranks: those of replicas that are no more are not among them."""
        cut = self.home.path.parent
        found = [e.name for e in self.home.fs.list(cut) if e.is_dir and names.SHARD.fullmatch(e.name)]
        return [cut / name for name in found if names.replica(name) < self.shape.replicas]

    def _spares(self, shard: Path) -> bool:
        """Whether a shard counts as in use: those of this server's ranks, and of replicas that are no more those that
        another one of its replicas looks after, as it does where these are restored (store/sources.py)."""
        if shard.parent != self.home.path.parent:
            return False
        replicas, own = self.shape.replicas, names.replica(self.home.path.name)
        return names.replica(shard.name) < replicas or names.heir(shard.name, replicas) != own

    # ---------------------------------------------------------------------------------------------- move

    def start(self) -> Budget:
        """Become the writer, and hold a budget that is smaller than what is stored. Raises StoreError."""
        self.home.become_writer()
        return self.hold(even_the_last=True)

    def hold(self, even_the_last: bool = False) -> Budget:
        """Where more is stored than the budget allows (it was lowered, or others fill the disk), cut it down.

        Where not one path may stay, `even_the_last` goes at a start: the operator said so. While serving, it is others
        who fill the disk, perhaps for a moment, and the hottest prefixes are not given up for that.
        """
        budget, home = self.make_room(0), self.home
        if budget.room < 0 and home.manifest is not None:
            logger.info("%s: %d bytes above the budget; the coldest prefixes go", home.path, -budget.room)
            part = newest_part(home.manifest, home.segments, home.known, budget.cap * TREE_SHARE)
            if len(part.nodes):
                return self.shrink(part, 0)
            if even_the_last:
                home.drop()
                return self.budget()
        return budget

    def prepare(self, request: SaveRequest) -> Ready:
        """Hold the lock and number the generation. Raises StoreBusy, StoreError."""
        home = self.home
        home.become_writer()
        number = home.next_generation()
        if request.generation < number:
            # Another server wrote here since ours was numbered. Several ranks cannot renumber one by one.
            if len(self.shape.shards) == 1:
                request = replace(request, generation=number)
            elif request.generation != home.generation or home.is_complete():
                raise StoreBusy(f"{home.path}: generation {request.generation} is taken, the next is {number}")
            # Else the others have not taken the one that this rank took last: it is taken again, by all.
        budget = self.budget()
        if least_segment_bytes(self.shape.pools, self.shape.page_tokens) > budget.segment_bytes:
            self.hold()
            raise StoreFull(f"{home.root}: a segment, a tenth of the budget of {budget.total} bytes, holds no page")
        for index in home.segments.values():
            index.sort()
        return Ready(request, budget, home.is_complete() and not home.is_behind())

    def make_room(self, wanted: int) -> Budget:
        """Retire old generations, oldest first, here and where no server writes, until `wanted` bytes have room."""
        budget = self.budget()
        if budget.room >= wanted:
            return budget
        home = self.home
        # Of what other namespaces give up, each rank has its part.
        missing = (wanted - budget.room) * self.shape.ranks
        since = time.time() - RECENT
        plan, locks = prune.plan_store(home.fs, home.root, KEEP, None, missing, since, self._spares)
        try:
            prune.execute(home.fs, plan)
        finally:
            for lock in locks:
                lock.release()
        home.forget_missing()
        return self.budget()

    def shrink(self, part: Settled, wanted: int) -> Budget:
        """Cut the newest generation down to a part of it, under the same name: all ranks still have it. Then rewrite
        segments until `wanted` bytes have room."""
        home = self.home
        self._replace(part, [])
        while (budget := self.budget()).room < wanted:
            used = part.used()
            segments = dict(home.segments)
            # What another generation names as well (one that not every rank has followed yet) would stay all the same.
            held = prune.named(home.fs, home.path, but=home.generation)
            worth = [i for i in plan_reclaim([segments[s] for s in {s for s, _ in used}], used) if i.id not in held]
            if not worth:
                break
            try:
                written = self._rewrite(part, worth[:1], segments)
            except (FormatError, StoreError) as error:
                logger.warning("a segment was not rewritten: %s", error)
                break
            self._replace(part, written)
        return budget

    def _replace(self, part: Settled, written: list[SegmentIndex]) -> None:
        """Put a part of the newest generation, perhaps moved, into its place; what only that one named goes."""
        m = self.home.manifest
        self._write(part, written, SaveRequest(m.generation, m.reason), again=True)
        self.home.retire(1, {ref.id for ref in m.segments})

    def commit(self, settled: Settled, written: list[SegmentIndex], request: SaveRequest) -> tuple[int, int]:
        """Make the generation count, joined segments included where that is due and there is room for it.

        Returns (bytes added, bytes of the whole store).
        """
        new_bytes = sum(i.file_bytes for i in written)
        segments = {**self.home.segments, **{i.id: i for i in written}}
        if request.reason != "shutdown":
            written = written + self._merge(settled, segments)
        home = self.home
        replaced = home.manifest.segments if request.generation == home.generation else ()
        new_bytes += self._write(settled, written, request)
        try:
            home.retire(unnamed={ref.id for ref in replaced})
        except StoreError as error:  # the generation counts all the same
            logger.warning("older generations were not retired: %s", error)
        return new_bytes, store_bytes(self.home.fs, self.home.root)[1]

    def others(self, generation: int, timeout: float) -> tuple[int, int]:
        """Wait for the other ranks' parts of a generation. Returns (bytes that they added, bytes of the whole store).
        Raises SnapshotFailed where one has not committed its part in time."""
        home, added, end = self.home, 0, time.monotonic() + timeout
        for name in self.shape.shards:
            path = home.path.parent / name
            if path == home.path:
                continue
            while not home.fs.exists(path / names.manifest(generation)):
                if not self.waits:
                    return added, store_bytes(home.fs, home.root)[1]
                if time.monotonic() > end:
                    raise SnapshotFailed(f"{path}: generation {generation} was not committed within {timeout:.0f} s")
                time.sleep(0.02)
            added += shard.added_bytes(home.fs, path, generation)
        return added, store_bytes(home.fs, home.root)[1]

    def new_writer(self, budget: Budget) -> SegmentWriter:
        home, settings = self.home, self.settings
        return SegmentWriter(
            home.fs, home.path, home.namespace, self.shape.pools, self.shape.page_tokens, settings.compression,
            settings.threads, budget.segment_bytes,
        )  # fmt: skip

    def _write(self, settled: Settled, written: list[SegmentIndex], request: SaveRequest, again: bool = False) -> int:
        """The manifest's bytes."""
        home, shape = self.home, self.shape
        segments = {**home.segments, **{i.id: i for i in written}}
        used = settled.used()
        named, rows = [segments[s] for s in sorted({s for s, _ in used})], settled.nodes.pieces.rows
        manifest = Manifest(
            generation=request.generation,
            created=home.manifest.created if again else time.time(),
            reason=request.reason,
            shard=home.path.name,
            shards=shape.shards,
            page_tokens=shape.page_tokens,
            identity=shape.identity,
            pools=shape.pools,
            spaces=tuple(settled.spaces),
            segments=tuple(SegmentRef(i.id, i.file_bytes, i.index_digest, i.records) for i in named),
            nodes=settled.nodes,
            tokens=settled.tokens,
            raw_bytes=sum(
                int(rows["pages"][rows["pool"] == number].sum()) * pool.bytes(1, shape.page_tokens)
                for number, pool in enumerate(shape.pools)
            ),
            stored_bytes=sum(int(segments[s].stored[r]) for s, r in used),
            left_out_tokens=settled.left_out_tokens,
            rates=self.rates,
            taken=home.manifest.taken if again else home.taken,
        )
        size = commit(home.fs, home.path, manifest, again or request.generation == home.generation)
        # Here, not by whoever waits for it: a snapshot that is given up at this point has been taken all the same.
        home.adopt(manifest, settled.known, written)
        return size

    def _merge(self, settled: Settled, segments: dict[bytes, SegmentIndex]) -> list[SegmentIndex]:
        """Rewrite what `plan_merge` chooses; the settled tree then refers to what is new. No merge is no failure."""
        used = settled.used()
        budget = self.budget()
        chosen = plan_merge([segments[s] for s in {s for s, _ in used}], used, budget.segment_bytes)
        ids = {i.id for i in chosen}
        needed = sum(int(segments[s].stored[r]) for s, r in used if s in ids)
        needed += sum(i.file_bytes - int(i.stored.sum()) for i in chosen)  # and what says where they are
        if not chosen or needed > budget.room:
            return []
        try:
            return self._rewrite(settled, chosen, segments)
        except (FormatError, StoreError) as error:
            logger.warning("segments were not joined: %s", error)
            return []

    def _rewrite(
        self, settled: Settled, chosen: Iterable[SegmentIndex], segments: dict[bytes, SegmentIndex]
    ) -> list[SegmentIndex]:
        """Copy the records of these segments that are used into new ones, as they are coded."""
        home, ids = self.home, {i.id for i in chosen}
        records = sorted(r for r in settled.used() if r[0] in ids)
        opened: dict[bytes, Segment] = {}
        writer = self.new_writer(self.budget())
        try:
            for name in ids:
                opened[name] = open_segment(home.fs, home.path, name)
            settled.move(merge(writer, opened, records))
        finally:
            writer.abort()
            for segment in opened.values():
                segment.close()
        segments.update({i.id: i for i in writer.indexes})
        return writer.indexes
