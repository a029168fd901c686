"""Every way this package fails, and what each means to an operator.

    PersistError
      SettingError        a flag, variable or file cannot be read            exit 2
      StoreError
        StoreBusy         another process writes this shard                  exit 3
        StoreFull         no space, quota or budget left                     exit 4
        StoreUnavailable  the file system refuses (missing, denied, I/O)     exit 5
      FormatError                                                            exit 6
        NotOurs           the magic bytes are missing
        NewerFormat       a later format, or a feature that is not known here
        Truncated         the bytes end early
        ChecksumMismatch  bytes changed after they were written
        Malformed         fields contradict each other
        LimitExceeded     a declared size is above what a reader accepts
        Unusable          sound as it looks, but processes died while they restored it
      EngineError
        EngineUnreachable no server answers, or it answers nonsense          exit 8
        EngineOff         the server runs without persistence                exit 9
        SnapshotFailed    the server could not make the snapshot             exit 10
        Unsupported       a pool, tree or topology that is not known here    exit 11
        RanksDisagree     ranks of one tree could not restore alike          exit 12

In the server each of these ends as a cold start (or a skipped snapshot), a counter and one line of log;
only the command line turns them into exit codes. None inherits from a built-in exception other than
Exception, so that no handler written for something else swallows them.
"""

from __future__ import annotations

import errno
import os


class PersistError(Exception):
    exit_code = 1
    #: Short name from the documented list, used in `status` and in findings.
    reason = "error"


class SettingError(PersistError):
    exit_code = 2
    reason = "bad_setting"


class StoreError(PersistError):
    exit_code = 5
    reason = "store_unavailable"


class StoreBusy(StoreError):
    exit_code = 3
    reason = "store_busy"


class StoreFull(StoreError):
    exit_code = 4
    reason = "store_full"


class StoreUnavailable(StoreError):
    exit_code = 5
    reason = "store_unavailable"


class FormatError(PersistError):
    """Bytes that cannot be trusted. `offset` is where in the file, when that is known."""

    exit_code = 6
    reason = "damaged"
    kind = "damaged"

    def __init__(self, detail: str, path: os.PathLike | str | None = None, offset: int | None = None):
        super().__init__(detail)
        self.detail, self.path, self.offset = detail, path, offset

    def at(self, path: os.PathLike | str, offset: int | None = None) -> FormatError:
        """The same error, with its place filled in where it was not known before."""
        self.path = self.path or path
        self.offset = offset if self.offset is None else self.offset
        return self

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        where = f" (at byte {self.offset})" if self.offset is not None else ""
        return f"{place}{self.detail}{where}"


class NotOurs(FormatError):
    kind = "not_ours"


class NewerFormat(FormatError):
    kind = "newer_format"
    reason = "newer_format"


class Truncated(FormatError):
    kind = "truncated"


class ChecksumMismatch(FormatError):
    kind = "checksum"


class Malformed(FormatError):
    kind = "malformed"


class LimitExceeded(FormatError):
    kind = "limit"


class Unusable(FormatError):
    kind = "unusable"
    reason = "unusable"


class EngineError(PersistError):
    exit_code = 8


class EngineUnreachable(EngineError):
    exit_code = 8
    reason = "unreachable"


class EngineOff(EngineError):
    exit_code = 9
    reason = "off"


class SnapshotFailed(EngineError):
    exit_code = 10
    reason = "snapshot_failed"


class RanksDisagree(EngineError):
    exit_code = 12
    reason = "ranks_disagree"


class Unsupported(EngineError):
    exit_code = 11
    reason = "unsupported"

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def from_os_error(error: OSError, path: os.PathLike | str) -> StoreError:
    """An OSError as one of ours, with the path and the system's own reason in the line."""
    text = f"{path}: {error.strerror or error}"
    return StoreFull(text) if error.errno in _FULL else StoreUnavailable(text)
