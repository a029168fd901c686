"""Holds the restore in the background back until a file exists. On with SGLANG_PERSIST_HOLD_READS=FILE.

An idle engine is restored in a second or two, long before its first request. To measure what a restore costs the
requests that are served meanwhile, its reads wait until there are some, as on a volume that does not answer yet.
"""

import functools
import os
import time
from pathlib import Path

SHARD = "sglang_persist.store.shard"
#: Seconds for which a read is held: a restore that gets nothing for a minute is given up.
LONGEST = 20


def change(module) -> None:
    """To SHARD, once it is loaded."""
    gate, load = Path(os.environ["SGLANG_PERSIST_HOLD_READS"]), module.Segment.load

    @functools.wraps(load)
    def held(self, record):
        end = time.monotonic() + LONGEST
        while not gate.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return load(self, record)

    module.Segment.load = held
