"""Holds the restore in the background back until a file exists. On with SGLANG_PERSIST_HOLD_READS=FILE.

An idle engine is restored in a second or two, long before its first request. To measure what a restore costs the
requests that are served meanwhile, its reads wait until there are some, as on a volume that does not answer yet.
"""

import functools
import os
import threading
import time
from pathlib import Path

FILES = "sglang_persist.fs"
#: Seconds for which a read is held: a restore that gets nothing for a minute is given up.
LONGEST = 20


def change(module) -> None:
    """To FILES, once it is loaded."""
    gate, read = Path(os.environ["SGLANG_PERSIST_HOLD_READS"]), module.ReadFile.read

    @functools.wraps(read)
    def held(self, offset, size):
        # These threads read records; what tells which records there are is read on another.
        if threading.current_thread().name.startswith("persist-read"):
            end = time.monotonic() + LONGEST
            while not gate.exists() and time.monotonic() < end:
                time.sleep(0.02)
        return read(self, offset, size)

    module.ReadFile.read = held
