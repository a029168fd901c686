"""One per scheduler process: composes tree, pages and store, and decides when things happen.

Every method is called on the scheduler's thread. Whatever goes wrong in here ends as a state and one line of log, never
as an exception in the engine.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, replace

from sglang.srt.runtime_context import get_memory, get_parallel

from sglang_persist.background import Background
from sglang_persist.bounded import within
from sglang_persist.config import Settings
from sglang_persist.engine import identity
from sglang_persist.engine.drafts import drafts
from sglang_persist.engine.pages import KvPages
from sglang_persist.engine.prefill import PrefillRate
from sglang_persist.engine.ranks import Group
from sglang_persist.engine.tree import LiveTree, prepare_hashes
from sglang_persist.errors import NewerFormat, PersistError, SnapshotFailed, StoreUnavailable, Unsupported, Unusable
from sglang_persist.filling import RestoreResult
from sglang_persist.format import codec, planes
from sglang_persist.fs import REAL, FileSystem
from sglang_persist.keeper import Keeper, SaveRequest, Shape
from sglang_persist.log import logger
from sglang_persist.model import Identity, Rates
from sglang_persist.plan import breakeven
from sglang_persist.plan.topology import Rank
from sglang_persist.restore import LOOK_SECONDS, restore
from sglang_persist.save import SaveResult, save
from sglang_persist.store import attempts, names, shard, verify
from sglang_persist.store.home import Home
from sglang_persist.store.root import writers_root

#: How long one pass of the scheduler's loop may work on a snapshot: while requests run, a share of what a pass takes.
LEAST_SLICE, BUSY_SLICE, IDLE_SLICE = 0.001, 0.003, 0.05
SLICE_SHARE = 0.1
#: Seconds that a start waits for what a file system has to do before the first snapshot; then it goes on without it.
START_WAIT = 10.0
#: Seconds without a byte after which a restore in the background is given up.
STALLED = 60.0
#: Of the shutdown timeout: from when on no new record is begun, and when the snapshot is given up.
SOFT_SHARE, HARD_SHARE = 0.6, 0.9


@dataclass(frozen=True)
class PersistCommand:
    """Travels with SGLang's own broadcast, so that every rank acts on it at the same point of its loop."""

    generation: int
    reason: str
    request: int
    #: Decided by the leader: each rank has measured other rates.
    least_tokens: int


