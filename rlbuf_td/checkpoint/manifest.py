"""The manifest: which bytes in which files make up a dump. Its replacement is what makes a dump valid.

``manifest.json`` is one JSON object. ``tensors`` lists each tensor's dtype, shape and chunks, ``[file, bytes, xxh64]``;
``state`` is everything else, see :mod:`rlbuf_td.checkpoint.state`; the last line is the checksum of all before it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.state import dtype_of
from rlbuf_td.kernels.rows.checksum import xxh64
from rlbuf_td.storages.allocate import ROWS_FILE

FORMAT, VERSION = "rlbuf_td checkpoint", 2
MANIFEST = "manifest.json"
CHUNK_NAME = re.compile(r"[0-9]{6,}-[0-9a-f]{16}-[0-9]+\.bin")
JOURNAL_NAME = re.compile(r"[0-9]{6,}-[0-9a-f]{16}-[0-9]+\.undo")
_HEAD = re.compile(rb'\{\s*"format": "' + FORMAT.encode() + rb'",\s*"version": ([0-9]{1,9}),')
_SUFFIX = ',\n"xxh64": "{}"\n}}\n'
_SUFFIX_BYTES = len(_SUFFIX.format("0" * 16))
_LARGEST = 1 << 30


class Chunk(NamedTuple):
    """A part of a tensor's bytes: the name of the file that it fills, its length and its checksum.

    In a dump into the folder of a memory-mapped storage, the file is the storage's own, and the chunk a part of it.
    """

    file: str
    nbytes: int
    xxh64: str


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in files.

    ``journal`` is the file that holds what has been overwritten of the storage's own file since, ``offset`` where the
    tensor begins in the storage's file.
    """

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]
    journal: str | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` reads back."""
        name = str(self.dtype).removeprefix("torch.")
        entry: dict[str, Any] = {
            "dtype": name,
            "shape": list(self.shape),
            "chunks": [list(chunk) for chunk in self.chunks],
        }
        if self.offset:
            entry["offset"] = self.offset
        return entry if self.journal is None else entry | {"journal": self.journal}

    @classmethod
    def from_json(cls, entry: Any) -> Stored:
        """Return the tensor that an entry of the manifest describes.

        Raises:
            CheckpointError: the entry contradicts itself, or names a file that is not one of a dump.
        """
        try:
            dtype, shape = dtype_of(entry["dtype"]), entry["shape"]
            chunks, journal = tuple(Chunk(*chunk) for chunk in entry["chunks"]), entry.get("journal")
            offset = entry.get("offset", 0)
        except (LookupError, TypeError) as error:
            raise CheckpointError(f"the manifest describes a tensor in a way that cannot be read: {error}") from error
        names = [(chunk.file, CHUNK_NAME) for chunk in chunks if chunk.file != ROWS_FILE]
        for name, pattern in [*names, *([] if journal is None else [(journal, JOURNAL_NAME)])]:
            if not isinstance(name, str) or not pattern.fullmatch(name):
                raise CheckpointError(f"the manifest names {name!r}, which is not a file of a dump")
        sizes = [offset, *shape, *(chunk.nbytes for chunk in chunks)] if isinstance(shape, list) else [None]
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
            raise CheckpointError("the manifest gives a size that is not a whole number")
        if prod(shape) * dtype.itemsize != sum(chunk.nbytes for chunk in chunks):
            raise CheckpointError(f"the manifest's chunks do not add up to a {entry['dtype']} tensor of shape {shape}")
        return cls(dtype, torch.Size(shape), chunks, journal, offset)


@dataclass(frozen=True)
class Manifest:
    """What a dump holds.

    Attributes:
        generation: counts the dumps into a folder.
        state: everything but the tensors' bytes, as JSON.
        tensors: what ``{"$tensor": j}`` in ``state`` refers to.
        about: when and by what the dump was written.
    """

    generation: int
    state: dict[str, Any]
    tensors: tuple[Stored, ...]
    about: dict[str, Any]

    @property
    def files(self) -> set[str]:
        """The names of all files."""
        chunks = {chunk.file for stored in self.tensors for chunk in stored.chunks}
        return chunks | {stored.journal for stored in self.tensors if stored.journal is not None}

    def to_bytes(self) -> bytes:
        """Return the text of the manifest, checksum included."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "about": self.about,
            "generation": self.generation,
            "state": self.state,
            "tensors": [stored.to_json() for stored in self.tensors],
        }
        text = json.dumps(document, indent=1, allow_nan=False).removesuffix("\n}").encode()
        return text + _SUFFIX.format(xxh64(text)).encode()


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest in the folder ``path``.

    Raises:
        CheckpointError: there is none, or it is damaged, foreign, or of a newer version.
    """
    file = path / MANIFEST
    try:
        if file.stat().st_size > _LARGEST:
            raise CheckpointError(f"{file} is too large for a manifest")
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} holds no dump: {_instead(path)}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    head = _HEAD.match(data)
    if head and int(head[1]) > VERSION:
        raise CheckpointError(
            f"{file} has version {int(head[1])}, this rlbuf_td reads up to version {VERSION}: install a newer one"
        )
    text, suffix = data[:-_SUFFIX_BYTES], data[-_SUFFIX_BYTES:]
    if suffix != _SUFFIX.format(xxh64(text)).encode():
        if FORMAT.encode() in data[:100]:
            raise CheckpointError(f"{file} is damaged or cut short: its checksum does not match")
        raise CheckpointError(f"{file} is not the manifest of a dump of rlbuf_td, or its beginning is damaged")
    try:
        document = json.loads(data)
        generation, state, about = document["generation"], document["state"], document["about"]
        if type(generation) is not int or not isinstance(state, dict) or not isinstance(about, dict):
            raise CheckpointError("a field has another kind than it must")
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise CheckpointError(f"format {document['format']!r}, version {document['version']!r} is unknown")
        return Manifest(generation, state, tuple(map(Stored.from_json, document["tensors"])), about)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def _instead(path: Path) -> str:
    """Say what is found where a dump was expected."""
    if not path.exists():
        return "there is no such folder"
    if not path.is_dir():
        return "it is a file; a dump is a folder"
    if (path / "buffer_metadata.json").exists():
        return "it was written by TorchRL's buffer; load it with a buffer of TorchRL's"
    return f"it has no {MANIFEST}"
