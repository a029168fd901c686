"""SGLang's radix tree, read and filled through the public calls of its core, the same for the Rust and Python ones."""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_persist.errors import Unsupported
from sglang_persist.model import HASH_BYTES, Space
from sglang_persist.plan.loading import NO_STATE, leading
from sglang_persist.plan.tree import NO_PARENT, Content, TreeNode, TreeNodes

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
#: Trees that are understood, by what their nodes have: the components stand in the order of the pools.
COMPONENTS = ((FULL,), (FULL, SWA), (FULL, MAMBA))
#: Why tokens of the tree are not saved.
HOST_MEMORY, MEDIA = "host_memory", "media"
_EVERYTHING = 1 << 40
#: Policies that evict the most recent first: there, inserting in reverse reproduces the order.
_REVERSED = ("mru", "filo")
_UNTESTED = ("tlru",)
#: Calls of the core's interface that this module makes. All must be there, or persistence stays off.
_NEEDED = (
    "backfill_missing_hash_values", "collect_full_device_indices", "collect_path_info", "evict_device_end",
    "evict_device_next_node", "evict_device_start", "get_component_device_value", "match_full_device_prefix",
    "prefetch_anchor_info", "snapshot_buffer_backup",
)  # fmt: skip

#: Leaves up to which the engine's own order is asked for while it serves: one call, 3.4 us a leaf. Of more, the order
#: in which their paths were last inserted has to do.
EXACT_LEAVES = 1000
#: Tokens from which on a node's own slots are asked for. They then stay an object of Python as long as the node lives,
#: and of 10^5 the garbage collector takes notice. Of a shorter one the whole path's are asked for, which are a copy.
LONG_NODE = 2048
#: Paths that are looked up in one step, 2 us a node.
STEP_PATHS = 64
#: Nodes whose order is remembered.
REMEMBERED = 1 << 19
#: Pages that are hashed in one call, which takes 0.3 us a page and, however few are new, 0.3 us a node of the tree.
HASHED_PAGES = 16 << 10