class Persistence:
    def __init__(self, scheduler, settings: Settings, fs: FileSystem = REAL):
        self.scheduler, self.settings, self.fs = scheduler, settings, fs
        self.why_off: str | None = "not_started"
        self.why_cold: str | None = None
        self.restored = RestoreResult()
        self.restore_state, self.restore_seconds = "off", 0.0
        self.tree: LiveTree | None = None
        self.pages: KvPages | None = None
        self.home: Home | None = None
        self.keeper: Keeper | None = None
        self._job: Generator | None = None
        self._background: Background | None = None
        #: The generation that is being restored, and the mark that says so.
        self._attempted: tuple | None = None
        self._command: PersistCommand | None = None
        self._queue: list[PersistCommand] = []
        self._generation = 0
        self._requested = self._last_request = 0
        self._last_request_error: str | None = None
        self._budget: int | None = settings.max_bytes.bytes
        self.identity: Identity | None = None
        self.shards: tuple[str, ...] | None = None
        self.rank, self.leader, self.writes = 0, False, False
        self._least = 0
        self._in_flight = False
        self._next_due = float("inf")
        self._stop_requested = self._drain_requested = self._paused = False
        self._last: SaveResult | None = None
        self._last_success: float | None = None
        self._failures, self._last_error = 0, None
        self._store_bytes = 0
        self._passed: list[Exception] = []
        self._prefill = PrefillRate(bool(getattr(scheduler, "enable_overlap", False)))
        self._said_slow = False
        self._background_began = self._background_moved = 0.0
        self._last_pass = time.monotonic()

    # ------------------------------------------------------------------------------------------- start

    def start(self) -> None:
        """Identify, restore, and from here on take snapshots. Called once, before the first request is served."""
        deadline = time.monotonic() + self.settings.restore_timeout
        self._attempt(self._open)
        self._attempt(lambda: self._find(deadline))
        group = Group(get_parallel(), self.shards)
        # Each rank must come here and to what follows, whatever befell it.
        everywhere = all(group.gather(self._attempted is not None))
        if everywhere:
            self._attempt(lambda: self._restore(deadline, group))
        elif self._attempted is not None:
            self._end_attempt(False)
            self._cold("ranks_disagree", "another rank has nothing to restore")
            self.restore_state = "done"
        self._agree(group)
        if self.why_off or not self.writes:
            return
        self._check_writable()
        if self.settings.interval > 0:
            self._next_due = time.monotonic() + self.settings.interval

    def _attempt(self, step) -> None:
        """A step of the start. Whatever goes wrong in it turns persistence off, or, once that is on, leaves it cold."""
        if self.restore_state == "aborted" or (self.why_off and self.why_off != "not_started"):
            return
        try:
            step()
        except Unsupported as error:
            self._turn_off(error.reason, str(error))
        except TimeoutError:
            self._abort("timeout", "the store did not answer within the restore timeout")
        except PersistError as error:
            self._abort(error.reason, str(error))
        except Exception as error:
            logger.exception("not restored")
            self._abort("internal_error", str(error))

    def _abort(self, reason: str, detail: str) -> None:
        if self.why_off:
            self.why_cold = reason
            self._turn_off(reason, detail)
            return
        self._empty()
        self._cold(reason, detail)
        self.restore_state = "aborted"

    def _agree(self, group: Group) -> None:
        """Ranks of one tree must hold the same tree: where they do not, all of them start cold."""
        mine = (self.why_off, self.restored.digest.hexdigest())
        answers = group.gather((mine, self._generation, self.restored.whole))
        self._generation = max(number for _, number, _ in answers)
        others = [other for other, _, _ in answers]
        if all(other == mine for other in others):
            if all(whole for _, _, whole in answers):
                self.home.took(self._replicas)
            return
        self._empty()
        self._cold("ranks_disagree", f"this rank {mine}, all {others}")
        off = next((why for why, _ in others if why), None)
        if off and not self.why_off:
            self._turn_off(off, "another rank of this engine is off")

    def _empty(self) -> None:
        """Take back whatever a restore has begun: nothing runs yet, so the tree and the allocator are only ours."""
        if self.home is not None and self._attempted is not None:
            self.scheduler.tree_cache.reset()
            self.scheduler.token_to_kv_pool_allocator.clear()
            self.scheduler.req_to_token_pool.clear()
            self.tree.watch()
            self.home.forget_tree()
        self.restored.tokens = 0

    def _open(self) -> None:
        scheduler, parallel = self.scheduler, get_parallel()
        # With LoRA, the adapter's id is a part of the extra key that cannot be told from the rest of it.
        self.tree = LiveTree(
            scheduler.tree_cache, str(get_memory().radix_eviction_policy), self._locked_nodes,
            keyed=not scheduler.enable_lora, media=identity.media_tokens(scheduler),
        )  # fmt: skip
        self.tree.watch()
        of_drafts = drafts(scheduler)
        self.pages = KvPages(
            scheduler.token_to_kv_pool_allocator, lambda: getattr(scheduler, "forward_stream", None),
            [draft.pool for draft in of_drafts], scheduler.req_to_token_pool,
        )  # fmt: skip
        used = {codec.choose(self.settings.compression, b.dtype) for p in self.pages.pools for b in p.buffers}
        if codec.Codec.ROT16 in used:  # compile while the engine is still starting
            threading.Thread(target=planes.kernels, name="persist-compile", daemon=True).start()
        prepare_hashes(scheduler.tree_cache)
        root = within(START_WAIT, lambda: writers_root(self.fs, self.settings.dir))
        began = time.monotonic()
        self.identity = identity.identify(self.fs, scheduler, parallel, self.tree, self.pages, root, of_drafts)
        logger.info("identified %s in %.1f s", names.namespace(self.identity), time.monotonic() - began)
        latent = self.pages.latent
        self.shards = identity.group_shards(parallel, latent)
        name = identity.shard_name(parallel, latent)
        self.home = Home(self.fs, root, self.identity, name)
        heads = identity.heads(scheduler.model_config, self.pages)
        self._place = Rank(name, self.identity.cut, self.pages.pools, self.tree.page_tokens, heads)
        self.rank, self._replicas = identity.replicas(parallel)
        shape = Shape(self.identity, self.pages.pools, self.tree.page_tokens, self.shards, self._replicas)
        self.keeper = Keeper(self.home, shape, self.settings)
        self.writes = not latent or parallel.attn_tp_rank == 0
        self.leader = self.writes and self.home.path.name == self.shards[0]
        self.why_off = None

    def _locked_nodes(self):
        """Nodes that running requests hold: their leaves are not among the evictable ones."""
        requests = set(self.scheduler.collect_inflight_reqs())
        if self.scheduler.chunked_req is not None:
            requests.add(self.scheduler.chunked_req)
        is_root = self.scheduler.tree_cache.tree_core.is_root
        for request in requests:
            node = getattr(request, "last_node", None)
            if isinstance(node, int) and not is_root(node):
                yield node

    def _find(self, deadline: float) -> None:
        """Choose the generation to restore, if one fits and is to be restored."""
        home = self.home
        self._passed = self._on_store(home.find, deadline)
        for error in self._passed:
            logger.warning("passed over: %s", error)
        self._generation = self._on_store(home.next_generation, deadline) - 1
        if self.settings.restore == "off":
            return
        self.restore_state = "done"
        if home.manifest is not None and home.manifest.pools != self.pages.pools:
            home.manifest = home.fuller = None
            self._cold("layout_changed", "the stored buffers are laid out otherwise")
        try:
            self._on_store(lambda: home.look_around(self._place, self._replicas), deadline)
        except (PersistError, TimeoutError):
            if home.manifest is None:
                raise
            home.sources = []
        if home.manifest is None and not home.sources:
            self._cold(self.why_cold or self._on_store(self._why_cold, deadline), "nothing that fits is stored")
            return
        self.why_cold = None
        path, generation = home.path, home.generation
        if home.manifest is None or home.restores_another_cut:
            first = home.sources[0].parts[0]
            path, generation = first.path, first.manifest.generation
            logger.info("restoring from %s, generation %d", path, generation)
        attempt = None
        # Of all that read one shard, one: each that dies counts.
        if self.writes if path == home.path else self.leader and not self.rank:
            attempt = self._on_store(lambda: attempts.begin(self.fs, path, generation), deadline)
        self._attempted = path, generation, attempt

    def _on_store(self, work, deadline: float):
        """What the store's thread returns or raises. TimeoutError: a file system that does not answer."""
        return self.home.run(work).result(max(LOOK_SECONDS, deadline - time.monotonic()))

    def _restore(self, deadline: float, group: Group) -> None:
        """Restore what this rank and all others have. They all are here."""
        home = self.home
        began, generation = time.monotonic(), self._attempted[1]
        self.restore_state = "running"
        completed = False
        try:
            if home.manifest is not None:
                self.keeper.rates = home.manifest.rates
            restore(
                self.tree, self.pages, home, self.settings, deadline, self.restored, go_on=True,
                least_tokens=self.keeper.least_tokens(), ranks=group,
            )  # fmt: skip
            self._measure_load()
            completed = self.restored.rest is None
        finally:
            if self.restored.rest is None:
                self._end_attempt(completed)
        self.restore_seconds = time.monotonic() - began
        logger.info(
            "restored %d of %d tokens of generation %d%s in %.2f s%s", self.restored.tokens,
            self.restored.total_tokens, generation,
            f" and, where they are not in it, of {home.fuller.generation}" if home.fuller else "",
            self.restore_seconds,
            f", refused nodes: {dict(self.restored.refused)}" if self.restored.refused else "",
        )  # fmt: skip
        if self.restored.rest is None:
            self._restored()
        else:
            self._background = Background(self.tree, self.pages, home, self.restored.rest, self.settings.threads)
            self._background_began = self._background_moved = time.monotonic()
            logger.info("%d tokens are restored in the background", self._background.left)

    def _measure_load(self) -> None:
        found = self.restored
        if found.tokens >= breakeven.LEAST_LOADED:
            self.keeper.rates = replace(
                self.keeper.rates,
                load=found.tokens / found.load_seconds,
                path_seconds=found.insert_seconds / found.nodes,
            )

    def _measure_prefill(self) -> None:
        """What is known of computing goes into the next manifest, as what is known of loading does."""
        rates = self.keeper.rates
        if self._prefill.tokens >= breakeven.LEAST_PREFILLED:
            rates = self.keeper.rates = replace(rates, prefill=self._prefill.rate)
        if breakeven.loads_slower(rates) and not self._said_slow:
            self._said_slow = True
            logger.warning(
                "loading (%.0f tokens/s) is slower than computing (%.0f tokens/s): prefixes of less than %d tokens are "
                "not kept", rates.load, rates.prefill, breakeven.LIMIT,
            )  # fmt: skip

    def _restored(self) -> None:
        self.restore_state = "done"
        for error in self.restored.errors[:20]:
            logger.warning("refused: %s", error)
        if not self.restored.tokens:
            self._cold(next(iter(self.restored.refused), "no_snapshot"), "no node could be restored")

    def _end_attempt(self, completed: bool) -> None:
        path, generation, attempt = self._attempted
        self.home.run(lambda: attempts.end(self.fs, path, generation, attempt, completed))

    def _why_cold(self) -> str:
        passed = self._passed
        for kind in (NewerFormat, Unusable):
            if any(isinstance(e, kind) for e in passed):
                return kind.reason
        if passed:
            return "damaged"
        others = []
        for path in names.shard_dirs(self.fs, self.home.root):
            for generation in shard.generations(self.fs, path)[:1]:
                try:
                    others.append(shard.load_manifest(self.fs, path, generation).identity)
                except PersistError:
                    continue
        return identity.why_cold(self.identity, others)

    def _check_writable(self) -> None:
        """Say at the start, not at the first interval, that nothing can be written; and hold a lowered budget."""
        started = self.home.run(self._become_writer)
        try:
            self._store_bytes, self._budget = started.result(START_WAIT)
        except TimeoutError:
            self._failed(StoreUnavailable(f"{self.home.root}: the file system has not answered for {START_WAIT:.0f} s"))
        except PersistError as error:
            if self.restored.tokens == 0:
                self.why_cold = error.reason
            self._failed(error)
        except Exception as error:
            logger.exception("the store could not be opened for writing")
            self._failed(error)

    def _become_writer(self) -> tuple[int, int]:
        """On the store's thread. Returns (bytes of the whole store, its budget)."""
        self.keeper.start()
        root = self.home.root
        return verify.store_bytes(self.fs, root)[1], self.settings.max_bytes.of(self.fs.space(root)[1])

    def _cold(self, reason: str, detail: str) -> None:
        self.why_cold = reason
        logger.warning("cold start: %s (%s)", reason, detail)

    def _turn_off(self, reason: str, detail: str) -> None:
        self.why_off = reason
        self._end_background("aborted")
        self._drop_job("persistence was turned off")
        logger.warning("persistence is off: %s (%s)", reason, detail)

    # ---------------------------------------------------------------------------------------- each pass

    def poll(self, received: list) -> None:
        """On the rank that receives requests: add our commands to what is broadcast."""
        if self._stop_requested and get_parallel().pp_rank == 0:  # later stages are told by the first
            from sglang.srt.managers.io_struct import ShutdownReq

            self._stop_requested = False
            received.append(ShutdownReq())
        if self._in_flight or self.why_off or self._paused or not self.leader:
            return
        asked = self._requested > self._last_request
        draining, self._drain_requested = self._drain_requested, False
        # A snapshot of a tree that is still being filled would only say less than the last one.
        if asked or ((draining or time.monotonic() >= self._next_due) and self._background is None):
            self._in_flight = True
            reason = "manual" if asked else "shutdown" if draining else "interval"
            least = self.keeper.least_tokens()
            received.append(PersistCommand(self._generation + 1, reason, self._requested, least))

    def on_command(self, command: PersistCommand) -> None:
        self._least = command.least_tokens
        self._generation = max(self._generation, command.generation)
        if self.writes:
            self._queue.append(command)

    def tick(self) -> None:
        """After every intake of requests: a bounded slice of the running snapshot, else of the restore that goes on."""
        now = time.monotonic()
        passed, self._last_pass = now - self._last_pass, now
        self._prefill.seen(getattr(self.scheduler, "last_batch", None), passed)
        if self._job is None and self._queue and not self.why_off and not self._paused:
            self._begin(self._queue.pop(0))
        if self._job is None and self._background is None:
            if self.why_off is None:
                self.tree.keep_current()
            return
        idle = self._idle()
        busy = min(BUSY_SLICE, max(LEAST_SLICE, SLICE_SHARE * passed))
        end = now + (IDLE_SLICE if idle else busy)
        while (self._job or self._background) and (left := end - time.monotonic()) > 0:
            waiting = self._step() if self._job else self._step_background()
            if waiting is None:
                continue
            if not (idle and self.scheduler.idle_sleeper):
                break
            waiting(left)  # else the idle loop would sleep, for much longer

    def _idle(self) -> bool:
        """Whether nobody waits for this rank. With attention data parallelism other groups may compute, each pass of
        theirs together with one of this one."""
        alone = get_parallel().attn_dp_size == 1 or self.scheduler.idle_sleeper
        return bool(alone and self.scheduler.is_fully_idle())

    def _step_background(self):
        try:
            waiting = self._background.step()
        except StopIteration:
            self._end_background("done")
        except Exception as error:
            logger.exception("the restore was given up")
            self.restored.errors.append(str(error))
            self._end_background("aborted")
        else:
            if waiting is None:
                self._background_moved = time.monotonic()
            elif time.monotonic() - self._background_moved > STALLED:
                # Snapshots wait for it, so it must not wait for ever.
                logger.warning("nothing could be read for %.0f s", STALLED)
                self._end_background("aborted")
            else:
                return waiting
        return None

    def _end_background(self, state: str) -> None:
        if (background := self._background) is None:
            return
        self._background = None
        background.abort()
        self.pages.settle()
        self.restored.tokens += background.tokens
        self.restored.refused += background.refused
        self.restored.errors += background.errors
        self.restored.rest = None
        self.restore_seconds += time.monotonic() - self._background_began
        self._end_attempt(state == "done")
        if state == "done":
            self.home.took(self._replicas)
            self._restored()
        self.restore_state = state
        logger.info(
            "%s restoring in the background: %d of %d tokens in %.2f s", "ended" if state == "done" else "gave up",
            self.restored.tokens, self.restored.total_tokens, self.restore_seconds,
        )  # fmt: skip

    def _begin(self, command: PersistCommand, deadline: float | None = None, last: bool = False) -> None:
        self._measure_prefill()
        self._command = command
        self._generation = max(self._generation, command.generation)
        request = SaveRequest(
            command.generation, command.reason, deadline, last, command.least_tokens, self.leader and not last
        )
        self._job = save(self.tree, self.pages, self.keeper, request)

    def _step(self):
        """One slice; returns what it waits for, or None. The end of the job, good or bad, is dealt with here."""
        try:
            return next(self._job)
        except StopIteration as done:
            self._succeeded(done.value)
        except PersistError as error:
            self._failed(error)
        except Exception as error:
            logger.exception("snapshot failed")
            self._failed(error)
        return None

    def _succeeded(self, result: SaveResult) -> None:
        self._last, self._last_success, self._last_error = result, time.time(), None
        self._generation = max(self._generation, result.generation)
        if result.store_bytes is not None:
            self._store_bytes = result.store_bytes
        if result.new_bytes:
            logger.info(
                "generation %d (%s): %d tokens, %d new, %d bytes in %.2f s%s", result.generation, self._command.reason,
                result.tokens, result.new_tokens, result.new_bytes, result.seconds,
                f", {result.left_out_tokens} tokens left out" if result.left_out_tokens else "",
            )  # fmt: skip
        self._end_job()

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        text = f"{getattr(error, 'reason', type(error).__name__)}: {error}"
        if text != self._last_error:  # a full disk fails at every interval; say it once
            logger.warning("no snapshot: %s", text)
        self._last_error = text
        self._end_job(text)

    def _end_job(self, error: str | None = None) -> None:
        if self._command is not None and self._command.request > self._last_request:
            self._last_request, self._last_request_error = self._command.request, error
        self._job = self._command = None
        self._in_flight = bool(self._queue)
        if self.settings.interval > 0:
            self._next_due = time.monotonic() + self.settings.interval

    def _drop_job(self, why: str) -> None:
        """Stop the running snapshot; what was committed before stays the newest."""
        if self._job is not None:
            self._job.close()
            self._failed(SnapshotFailed(why))

    # --------------------------------------------------------------------------------- what SGLang tells

    def request_snapshot(self) -> None:
        self._requested += 1

    def request_stop(self, *_signal) -> None:
        """From a signal handler: leave the loop the way SGLang itself leaves it, all ranks together."""
        self._stop_requested = True

    def request_drain(self, *_signal) -> None:
        """From a signal handler: no request comes any more. What the last snapshot would have to write is begun."""
        self._drain_requested = True

    def shutdown(self) -> None:
        """The last snapshot, to its end: called when the loop is about to end and everything is drained."""
        if self.why_off or self._paused:
            return
        self._end_background("aborted")
        timeout, began = self.settings.shutdown_timeout, time.monotonic()
        hard = began + timeout * HARD_SHARE
        self._queue.clear()
        self.keeper.waits = False
        self._drive(hard)
        if time.monotonic() < hard and self.writes:
            least = self.keeper.least_tokens() if len(self.shards) == 1 else self._least
            command = PersistCommand(self._generation + 1, "shutdown", self._requested, least)
            self._begin(command, began + timeout * SOFT_SHARE, last=True)
            self._drive(hard)
        self.home.close(max(1.0, hard - time.monotonic()))
        self.why_off = "stopped"

    def _drive(self, deadline: float) -> None:
        while self._job is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                self._drop_job("the last snapshot did not end within the shutdown timeout")
            elif (waiting := self._step()) is not None:
                waiting(min(left, 0.25))

    def inserted(self, result, path_tokens: int) -> None:
        if self.why_off is None and result.last_device_node is not None:
            self.tree.inserted(int(result.last_device_node), path_tokens - result.prefix_len)

    def flushed(self) -> None:
        """The tree was emptied: what is being saved is gone; what is stored stays, or goes, as configured."""
        self._end_background("aborted")
        self._drop_job("the cache was flushed")
        if self.tree is not None:
            self.tree.watch()
        if self.home is None or self.why_off:
            return
        # On the store's thread: a commit that is under way there would bring back what is cleared here.
        self.home.run(self.home.forget_tree)
        if self.settings.on_flush == "drop" and self.writes:
            self.home.run(self.home.drop).add_done_callback(self._dropped)

    def _dropped(self, done) -> None:
        if error := done.exception():
            self._failures += 1
            self._last_error = f"{getattr(error, 'reason', type(error).__name__)}: {error}"
            logger.warning("the store was not dropped: %s", self._last_error)

    def weights_changed(self) -> None:
        """KV from before and after an update cannot be told apart, and a restart loads the old weights again: what runs
        is dropped, and nothing more is saved. What was committed before stays, and another server may write here."""
        if not self.why_off:
            self._turn_off("weights_changed", "weights are updated in place; snapshots end for this process")
            if self.home is not None:
                self.home.close(0)

    def pause(self) -> None:
        """KV memory is about to be released: nothing may read it until `resume`."""
        self._end_background("aborted")
        self._drop_job("KV memory was released")
        self._paused = True
        if self._requested > self._last_request:  # whoever waits for one is told
            self._command = PersistCommand(0, "manual", self._requested)
            self._failed(SnapshotFailed("KV memory was released"))

    def resume(self) -> None:
        self._paused = False

    # ------------------------------------------------------------------------------------------ status

    def why_no_snapshot(self) -> str | None:
        return self.why_off or ("memory_released" if self._paused else None)

    def status(self) -> dict:
        last, background = self._last, self._background
        tokens, seconds, rate = self.restored.tokens, self.restore_seconds, None
        if background is not None:
            tokens += background.tokens
            passed = time.monotonic() - self._background_began
            seconds += passed
            rate = background.tokens / passed if passed > 0 else None
        rates = self.keeper.rates if self.keeper else Rates()
        return {
            "enabled": self.why_off is None,
            "why_off": self.why_off,
            "rank": self.rank,
            "namespace": names.namespace(self.identity) if self.home else None,
            "restore": {
                "state": self.restore_state,
                "why_cold": self.why_cold,
                "tokens_restored": tokens,
                "tokens_total": self.restored.total_tokens,
                "nodes_refused": dict(self.restored.refused + (background.refused if background else Counter())),
                "seconds": round(seconds, 3),
                "tokens_per_second": round(rate) if rate else None,
                "seconds_left": round(background.left / rate, 1) if rate else None,
            },
            "snapshot": {
                "state": "running" if self._job is not None else "idle",
                "generation": self.home.generation if self.home else 0,
                "last_success": self._last_success,
                "last_tokens": last.tokens if last else None,
                "last_new_tokens": last.new_tokens if last else None,
                "last_new_bytes": last.new_bytes if last else None,
                "last_seconds": round(last.seconds, 3) if last else None,
                "requested": self._requested,
                "last_request": self._last_request,
                "last_request_error": self._last_request_error,
                "failures": self._failures,
                "last_error": self._last_error,
                "not_saved": dict(self.tree.not_saved) if self.tree else {},
            },
            "store": {"bytes": self._store_bytes, "budget_bytes": self._budget},
            "break_even": {
                "rule": "a path of n tokens is kept where seconds_per_path + n / load < n / prefill",
                "load_tokens_per_second": round(rates.load) or None,
                "seconds_per_path": rates.path_seconds or None,
                "prefill_tokens_per_second": round(self._prefill.rate or rates.prefill) or None,
                "least_tokens": self.keeper.least_tokens() if self.keeper else None,
            },
        }


def handle_signals(persistence: Persistence) -> None:
    """In a scheduler: only the launcher decides when to stop, so that the last snapshot is not cut off by a signal that
    a terminal or a service manager sends to the whole group. SIGUSR1 is the launcher's word that it begins to drain,
    SIGUSR2 its word to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, persistence.request_drain)
    signal.signal(signal.SIGUSR2, persistence.request_stop)
