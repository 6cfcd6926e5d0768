"""Maps the rows in a folder that a storage of TorchRL has written, which may come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tensordict import TensorDict

from rlbuf_td.checkpoint.manifest import CheckpointError


def map_rows(folder: Path) -> TensorDict:
    """Map the files of a TensorDict; raise a CheckpointError, and change nothing, if this is not safe.

    Links could lead anywhere, pickles could run any code (and no row can hold what is pickled), and files that are too
    short would become longer.
    """
    refuse_links(folder)
    for meta in folder.rglob("meta.json"):
        for name, leaf in json.loads(meta.read_text()).items():
            if isinstance(leaf, dict) and "dtype" in leaf and not leaf.get("is_nested"):
                item = getattr(torch, leaf["dtype"].removeprefix("torch.")).itemsize
                refuse_short(meta.parent / f"{name}.memmap", torch.Size(leaf["shape"]).numel() * item)
    try:
        return TensorDict.load_memmap(folder, allow_pickle=False)
    except RuntimeError as error:
        if "pickle" not in str(error):
            raise
        raise CheckpointError(f"{folder} has entries that are no tensors, in a pickle, which is never loaded") from None


def refuse_links(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link, and a dump has none: copy the file that it leads to")


def refuse_short(file: Path, nbytes: int) -> None:
    found = file.stat().st_size if file.is_file() else -1
    if found < nbytes:
        fault = f"has {found:,} bytes, expected {nbytes:,}" if found >= 0 else "is missing"
        raise CheckpointError(f"{file} {fault}: the dump is incomplete; nothing has been changed")
