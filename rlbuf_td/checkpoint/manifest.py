"""The manifest of a dump, which lists the state and the files with their checksums.

``manifest.json`` is one JSON object. ``tensors`` lists the dtype, shape and files of each tensor. A file holds bytes of
the tensor and nothing else; its name is their checksum and their number. ``state`` holds the other saved values. The
last entry is the checksum of all the text before it.

A state consists of numbers, strings, lists, dicts with string keys, and tensors, and is never pickled. Tuples and
shapes become lists. ``{"$tensor": 3}`` stands for the tensor ``tensors[3]``. NaN and infinity are written as Python's
``json`` writes them.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

FORMAT = "rlbuf_td checkpoint"
MANIFEST = "manifest.json"
_TENSOR = "$tensor"
CHUNK_NAME = re.compile(r"([0-9a-f]{24})-([0-9]{1,18})\.bin")
_SUFFIX = ',\n"checksum": "{}"\n}}\n'
_SUFFIX_BYTES = len(_SUFFIX.format("0" * 24))


class CheckpointError(ValueError):
    """A dump cannot be written or read; the message says why.

    Example:
        >>> import tempfile
        >>> from rlbuf_td import ReplayBuffer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ReplayBuffer().loads(folder)
        Traceback (most recent call last):
        rlbuf_td.checkpoint.manifest.CheckpointError: ...
    """


class ForeignManifest(CheckpointError):
    """The file with the manifest's name is of another program."""


#: Errors of decoding or loading a malformed state. A manifest with a valid checksum may contain anything.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def checksum(data: np.ndarray | bytes) -> str:
    """Return the CRC-32 of bytes and the 64-bit sum of their 8-byte words, as 24 hexadecimal digits."""
    array = np.frombuffer(data, np.uint8)  # the sum finds changes that a CRC alone would miss (one in 4e9)
    whole = len(array) // 8 * 8
    words = int(array[:whole].view("<u8").sum(dtype=np.uint64)) + int.from_bytes(array[whole:].tobytes(), "little")
    return f"{zlib.crc32(array.data):08x}{words % (1 << 64):016x}"


class Chunk(NamedTuple):
    """A file with a range of a tensor's bytes, which is named after its content."""

    checksum: str
    nbytes: int

    @property
    def file(self) -> str:
        return f"{self.checksum}-{self.nbytes}.bin"

    @classmethod
    def named(cls, name: Any) -> Chunk:
        found = CHUNK_NAME.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            raise CheckpointError(f"the manifest names {name!r}, which is not a file of a dump")
        return cls(found[1], int(found[2]))


@dataclass(frozen=True)
class Stored:
    """A saved tensor; its bytes are those of its chunks, in order."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def files(self) -> list[str]:
        return [chunk.file for chunk in self.chunks]

    @classmethod
    def from_json(cls, entry: Any) -> Stored:
        """Parse the manifest's entry of a tensor; refuse contradictory sizes and invalid file names."""
        try:
            dtype, shape = getattr(torch, entry["dtype"], None), entry["shape"]
            chunks = tuple(map(Chunk.named, entry["chunks"]))
        except (LookupError, TypeError) as error:
            raise CheckpointError(f"the manifest's description of a tensor cannot be read: {error}") from error
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"the manifest names an unknown dtype {entry['dtype']!r}")
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
            raise CheckpointError("the manifest gives a size that is not a whole number")
        if math.prod(shape) * dtype.itemsize != sum(chunk.nbytes for chunk in chunks):
            raise CheckpointError(f"the manifest's chunks do not add up to a {entry['dtype']} tensor of shape {shape}")
        return cls(dtype, torch.Size(shape), chunks)


@dataclass(frozen=True)
class Manifest:
    """The parsed manifest of a dump; ``{"$tensor": j}`` in ``state`` refers to ``tensors[j]``."""

    state: dict[str, Any]
    tensors: tuple[Stored, ...]
    about: dict[str, Any]  # the kind of dump, when it was written, and by which versions

    def to_bytes(self) -> bytes:
        document: dict[str, Any] = {"format": FORMAT, "about": self.about}
        tensors = [
            {"dtype": str(each.dtype).removeprefix("torch."), "shape": [*each.shape], "chunks": each.files}
            for each in self.tensors
        ]
        document |= {"state": self.state, "tensors": tensors}
        text = json.dumps(document, indent=1).removesuffix("\n}").encode()
        return text + _SUFFIX.format(checksum(text)).encode()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest in the folder ``path``; refuse a file that is damaged or of another program."""
        file = path / MANIFEST
        try:
            data = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{path} holds no dump: {_instead(path)}") from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        text, suffix = data[:-_SUFFIX_BYTES], data[-_SUFFIX_BYTES:]
        if suffix != _SUFFIX.format(checksum(text)).encode():
            if FORMAT.encode() in data[:100]:
                raise CheckpointError(f"{file} is damaged or cut short: its checksum does not match")
            raise ForeignManifest(f"{file} is not the manifest of a dump of rlbuf_td, or its beginning is damaged")
        try:
            document = json.loads(data)
            state, about = document["state"], document["about"]
            if not isinstance(state, dict) or not isinstance(about, dict):
                raise TypeError("a field has the wrong type")
            return cls(state, tuple(map(Stored.from_json, document["tensors"])), about)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{file}: {error}") from error

    @classmethod
    def previous(cls, path: Path) -> Manifest | None:
        """Return the manifest, or None if it is missing or damaged; refuse a file of another program."""
        try:
            return cls.read(path)
        except ForeignManifest as error:
            remedy = "It is not overwritten: choose another folder, or remove it"
            raise CheckpointError(f"{error.args[0]}. {remedy}") from error
        except CheckpointError:
            return None


def _instead(path: Path) -> str:
    if not path.exists():
        return "there is no such folder"
    if not path.is_dir():
        return "it is a file; a dump is a folder"
    if (path / "buffer_metadata.json").exists():
        return "a TorchRL buffer wrote it: use ReplayBuffer.from_torchrl(path)"
    return f"it has no {MANIFEST}"


def encode(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """Convert ``value`` to JSON, and append its tensors to ``tensors``; ``where`` names the value in errors."""
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, np.ndarray | np.bool_):
        value = torch.as_tensor(value, device="cpu")
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(f"{where} is a nested, sparse or quantized tensor, which a dump cannot hold")
        tensors.append(value.detach())
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, list | tuple):
        return [encode(item, tensors, f"{where}[{j}]") for j, item in enumerate(value)]
    if isinstance(value, Mapping) and not isinstance(value, TensorDictBase):
        if wrong := [key for key in value if type(key) is not str or key == _TENSOR]:
            raise CheckpointError(f"{where} has the key {wrong[0]!r}: keys in a dump are strings other than {_TENSOR}")
        return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    content = "numbers, strings, lists, dicts and tensors, and no objects whose loading executes code"
    if "SegmentTree" in type(value).__name__:
        content += ". Use a ProportionalSampler, which also loads the state_dict() of a PrioritizedSampler"
    raise CheckpointError(f"{where} is a {type(value).__name__}, which a dump cannot hold: it holds {content}")


def decode(value: Any, tensor: Callable[[int], Any]) -> Any:
    """Undo :func:`encode`; ``tensor(j)`` returns tensor ``j``."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        return tensor(value[_TENSOR])
    return {key: decode(item, tensor) for key, item in value.items()}
