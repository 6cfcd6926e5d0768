"""Methods of :class:`~rlbuf_td.ReplayBuffer` that edit rows; after an error, no entry has changed."""

from __future__ import annotations

from operator import setitem
from typing import Any, TypeVar

from tensordict import NestedKey
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.buffers.writing import refuse_shut_down
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.writes import edit_all, is_key

Buffer = TypeVar("Buffer", bound=TensorDictReplayBuffer)


def set_at_(rb: Buffer, key: NestedKey, value: Any, index: Any) -> Buffer:
    """Set the entry ``key`` of the rows at ``index``; return the buffer.

    The rows are indexed like a tensor of shape ``[T]``, or ``[T, E]`` if ``ndim=2``.

    Raises:
        KeyError: the rows have no entry ``key``.
        RuntimeError: ``value`` has the wrong shape, or the buffer has been shut down; nothing has changed.
    """
    refuse_shut_down(rb)
    if not isinstance(rb.storage, PackedStorage):
        return TensorDictReplayBuffer.set_at_(rb, key, value, index)
    rb.storage.edit(lambda data: setitem(data[key], ..., value), index)
    return rb


def set_(rb: Buffer, key: NestedKey, value: Any) -> Buffer:
    """Set the entry ``key`` of all rows; return the buffer.

    Raises:
        KeyError: the rows have no entry ``key``.
        RuntimeError: the shape of ``value`` is not ``[T, ...]``, or ``[T, E, ...]`` if ``ndim=2``, or the buffer has
            been shut down; nothing has changed.
    """
    refuse_shut_down(rb)
    if not isinstance(rb.storage, PackedStorage):
        return TensorDictReplayBuffer.set_(rb, key, value)
    edit_all(rb.storage, lambda data: data.set_(key, value))
    return rb


def set_item(rb: Any, index: Any, value: Any) -> None:
    """Set the rows at ``index``. If ``index`` is a key, set the entry with this key in all rows."""
    refuse_shut_down(rb)
    if is_key(index) and isinstance(rb.storage, PackedStorage):
        edit_all(rb.storage, lambda data: data.transpose(rb.dim_extend, 0).set_(index, value))
    else:  # TorchRL's code would change a temporary TensorDict
        TensorDictReplayBuffer.__setitem__(rb, index, value)


def update_(rb: Buffer, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> Buffer:
    """Set several entries of all rows; return the buffer. See TorchRL's ``ReplayBuffer.update_``.

    Raises:
        RuntimeError: an entry has the wrong shape, or the buffer has been shut down; nothing has changed.
    """
    refuse_shut_down(rb)
    if not isinstance(rb.storage, PackedStorage):
        return TensorDictReplayBuffer.update_(rb, input_dict_or_td, clone, keys_to_update=keys_to_update)
    names: Any = {"clone": clone, "keys_to_update": keys_to_update}
    edit_all(rb.storage, lambda data: data.update_(input_dict_or_td, **names))
    return rb
