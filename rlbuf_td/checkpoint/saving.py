"""State into a folder and back, whatever it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.folder import Report, locked
from rlbuf_td.checkpoint.reader import DumpReader
from rlbuf_td.checkpoint.state import decode, encode
from rlbuf_td.checkpoint.writer import DumpWriter, Source

#: From this many bytes on, a progress bar is shown.
LARGE = 1 << 30


def save_state(path: str | Path, kind: str, state: dict[str, Any]) -> None:
    """Put ``state`` into the folder ``path``, in the place of what was saved there before.

    Args:
        path: made if it is not there.
        kind: what the state is of.
        state: numbers, strings, lists, dicts, tensors.

    Raises:
        CheckpointError: the state holds something else, or the folder something that is not overwritten.
    """
    with writing(path, kind) as writer:
        write_state(writer, state, [], [], None)


def load_state(path: str | Path, kind: str) -> dict[str, Any]:
    """Return what :func:`save_state` saved.

    Raises:
        CheckpointError: a file is missing, damaged or foreign, or the state is of another kind.
    """
    with reading(path, kind) as reader:
        return decode(reader.manifest.state, reader.read)


@contextmanager
def writing(path: str | Path, kind: str, *, sync: bool = True) -> Iterator[DumpWriter]:
    """Make the folder ``path``, keep others from it, and give a writer; in the end, clean up behind it."""
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} cannot be made: there is a file; a dump is a folder") from error
    with locked(folder):
        writer = DumpWriter(folder, _about(kind), sync=sync)
        try:
            yield writer
        finally:
            writer.clean()


def write_state(
    writer: DumpWriter,
    state: dict[str, Any],
    tensors: list[torch.Tensor],
    sources: Sequence[Source],
    progress: bool | None,
) -> None:
    """Write and commit a dump of ``state``, in which ``tensors`` are named already and described by ``sources``."""
    encoded = encode(state, tensors, "state")
    sources = [*sources, *[Source()] * (len(tensors) - len(sources))]
    with bar("dump", sum(tensor.nbytes for tensor in tensors), progress) as report:
        stored = writer.store(tensors, sources, report)
    writer.commit(encoded, stored)


@contextmanager
def reading(path: str | Path, kind: str) -> Iterator[DumpReader]:
    """Keep dumps away from the folder ``path``, and give a reader of what it holds.

    Raises:
        CheckpointError: there is no dump of this kind, or its manifest is damaged.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        DumpReader(folder)  # says what is wrong
    with locked(folder, for_reading=True):
        reader = DumpReader(folder)
        found = reader.manifest.about.get("kind")
        if found != kind:
            raise CheckpointError(f"{folder} holds a dump of a {found}, expected one of a {kind}")
        yield reader


@contextmanager
def bar(what: str, nbytes: int, progress: bool | None) -> Iterator[Report]:
    """Give a function that is told of bytes that are done, and shows them.

    Args:
        what: the words beside the bar.
        nbytes: all that there are.
        progress: ``None`` shows a bar on a terminal if there is much to do.

    Raises:
        ImportError: ``progress=True`` and tqdm is not installed.
    """
    if progress or (progress is None and nbytes >= LARGE):
        try:
            from tqdm import tqdm
        except ImportError:
            if progress:
                raise ImportError("progress=True needs tqdm: pip install tqdm") from None
        else:
            # disable=None: off where the output is not a terminal
            with tqdm(
                total=nbytes, desc=what, unit="B", unit_scale=True, disable=None if progress is None else False
            ) as shown:
                yield shown.update
            return
    yield lambda done: None


def _about(kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in ("rlbuf_td", "torch", "tensordict", "torchrl")},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
