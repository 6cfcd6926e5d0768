"""What a buffer offers to save itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbuf_td.checkpoint.buffer import dump_buffer, load_buffer
from rlbuf_td.checkpoint.parts import load_or_restore, load_trajectories, trajectories_of
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.state import examine

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import TensorDictReplayBuffer as _Base
else:
    _Base = object  # a mixin: the buffer's own bases come behind it


NO_CHECKPOINTERS = (
    "dumps of this buffer have a format of their own, without TorchRL's checkpointers and hooks: TorchRL's "
    "TensorDictReplayBuffer over the same storage takes them"
)


class SavedBuffer(_Base):
    """Dumps, loads, and the state of a buffer."""

    def register_save_hook(self, hook: Any) -> None:
        """Refuse a hook: :meth:`dumps` would not call it.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_CHECKPOINTERS)

    def register_load_hook(self, hook: Any) -> None:
        """Refuse a hook: :meth:`loads` would not call it.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_CHECKPOINTERS)

    def dumps(self, path: str | Path, *, progress: bool | None = None, sync: bool = True) -> None:
        """Save the whole buffer in the folder ``path``: rows, priorities, counters, trajectories, generators.

        The dump is built beside the one that is there and takes its place at once: killed at any moment, the folder
        holds one of the two, whole. What it holds already is not written again. Buffers of other processes wait for
        each other.

        Args:
            path: made if it is not there. A manifest that is not ours is never overwritten.
            progress: show a bar (needs tqdm); ``None``: on a terminal, from 1 GiB on.
            sync: wait until everything is on the disk. ``False`` takes half the time: the death of this process still
                loses nothing, but that of the machine may cost both dumps; a load would notice.

        Raises:
            CheckpointError: a part cannot be saved without pickle, or the folder holds something else.
            OSError: the disk is full, say. The previous dump is untouched.
        """
        if not self._initialized:
            self._init()
        dump_buffer(self, path, progress, sync=sync)

    def loads(
        self,
        path: str | Path,
        *,
        rows_only: bool = False,
        default_generator: bool = False,
        progress: bool | None = None,
    ) -> None:
        """Continue from what :meth:`dumps` saved, with the same batches from there on. Nothing in it is executed.

        Every file is compared with its checksum first. The buffer must have parts of the same classes; its rows are
        replaced. In a buffer of another capacity the newest rows that fit are kept, in the order of their age, with
        their priorities; what is dropped is warned of.

        Args:
            path: where it was saved.
            rows_only: take the rows and nothing else: new rows for whatever sampler this buffer has.
            default_generator: let torch's default generator go on as well. An exact resumption needs it, unless the
                buffer has a generator of its own.
            progress: as for :meth:`dumps`.

        Raises:
            CheckpointError: a file is missing, damaged, cut short, foreign or of a newer version, or the dump does not
                fit this buffer: says which and how. The buffer is as it was.
        """
        if not self._initialized:
            self._init()
        load_buffer(self, path, rows_only=rows_only, default_generator=default_generator, progress=progress)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all that behaviour depends on, as tensors and plain values."""
        return super().state_dict() | {"_trajectories": trajectories_of(self._storage)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: the state is of other parts, or its rows do not fit this buffer, which stays as it was.
            RuntimeError: it was saved with another ``prefetch``; the buffer stays as it was.
        """
        if not self._initialized:
            self._init()
        self._validate_prefetch_state(state_dict.get("_prefetch_state"))  # as TorchRL does, before anything changes
        with self._futures_lock:
            self.synchronize()  # what is fetched ahead needs the other locks
            with self._replay_lock, self._write_lock:  # nobody sees the parts of two states
                self._try_parts(state_dict)
                super().load_state_dict(state_dict)
                load_trajectories(self._storage, state_dict.get("_trajectories", []))

    def _try_parts(self, state_dict: dict[str, Any]) -> None:
        """Load all parts but the storage, which is only asked; if one refuses, all have back what they had."""
        if isinstance(self._storage, PackedStorage):
            examine(self._storage, state_dict["_storage"])
        parts = {"_transforms": self._transform, "_writer": self._writer, "_sampler": self._sampler}
        load_or_restore(parts, state_dict)
