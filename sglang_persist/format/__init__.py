"""Bytes of segments and manifests: no files, no threads, no engine."""
