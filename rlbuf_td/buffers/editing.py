"""Setting entries of rows that are there: TorchRL does it through views of the rows, and misses what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import NestedKey

from rlbuf_td.storages import PackedStorage

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import TensorDictReplayBuffer as _Base
    from typing_extensions import Self
else:
    _Base = object  # a mixin: the buffer's own bases come behind it


class EditedBuffer(_Base):
    """Setting entries in place. The rows stay the transitions that they were: their priorities remain."""

    def set_at_(self, key: NestedKey, value: Any, index: Any) -> Self:
        """Set one entry of the rows at ``index``, which is as for a tensor ``[T, *lanes]``, and return the buffer.

        Raises:
            KeyError: no such key.
            RuntimeError: ``value`` has another shape than the entry there.
        """
        if not self._is_packed():
            return super().set_at_(key, value, index)

        def change(data: Any) -> None:
            data[key][...] = value

        with self._replay_lock, self._write_lock:
            self._storage.edit(change, index)
        return self

    def set_(self, key: NestedKey, value: Any) -> Self:
        """Set one entry of all rows, and return the buffer.

        Raises:
            KeyError: no such key.
            RuntimeError: ``value`` is not ``[T, *lanes, ...]``.
        """
        if not self._is_packed():
            return super().set_(key, value)
        with self._replay_lock, self._write_lock:
            self._storage.edit(lambda data: data.set_(key, value))
        return self

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> Self:
        """Set several entries of all rows, and return the buffer; see TorchRL's ``ReplayBuffer.update_``."""
        if not self._is_packed():
            return super().update_(input_dict_or_td, clone, keys_to_update=keys_to_update)
        with self._replay_lock, self._write_lock:
            self._storage.edit(lambda data: data.update_(input_dict_or_td, clone=clone, keys_to_update=keys_to_update))
        return self

    def _is_packed(self) -> bool:
        if not self._initialized:
            self._init()
        return isinstance(self._storage, PackedStorage)
