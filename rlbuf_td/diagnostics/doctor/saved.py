"""Open a saved buffer without knowing how it was made."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import Storage, TensorStorage

_ROWS = "storage_metadata.json"  # of TorchRL's checkpointers
_MANIFEST = "manifest.json"  # of this package's


def open_saved(path: str | Path) -> Storage:
    """Return the rows that a buffer's or a storage's ``dumps(path)`` has written.

    Those that TorchRL's checkpointers wrote stay on the disk.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no saved buffer.
        ValueError: what it holds cannot be read.
    """
    path = Path(path)
    if (path / _MANIFEST).is_file():
        return _of_checkpoint(path)
    folder = next((each for each in (path, path / "storage") if (each / _ROWS).is_file()), None)
    if folder is None:
        what = "holds no saved buffer" if path.is_dir() else "is no folder"
        raise FileNotFoundError(f"{path} {what}: give the folder that rb.dumps(path) has written")
    try:
        about = json.loads((folder / _ROWS).read_text())
        if about["is_pytree"]:
            raise ValueError("it holds no TensorDict")
        rows = TensorDict.load_memmap(folder)
        length, cursor = int(about["len"]), _cursor(folder.parent / "writer" / "metadata.json")
    except (LookupError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot read the rows in {folder}: {error}") from error
    return _as_storage(rows, length, cursor)


def _of_checkpoint(path: Path) -> Storage:
    found = importlib.import_module("rlbuf_td.checkpoint.opening").open_checkpoint(path)
    if found.storage is not None:
        return found.storage
    if found.rows is None:
        raise ValueError(f"{path} holds no rows")
    return _as_storage(found.rows, found.rows.numel(), found.writer.get("_cursor"))


def _as_storage(rows: TensorDictBase, length: int, cursor: int | None) -> Storage:
    """Return a storage of rows ``[T, *lanes]``, ``length`` of which are written; a ring would go on at ``cursor``."""
    storage = TensorStorage(rows, ndim=max(1, rows.ndim))
    storage._len = length
    if cursor is not None:
        storage._set_last_cursor((cursor - 1) % len(rows))
    return storage


def _cursor(file: Path) -> int | None:
    """Return where the writer would have gone on."""
    return int(json.loads(file.read_text())["cursor"]) if file.is_file() else None
