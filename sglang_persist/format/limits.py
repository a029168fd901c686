"""Bounds that a reader applies to every declared size before it allocates. FORMAT.md section 6 lists them."""

MAX_INDEX_BYTES = 4 << 30  # index of a segment or body of a manifest, stored and decoded
MAX_RATIO = 4096  # decoded bytes for each stored byte of a compressed index or body
MAX_OBJECTS = 1 << 25  # msgpack objects in an index or body: each costs a reader far more memory than its bytes
MAX_DEPTH = 32  # of lists and maps in each other
MAX_RECORD_BYTES = 1 << 30  # decoded bytes of one record
MAX_RECORD_PAGES = 1 << 16
MAX_RECORDS = 1 << 24  # in one segment
MAX_NODES = 1 << 26  # in one manifest
MAX_POOLS = 16
MAX_BUFFERS = 1 << 12
MAX_SPACES = 1 << 22
MAX_SEGMENTS = 1 << 14
MAX_SHARDS = 1 << 14
MAX_WEIGHT_FILES = 1 << 16  # of one checkpoint
MAX_WEIGHT_DIGEST_BYTES = 64 << 20
