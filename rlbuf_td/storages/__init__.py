"""Storages: where transitions lie in memory."""

from rlbuf_td.storages.packed import PackedStorage
from rlbuf_td.storages.schema import SchemaError

__all__ = ["PackedStorage", "SchemaError"]
