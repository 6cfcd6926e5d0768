"""Storages: the memory of the transitions."""

from rlbuf_td.storages.packed import PackedStorage
from rlbuf_td.storages.schema import SchemaError

__all__ = ["PackedStorage", "SchemaError"]