class LiveTree:
    """`ports.Tree` over a `UnifiedRadixCache`. `locked` yields ids of nodes that running requests hold. Not `keyed`,
    it has only the paths without an extra key: others are neither shown nor taken. `media`: prompts may hold pictures
    or sound, which stand for themselves or as one of these token ids, and paths are shown up to the first."""

    def __init__(
        self, cache, policy: str, locked: Callable[[], Iterable[int]] = tuple, keyed: bool = True,
        media: Collection[int] | None = None,
    ):  # fmt: skip
        if type(cache) is not UnifiedRadixCache:
            raise Unsupported("unsupported_tree", f"radix cache {type(cache).__module__}.{type(cache).__qualname__}")
        if cache.disable:
            raise Unsupported("no_radix_cache", "the radix cache is disabled")
        if tuple(cache.tree_components) not in COMPONENTS:
            names = "+".join(str(c.name).lower() for c in cache.tree_components)
            raise Unsupported("unsupported_tree", f"a radix tree with components {names}")
        if policy in _UNTESTED:
            raise Unsupported("unsupported_tree", f"eviction policy {policy}")
        missing = [name for name in _NEEDED if not hasattr(cache.tree_core, name)]
        if missing:
            raise Unsupported("unsupported_engine", f"the tree core lacks {', '.join(missing)}")
        self.cache, self.core, self._locked = cache, cache.tree_core, locked
        #: What pools beside the first hold.
        self._others = tuple(cache.tree_components)[1:]
        self.page_tokens = int(cache.page_size)
        self.bigram = bool(self.core.is_eagle)
        self._reversed = policy in _REVERSED
        self._keyed, self._media = keyed, None if media is None else np.array(sorted(media), np.int64)
        #: Of a node, its start, its end and where its text ends.
        self._texts: dict[int, tuple[int, int, int]] = {}
        #: Tokens that the last scan did not show, and why.
        self.not_saved: Counter[str] = Counter()
        #: Ends of paths, the one that was inserted last at the end; None: not watched, or more than can be remembered.
        self._inserted: dict[int, None] | None = None
        #: At the last scan, of each node the one above it.
        self._parents: dict[int, int] = {}
        self._watching, self._lru = False, policy == "lru"
        self._unhashed = 0

    @property
    def states(self) -> dict[str, int | bool | None]:
        """Where in a path states may stand."""
        component = self.cache.components[MAMBA]
        return {
            "extra_buffer": bool(self.cache.enable_mamba_extra_buffer),
            "chunk": int(component.mamba_cache_chunk_size),
            "grid": getattr(component, "mamba_checkpoint_grid", None),
        }

    # ------------------------------------------------------------------------- what is noted while it serves

    def watch(self) -> None:
        """From now on every insertion is told to `inserted`. The tree is empty."""
        self._watching = self._lru
        self._inserted = {} if self._watching else None
        self._parents, self._unhashed = {}, 0
        self._texts = {}

    def inserted(self, node_id: int, new_tokens: int) -> None:
        self._unhashed += new_tokens
        if self._inserted is not None:
            self._inserted.pop(node_id, None)
            self._inserted[node_id] = None
            if len(self._inserted) > REMEMBERED:
                self._inserted = None

    def keep_current(self) -> None:
        """Hash what is new before it is so much that doing it in one call, which it takes, would be felt: beside a look
        at all nodes, which is the most of it in a large tree."""
        if self._unhashed > self.page_tokens * max(HASHED_PAGES, len(self._inserted or ()) // 4):
            self._hash()

    def _hash(self) -> None:
        self._unhashed = 0
        self.core.backfill_missing_hash_values()

    # --------------------------------------------------------------------------------------------- reading

    def nodes(self) -> TreeNodes:
        """`scan`, in one go and in the engine's own order."""
        work = self.scan(at_once=True)
        while True:
            try:
                next(work)
            except StopIteration as done:
                return done.value

    def scan(self, at_once: bool = False) -> Generator[None, None, TreeNodes]:
        before = self._inserted
        exact = at_once or before is None or len(before) <= EXACT_LEAVES
        if exact:
            leaves = self.leaves()
            if self._reversed:
                leaves.reverse()
        else:
            leaves = list(before)
        locked = dict.fromkeys(self._locked())
        leaves = [i for i in leaves if i not in locked] + list(locked)
        out = array("q")  # id, parent, start, end, again and again
        index: dict[int, int] = {}
        parents: dict[int, int] = {}
        ends = None
        if self._watching:
            self._inserted = {}  # what is inserted between the slices is newer than all that is found here
        try:
            if not exact:
                yield None
                self._hash()
            for at in range(0, len(leaves), STEP_PATHS):
                yield None
                for path in self._paths(leaves[at : at + STEP_PATHS]):
                    self._add(path, out, index, parents)
            yield None
            nodes = TreeNodes(*np.array(out, np.int64).reshape(-1, 4).T.copy())
            yield None
            yield from self._look(nodes)
            leaf = np.ones(len(nodes), bool)
            leaf[nodes.parent[nodes.parent >= 0]] = False
            ends = nodes.id[leaf].tolist()
            self._parents = parents
            yield None
            self.not_saved.clear()
            yield from self._count_host(nodes)
            if self._media is not None:
                nodes = yield from self._only_text(nodes)
            if MAMBA in self._others:
                nodes = self._up_to_states(nodes)
        finally:
            if self._watching and self._inserted is not None:
                since, self._inserted = self._inserted, dict.fromkeys(before or () if ends is None else ends)
                for node_id in since:
                    self.inserted(node_id, 0)
        return nodes

    def _look(self, nodes: TreeNodes) -> Generator[None, None, None]:
        """Which pools beside the first hold something of each node."""
        for pool, component in enumerate(self._others, 1):
            for i, node_id in enumerate(nodes.id.tolist()):
                with contextlib.suppress(KeyError):  # evicted since
                    if self.core.get_component_device_value(node_id, component) is not None:
                        nodes.states[i] |= 1 << pool
                if i % STEP_PATHS == 0:
                    yield None

    def _count_host(self, nodes: TreeNodes) -> Generator[None, None, None]:
        """How much HiCache has in host memory alone: the core names no node of that."""
        pool = getattr(self.cache, "full_kv_pool_host", None)
        if pool is None or getattr(self.core, "is_host_memory_buffer_only", False):
            return
        count = int(pool.logical_size) - int(pool.available_size())
        for i, node in enumerate(nodes):
            with contextlib.suppress(KeyError):  # evicted since
                if self.core.is_backuped(node.id):
                    count -= node.end - node.start
            if i % STEP_PATHS == 0:
                yield None
        if count > 0:
            self.not_saved[HOST_MEMORY] = count

    def _only_text(self, nodes: TreeNodes) -> Generator[None, None, TreeNodes]:
        """Each path up to the first picture or sound. What SGLang puts into the place of one is a digest, made in ways
        that differ from model to model and release to release, or, where it cannot tell where it belongs, the model's
        own placeholder; the KV of text in front of it does not depend on it."""
        texts, until = {}, nodes.end.copy()
        for i, node in enumerate(nodes):
            if i % STEP_PATHS == 0:
                yield None
            if node.parent >= 0 and until[node.parent] < nodes.end[node.parent]:
                until[i] = node.start
            else:
                text = self._texts.get(node.id)
                if text is None or text[:2] != (node.start, node.end):
                    found = self._whole(node)
                    yield None
                    if found is None:  # evicted since
                        until[i] = node.start
                        continue
                    text = node.start, node.end, node.start + self._text_of(found)
                texts[node.id], until[i] = text, text[2]
            self.not_saved[MEDIA] += int(node.end - until[i])
        self._texts, self.not_saved = texts, +self.not_saved
        if MAMBA in self._others:  # a state is that of the whole node
            nodes.states[until < nodes.end] = 0
        shown = nodes.take(np.flatnonzero(until > nodes.start))
        shown.end[:] = until[until > nodes.start]
        return shown

    def _up_to_states(self, nodes: TreeNodes) -> TreeNodes:
        """Each path up to its last state, from which alone a request can go on."""
        leads = np.zeros(len(nodes), bool)
        leads[list(leading(nodes.parent.tolist(), np.flatnonzero(nodes.states).tolist()))] = True
        if lost := int((nodes.end - nodes.start)[~leads].sum()):
            self.not_saved[NO_STATE] = lost
        return nodes.take(np.flatnonzero(leads))

    def _text_of(self, found: Content) -> int:
        """How many positions of a node stand in front of the first picture or sound, in whole pages."""
        media = np.flatnonzero((found.tokens >= MM_PAD_SHIFT_VALUE) | np.isin(found.tokens, self._media))
        text = max(0, (int(media[0]) if len(media) else len(found.tokens)) - found.space.extra_tokens)
        return text // self.page_tokens * self.page_tokens

    def _paths(self, leaves: list[int]) -> Iterable[tuple]:
        try:
            return self.core.collect_path_info(leaves)
        except KeyError:
            return [self._path(leaf) for leaf in leaves]

    def _path(self, leaf: int | None) -> tuple:
        """Of a node that was evicted, the path to the nearest one above it that is there."""
        while leaf is not None:
            try:
                (path,) = self.core.collect_path_info([leaf])
                return path
            except KeyError:
                leaf = self._parents.get(leaf)
        return ()

    def _add(self, path: tuple, out: array, index: dict[int, int], parents: dict[int, int]) -> None:
        # All nodes of a path have the space of the first. One that is known was shown, so its path is to be.
        if not self._keyed and path and path[0].node_id not in index and self._has_extra_key(path[0].node_id):
            return
        for info in path:
            if info.node_id in index:
                continue
            if not info.full_value_len:  # from here on only the host has it
                break
            index[info.node_id] = len(index)
            parents[info.node_id] = info.parent_id
            out.extend((info.node_id, index.get(info.parent_id, -1), info.path_start, info.path_end))

    def _has_extra_key(self, node_id: int) -> bool:
        """Whether this node has one, the empty one included."""
        return self.core.prefetch_anchor_info(node_id)[0] is not None

    def leaves(self) -> list[int]:
        # Unlocked device leaves in eviction order: a walk that selects and evicts nothing. Of nodes that are not hashed
        # the core would tell nothing afterwards.
        self._hash()
        out: list[int] = []
        tracker = dict.fromkeys(self.cache.tree_components, 0)
        self.core.evict_device_start(FULL, _EVERYTHING)
        try:
            while (step := self.core.evict_device_next_node(FULL, tracker)).node_id is not None:
                out.append(step.node_id)
        finally:
            self.core.evict_device_end(FULL)
        return out

    def content(self, node: TreeNode) -> Content | None:
        shown = node.end - node.start
        node = self._as_it_is(node)
        found = self._whole(node)
        if found is None or node.end - node.start == shown:
            return found
        return replace(
            found, tokens=found.tokens[: shown + found.space.extra_tokens],
            hashes=found.hashes[: shown // self.page_tokens * HASH_BYTES],
        )  # fmt: skip

    def _as_it_is(self, node: TreeNode) -> TreeNode:
        """A node that was shown shorter than it is."""
        text = self._texts.get(node.id)
        return node._replace(end=text[1]) if text and text[2] == node.end else node

    def _whole(self, node: TreeNode) -> Content | None:
        found = self._content(node.id)
        if found is None or found.fits(node):
            return found
        # It was split since: the id stayed with the lower half, and its other parts stand above.
        try:
            (path,) = self.core.collect_path_info([node.id])
        except KeyError:
            return None
        parts = [self._content(info.node_id) for info in path if info.path_end > node.start]
        if not parts or None in parts:
            return None
        extra, top = found.space.extra_tokens, parts[0]
        tokens = np.concatenate([top.tokens, *(part.tokens[extra:] for part in parts[1:])])
        whole = Content(top.space, tokens, b"".join(part.hashes for part in parts), top.parent_hash)
        return whole if whole.fits(node) else None

    def _content(self, node_id: int) -> Content | None:
        found = self.core.snapshot_buffer_backup(node_id, False)
        if found is None:
            return None
        key = found.key
        space = Space(key.extra_key, key.cache_salt, bool(key.is_bigram))
        tokens = np.array(key.raw_token_ids(), np.int64)
        hashes = bytes.fromhex("".join(found.hash_values))
        if len(hashes) // HASH_BYTES * self.page_tokens + space.extra_tokens != len(tokens):
            return None
        parent = bytes.fromhex(found.parent_last_hash) if found.parent_last_hash else NO_PARENT
        return Content(space, tokens, hashes, parent)

    def slots(self, node: TreeNode, start: int, end: int) -> torch.Tensor | None:
        node = self._as_it_is(node)
        try:
            if node.end - node.start >= LONG_NODE:
                own = self.core.get_component_device_value(node.id, FULL)
                if own is None:
                    return None
                if (low := node.end - len(own)) <= start:
                    return own[start - low : end - low]
            path = self.core.collect_full_device_indices(node.id, self.cache.root_node_handle())
        except KeyError:
            return None
        return path[start:end] if len(path) == node.end else None

    def state(self, node_id: int) -> torch.Tensor | None:
        try:
            return self.core.get_component_device_value(node_id, MAMBA)
        except KeyError:
            return None

    def insert(
        self, space: Space, tokens: np.ndarray, slots: list[torch.Tensor], matched: int, absent: Sequence[int] = (),
        state: torch.Tensor | None = None,
    ) -> int | None:  # fmt: skip
        if not self._keyed and space.extra_key is not None:
            return None
        key = _key(space, tokens)
        if state is None and MAMBA in self._others:
            return None
        if self.core.match_full_device_prefix(key)[0] != matched:
            return None
        # `prev_prefix_len`: the tree must not free, as duplicates, the ancestors' own slots. `inserted_len`: ancestors
        # do not count a hit for each descendant that is put back.
        done = self.cache.insert(
            InsertParams(
                key=key, value=torch.cat(slots), prev_prefix_len=matched, inserted_len=matched,
                mamba_value=state, component_evicted_seqlens={self._others[pool - 1]: len(key) for pool in absent},
            )
        )  # fmt: skip
        self.inserted(int(done.last_device_node), len(key) - matched)
        return int(done.last_device_node)

    def matched(self, space: Space, tokens: np.ndarray) -> tuple[int, torch.Tensor]:
        count, last, _ = self.core.match_full_device_prefix(_key(space, tokens))
        return count, self.core.collect_full_device_indices(last, self.cache.root_node_handle())[:count]

    def use(self, node_id: int) -> None:
        try:
            (path,) = self.core.collect_path_info([node_id])
            found = [self.core.snapshot_buffer_backup(info.node_id, False) for info in path]
        except (KeyError, ValueError):  # evicted since
            return
        if not found or None in found:
            return
        key = found[0].key
        space = Space(key.extra_key, key.cache_salt, bool(key.is_bigram))
        runs = [np.array(f.key.raw_token_ids(), np.int64) for f in found]
        tokens = np.concatenate([runs[0], *(run[space.extra_tokens :] for run in runs[1:])])
        self.refresh(space, tokens, node_id)

    def refresh(self, space: Space, tokens: np.ndarray, node_id: int) -> None:
        self.cache.touch_prefix(_key(space, tokens))
        self.inserted(node_id, 0)


def _key(space: Space, tokens: np.ndarray) -> RadixKey:
    ids = array("q", np.ascontiguousarray(tokens, np.int64).tobytes())
    return RadixKey(ids, space.extra_key, is_bigram=space.bigram, cache_salt=space.cache_salt)


def prepare_hashes(cache) -> None:
    """The Python core hashes pages through an extension that is compiled on first use: do it now, not while serving."""
    if type(cache.tree_core).__name__.startswith("Rust"):
        return
    from sglang.srt.mem_cache.utils import get_hash_str

    try:
        get_hash_str([0], None, 1)
    except Exception as error:
        raise Unsupported("no_page_hashes", f"SGLang's page hashes cannot be built here: {error}") from error
