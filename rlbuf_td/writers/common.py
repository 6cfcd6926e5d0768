"""The base classes of the writers, and helper functions for all writers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import (
    RoundRobinWriter,
    Storage,
    Writer,
)

from rlbuf_td.storages.checks import State, require_packed, saved_number, state_of
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.writes import Write

if TYPE_CHECKING:
    from rlbuf_td.storages import PackedStorage

MOST = (1 << 63) - 1
#: What to use in place of TorchRL's counts of the writes to each position.
NO_GENERATIONS = (
    "track_generations=True is not supported: leave it out. In place of update_if_present, "
    "rb.write_back(batch, keys) skips rows that have been replaced since they were sampled"
)
_STATE_FILE = "writer.pt"


class PackedWriter(Writer):
    """Abstract base of this package's writers."""

    _storage: PackedStorage

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to; ValueError if the writer already has another
        storage."""
        if self._storage not in (None, storage):
            raise ValueError(
                "this writer writes to the storage of another buffer: use one writer per buffer"
            )
        require_packed(
            storage, f"a {type(self).__name__}", "use one, or a writer of TorchRL's"
        )
        super().register_storage(storage)

    def dumps(self, path: str | Path) -> None:
        """Save the state in the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path, _STATE_FILE))

    def loads(self, path: str | Path) -> None:
        """Restore a dump; ValueError, and no change, if a number is out of range."""
        self.load_state_dict(
            torch.load(Path(path, _STATE_FILE), map_location="cpu", weights_only=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rng": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


class TimeWriter(PackedWriter, RoundRobinWriter):
    """Abstract base of the writers that write time steps in order; position 0 follows
    the last position.

    If a subclass has the :meth:`add`, :meth:`extend` and :meth:`append` of this class,
    a :class:`ReplayBuffer` calls :meth:`write` itself, as they do: see
    ``Parts.writes_directly``.
    """

    # whether a write to the first slot removes the rows so far
    begins_anew = False
    # entries that the writer adds to each row, filled with NaN, if the data lacks them
    added_keys: tuple[tuple[str, ...], ...] = ()
    # whether single lanes of a PackedStorage can be written, see :meth:`append`
    appends = True

    def __init__(self) -> None:
        super().__init__(compilable=False)

    @property
    def _cursor(self) -> int:
        """The time step to write next, which the rows tell: other buffers may have
        written them."""
        return 0 if self._storage is None else self._storage.ring.cursor

    @_cursor.setter
    def _cursor(self, cursor: int) -> None:
        pass

    @property
    def _write_count(self) -> int:
        """The number of rows written to the storage, which is kept with the rows."""
        return 0 if self._storage is None else self._storage.ring.write_count

    @_write_count.setter
    def _write_count(self, count: int) -> None:
        if self._storage is not None:
            self._storage.ring.write_count = count

    def add(self, data: TensorDictBase) -> int | torch.Tensor:  # pyrefly: ignore [bad-override]
        """Write one time step, ``[]`` (``[*lanes]`` if ``ndim > 1``); return its index.
        Errors: see :meth:`extend`."""
        return self.write(Write(data, is_single=True))

    def extend(self, data: object) -> torch.Tensor:
        """Write ``[n, *lanes]`` transitions; return their index, ``[n]`` or, if
        ``ndim > 1``, ``[n * lanes, ndim]``.

        Transitions are written in order. If ``n`` exceeds the capacity, only the last
        transitions are stored.

        Raises:
            ValueError: ``data`` is empty.
            SchemaError: the data does not match the stored rows; nothing has changed.
        """
        return self.write(Write(data))

    def write(self, write: Write) -> Any:
        """Write rows after the newest ones; see :meth:`PackedStorage.advance` for
        errors and the index that is returned."""
        return self._storage.advance(write)

    def append(self, lanes: object, data: TensorDictBase) -> torch.Tensor:
        """Write rows, ``[n]``, each after the newest row of its lane; return their
        index, ``[n, 2]``.

        The arguments and errors are those of :meth:`PackedStorage.advance`.
        """
        return self.write(Write(data, lanes=lanes))

    def write_at(self, index: int | torch.Tensor, data: object) -> int | torch.Tensor:
        """Write to the time steps ``index`` without moving the cursor; return the index
        of the written rows."""
        count = self._write_count
        try:
            written = super().write_at(index, without_index(data))
        except Exception:
            self._write_count = count
            raise
        steps = self._write_count - count
        self._write_count = count + steps * self._storage.ring.lanes
        return written

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a result of ``state_dict()``; ValueError, and no change, if a number
        is out of range."""
        with state_of(self):
            self._refuse_state(state_dict)
            super().load_state_dict(state_dict)

    def _refuse_state(self, state: State) -> None:
        """Raise an error if this writer's state is wrong."""
        saved_number("cursor", state["_cursor"], 0, MOST)
        saved_number("write count", state.get("_write_count", 0), 0, MOST)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cursor={self._cursor}, write_count={self._write_count})"


def without_index(data: object) -> Any:
    return (
        data.exclude("index")
        if isinstance(data, TensorDictBase) and "index" in data.keys()
        else data
    )
