"""Writes and reads the folder of a dump: its lock, its manifest, and its data files,
which are never changed.

``manifest.json`` is one JSON object: ``state`` holds what is saved, and ``about`` the
kind of dump, when it was written, and by which versions. Its last entry is the checksum
of all the text before it. A state consists of numbers, strings, lists, dicts with
string keys, and tensors, and is never pickled. Tuples and shapes become lists. NaN and
infinity are written as Python's ``json`` writes them. A tensor is
``{"$tensor": {"dtype", "shape", "chunks"}}``; its bytes are those of its chunks, in
order. A chunk is a file, whose name is the checksum and the number of its bytes. All
checksums are BLAKE2b with 16 bytes.

A dump keeps the chunks of the previous dump that it needs again. Before it keeps one,
it compares the file's content with the data, once per process and file: a chunk that
has changed on the disk is written again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from rlbuf_td.storages.checks import MALFORMED, State, is_count

FORMAT = "rlbuf_td checkpoint"
DATA, MANIFEST = "data", "manifest.json"
_LOCK = ".lock"
_NEXT = f"{MANIFEST}.next"
_TENSOR = "$tensor"
# where a buffer's state holds the tensors of its rows
_ROWS = ("_storage", "rows"), ("_storage", "entries")
_FOLDER = re.compile(r"([a-z]+)-[0-9a-f]{16}")
_CHUNK = re.compile(r"[0-9a-f]{32}-([0-9]{1,18})\.bin")
_SUFFIX = ',\n"checksum": "{}"\n}}\n'
_SUFFIX_BYTES = len(_SUFFIX.format("0" * 32))
# how each manifest begins and ends: one of them tells a damaged manifest from another
# program's file
_BEGIN = f'{{\n "format": "{FORMAT}"'.encode()
_END = re.compile(rb',\n"checksum": "[0-9a-f]{32}"\n\}\n')
_WAIT_S = 600.0
CHUNK_BYTES = 8 << 20
# threads; their number does not depend on the cores, because they wait for the disk
_WRITERS = 8
_READERS = max(2, min(_WRITERS, os.cpu_count() or 2))
# The chunks whose content this process has compared: device, inode, size and
# time of change of the file, and its name.
_verified: set[tuple[int, int, int, int, str]] = set()
_MOST_VERIFIED = 1 << 17  # then all are forgotten, and are verified again


class CheckpointError(ValueError):
    """A dump cannot be written or read; the message says why.

    Example:
        >>> import tempfile
        >>> from rlbuf_td import ReplayBuffer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ReplayBuffer().loads(folder)
        Traceback (most recent call last):
        rlbuf_td.checkpoint.files.CheckpointError: ...
    """


def checksum(data: np.ndarray | bytes) -> str:
    """Return the 16-byte BLAKE2b hash of bytes, as 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()  # pyrefly: ignore [bad-argument-type]


def chunk_name(data: np.ndarray | bytes) -> str:
    return f"{checksum(data)}-{len(data)}.bin"


def _holds(file: Path, data: np.ndarray) -> bool:
    """Whether a chunk's file, which has the name of ``data``, also has its content."""
    key = _verified_key(file)
    if key in _verified:
        return True
    try:
        is_sound = np.array_equal(np.fromfile(file, np.uint8), data)
    except OSError:  # the disk cannot read it
        return False
    if is_sound:
        _note_verified(key)
    return is_sound


def _verified_key(file: Path) -> tuple[int, int, int, int, str]:
    """Return what identifies a file and its content: another write changes the time or
    the size."""
    status = file.lstat()
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        file.name,
    )


def _note_verified(key: tuple[int, int, int, int, str]) -> None:
    if len(_verified) >= _MOST_VERIFIED:
        _verified.clear()
    _verified.add(key)


def _chunk_size(name: object) -> int:
    match = _CHUNK.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise CheckpointError(
            f"the manifest names {name!r}, which is not a file of a dump"
        )
    return int(match[1])


# -- writing


class DumpWriter:
    """Writes a dump beside the previous dump; the caller must lock the folder."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.previous = self._previous()
        (path / DATA).mkdir(exist_ok=True)
        #: Chunks of the previous dump.
        self._kept = self.clean()
        #: Chunks of this dump, compared or written.
        self._put_names = set[str]()
        self._lock = Lock()

    def _previous(self) -> Dump | None:
        """Return the previous dump, or None if it is missing or damaged; refuse a
        manifest of another program."""
        file = self.path / MANIFEST
        if file.is_file() and not _is_ours(file.read_bytes()):
            raise CheckpointError(
                f"{file} is not the manifest of a dump of rlbuf_td. It is not "
                "overwritten: choose another folder, or remove it"
            )
        with suppress(CheckpointError):
            return Dump(self.path)
        return None

    def write(self, state: State) -> None:
        """Write a state, whose tensors may be on any device, and replace the manifest
        by one of this dump.

        A chunk that is in the previous dump is not written again if its file is sound.
        """
        entries: list[Entry] = []
        encoded = _encode(state, entries, "state")
        _wait_for_devices([entry.tensor for entry in entries])
        with ThreadPoolExecutor(_WRITERS) as pool:
            chunks = [pool.map(self._put, entry.parts()) for entry in entries]
            for entry, names in zip(entries, chunks, strict=True):
                entry.document["chunks"] = [*names]
        _sync(self.path / DATA)
        self._replace_manifest(
            {"format": FORMAT, "about": self.about, "state": encoded}
        )

    def _replace_manifest(self, document: dict[str, Any]) -> None:
        text = json.dumps(document, indent=1).removesuffix("\n}").encode()
        _write_file(self.path / _NEXT, text + _SUFFIX.format(checksum(text)).encode())
        (self.path / _NEXT).replace(self.path / MANIFEST)
        _sync(self.path)

    def _put(self, part: torch.Tensor) -> str:
        """Write a tensor to a file that is named by its checksum, unless it exists;
        return the name."""
        data = part.cpu().numpy()
        name = chunk_name(data)
        with self._lock:  # equal parts have one file
            is_first = name not in self._put_names
            self._put_names.add(name)
        file = self.path / DATA / name
        if not is_first or (name in self._kept and _holds(file, data)):
            return name
        # a new file: other dumps of shards may have links to the damaged one
        file.unlink(missing_ok=True)
        _write_file(file, data)
        return name

    def clean(self) -> set[str]:
        """Delete the files that the manifest does not list, such as those of an
        interrupted dump; return the others."""
        dump = self._previous()
        listed = set[str]()
        if dump is not None:
            listed = {match[0] for match in _CHUNK.finditer(dump.text)}
        kept = set[str]()
        for file in (self.path / DATA).iterdir():
            name = _CHUNK.fullmatch(file.name)
            if name is None:
                continue
            status = file.lstat()
            is_whole = stat.S_ISREG(status.st_mode) and status.st_size == int(name[1])
            if is_whole and file.name in listed:
                kept.add(file.name)
            else:
                file.unlink()
        (self.path / _NEXT).unlink(missing_ok=True)
        return kept


@contextmanager
def writing(path: str | Path, kind: str) -> Iterator[DumpWriter]:
    """Create and lock the folder ``path``, and yield a writer; at the end, delete dump
    files that are not in use."""
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder} cannot be created: it is a file; a dump is a folder"
        ) from error
    with _locked(folder):
        written = datetime.now(timezone.utc).isoformat(timespec="seconds")
        versions = {
            name: str(sys.modules[name].__version__)
            for name in ("rlbuf_td", "torch", "tensordict", "torchrl")
        }
        writer = DumpWriter(
            folder, {"kind": kind, "written": written, "versions": versions}
        )
        try:
            yield writer
        finally:
            writer.clean()


def save_state(path: str | Path, kind: str, state: State) -> None:
    with writing(path, kind) as writer:
        writer.write(state)


class Entry(NamedTuple):
    """A tensor of a dump, and what the manifest says of it."""

    tensor: torch.Tensor
    document: dict[str, Any]

    def parts(self) -> list[torch.Tensor]:
        """Return the bytes of the chunks."""
        parts = _flat_bytes(self.tensor).split(CHUNK_BYTES)
        return [part for part in parts if len(part)]


def _encode(value: Any, tensors: list[Entry], where: str) -> Any:
    """Convert ``value`` to JSON, and append its tensors, whose documents lack their
    chunks, to ``tensors``.

    ``where`` names the value in errors.
    """
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, np.ndarray | np.bool_):
        value = torch.as_tensor(value, device="cpu")
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{where} is a nested, sparse or quantized tensor, which a dump cannot hold"
            )
        document = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [*value.shape],
        }
        tensors.append(Entry(value.detach(), document))
        return {_TENSOR: document}
    if isinstance(value, list | tuple):
        return [_encode(item, tensors, f"{where}[{j}]") for j, item in enumerate(value)]
    if isinstance(value, Mapping) and not isinstance(value, TensorDictBase):
        wrong = [key for key in value if type(key) is not str or key == _TENSOR]
        if wrong:
            raise CheckpointError(
                f"{where} has the key {wrong[0]!r}: keys in a dump are strings other than {_TENSOR}"
            )
        return {
            key: _encode(item, tensors, f"{where}.{key}") for key, item in value.items()
        }
    content = "numbers, strings, lists, dicts and tensors, and no objects whose loading executes code"
    if "SegmentTree" in type(value).__name__:
        content += ". Use a ProportionalSampler, which also loads the state_dict() of a PrioritizedSampler"
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a dump cannot hold: it holds {content}"
    )


def _write_file(path: Path, data: np.ndarray | bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)  # pyrefly: ignore [bad-argument-type]
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some network file systems refuse folders
        os.fsync(descriptor)
    os.close(descriptor)


# -- reading


class Dump:
    """The manifest of a dump; the caller must lock the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / MANIFEST
        try:
            data = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{path} holds no dump: {_instead(path)}") from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        text = data[:-_SUFFIX_BYTES]
        suffix = data[-_SUFFIX_BYTES:]
        if suffix != _SUFFIX.format(checksum(text)).encode():
            if _is_ours(data):
                raise CheckpointError(
                    f"{file} is damaged or cut short: its checksum does not match"
                )
            raise CheckpointError(f"{file} is not the manifest of a dump of rlbuf_td")
        try:
            self.text = data.decode()
            document = json.loads(self.text)
            #: The state as it is in the manifest: no file of a tensor is read.
            self.encoded, self.about = document["state"], document["about"]
            if not isinstance(self.encoded, dict) or not isinstance(self.about, dict):
                raise TypeError("a field has the wrong type")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{file}: {error}") from error

    def state(self) -> State:
        """Return the state; the tensors of a buffer's rows are not read yet."""
        return {key: self._decode(value, (key,)) for key, value in self.encoded.items()}

    def _decode(self, value: object, path: tuple[str, ...]) -> Any:
        """Return a value of the manifest with its tensors read; those of rows are read
        later."""
        if isinstance(value, list):
            return [self._decode(item, path) for item in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {_TENSOR}:
            tensor = SavedTensor(self, value[_TENSOR])
            return tensor if path in _ROWS else tensor.read()
        return {key: self._decode(item, (*path, key)) for key, item in value.items()}


class SavedTensor:
    """A tensor of a dump, whose files are read when they are needed.

    The constructor refuses an entry of a manifest with contradictory sizes or invalid
    file names.
    """

    def __init__(self, dump: Dump, entry: Any) -> None:
        self._folder = dump.path / DATA
        try:
            dtype = getattr(torch, entry["dtype"], None)
            shape = entry["shape"]
            self._chunks = [*entry["chunks"]]  # the names of the files
            self._sizes = [*map(_chunk_size, self._chunks)]
        except (LookupError, TypeError) as error:
            raise CheckpointError(
                f"the manifest's description of a tensor cannot be read: {error}"
            ) from error
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"the manifest names an unknown dtype {entry['dtype']!r}"
            )
        if not (isinstance(shape, list) and all(map(is_count, shape))):
            raise CheckpointError(
                "the manifest gives a size that is not a whole number"
            )
        self.dtype = dtype
        self.shape = torch.Size(shape)
        if math.prod(shape) * dtype.itemsize != sum(self._sizes):
            raise CheckpointError(
                f"the manifest's chunks do not add up to a {entry['dtype']} tensor of shape {shape}"
            )

    def verify(self) -> None:
        """Raise a CheckpointError if a file is missing or damaged."""
        self._read([None] * len(self._chunks))

    def read(self) -> torch.Tensor:
        for name in self._chunks:  # before memory of their lengths is allocated
            self._require(name)
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(tensor)
        return tensor

    def read_into(self, target: torch.Tensor) -> None:
        _wait_for_devices([target])
        parts = _flat_bytes(target).split(self._sizes) if self._sizes else []
        self._read(parts)

    def _read(self, targets: Sequence[torch.Tensor | None]) -> None:
        """Read the chunks into ``targets``; where a target is None, only check the
        chunk."""
        with ThreadPoolExecutor(_READERS) as pool:
            # which raises its errors
            for _ in pool.map(self._read_chunk, self._chunks, targets):
                pass

    def _read_chunk(self, name: str, target: torch.Tensor | None) -> None:
        """Read a file to ``target`` and compare its checksum; None: only compare."""
        file = self._require(name)
        nbytes = _chunk_size(name)
        # NumPy uses huge pages, which makes a comparison three times as fast as in
        # torch's memory.
        data = np.empty(nbytes, np.uint8)
        if target is not None and target.is_cpu:
            data = target.numpy()
        with open(file, "rb") as opened:
            if opened.readinto(data) != nbytes:  # pyrefly: ignore [bad-argument-type]
                raise CheckpointError(f"{file} became shorter while it was read")
            key = _verified_key(file)
        if chunk_name(data) != name:
            raise CheckpointError(
                f"{file} is damaged: its checksum does not match the manifest's"
            )
        _note_verified(key)
        if target is not None and not target.is_cpu:
            target.copy_(torch.from_numpy(data))

    def _require(self, name: str) -> Path:
        """Return the file of a chunk; raise a CheckpointError if the file is missing or
        has the wrong size."""
        file = self._folder / name
        nbytes = _chunk_size(name)
        try:
            status = file.lstat()
        except OSError as error:
            fault = f"cannot be read: {error}"
            if isinstance(error, FileNotFoundError):
                fault = "is missing"
            raise CheckpointError(f"{file} {fault}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file} is not a plain file")
        if status.st_size != nbytes:
            kind = "cut short" if status.st_size < nbytes else "too long"
            raise CheckpointError(
                f"{file} is {kind}: {status.st_size} bytes, the manifest says {nbytes}"
            )
        return file


@contextmanager
def reading(path: str | Path, kind: str) -> Iterator[Dump]:
    """Lock the folder ``path``, and yield its dump; refuse a dump that is not of this
    ``kind``.

    Errors from a malformed state become a CheckpointError that names the dump.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        Dump(folder)  # raises
    with _locked(folder, for_reading=True):
        dump = Dump(folder)
        dumped = dump.about.get("kind")
        if dumped != kind:
            raise CheckpointError(
                f"{folder} holds a dump of a {dumped}, expected one of a {kind}"
            )
        try:
            yield dump
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"cannot load {folder}: {error}") from error
        except MALFORMED as error:
            raise CheckpointError(
                f"cannot load {folder}: {type(error).__name__}: {error}"
            ) from error


def load_state(path: str | Path, kind: str) -> State:
    with reading(path, kind) as dump:
        return dump.state()


def _is_ours(data: bytes) -> bool:
    """Whether bytes can be those of a manifest that was cut short or damaged."""
    begin = data[: len(_BEGIN)]
    is_cut = begin == _BEGIN[: len(begin)]
    return is_cut or _END.fullmatch(data[-_SUFFIX_BYTES:]) is not None


def _instead(path: Path) -> str:
    """Return what is wrong with a folder that holds no dump, as a part of a
    sentence."""
    if not path.exists():
        return "there is no such folder"
    if not path.is_dir():
        return "it is a file; a dump is a folder"
    if (path / "buffer_metadata.json").exists():
        return "a TorchRL buffer wrote it: use ReplayBuffer.from_torchrl(path)"
    return f"it has no {MANIFEST}"


# -- both


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as 1-D uint8, without a copy if the tensor is
    contiguous."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # one number is contiguous with any stride
    return tensor.as_strided([tensor.numel()], [1]).view(torch.uint8)


def _wait_for_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Wait until the devices have written the tensors, because dumps and loads copy
    them in other threads."""
    for tensor in tensors:
        # a read waits for the work that this thread has queued before
        tensor.reshape(-1)[:1].cpu()


@contextmanager
def _locked(path: Path, *, for_reading: bool = False) -> Iterator[None]:
    """Lock a folder against other dumps and loads; the system releases the lock if this
    process dies."""
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(path / _LOCK, timeout=_WAIT_S))
        except Timeout as error:
            raise CheckpointError(
                f"another dump into {path} has been running for {_WAIT_S:.0f} seconds"
            ) from error
        except OSError:
            # a reader may use a read-only folder, which has no dumps in progress
            if not for_reading:
                raise
        yield


# -- dumps of several buffers: each has a folder of its own, and is valid once a
# manifest elsewhere names the folder


def is_folder(name: object) -> bool:
    """Whether a name in a manifest can be that of a dump's folder."""
    return isinstance(name, str) and _FOLDER.fullmatch(name) is not None


def new_folder(path: Path, kind: str, last: object, members: Collection[str]) -> Path:
    """Return the folder of a new dump, with links to the ``members`` of the ``last``
    one, if it is there.

    Members that have not changed are then not written again. The folder's name begins
    with ``kind``.
    """
    folder = path / f"{kind}-{secrets.token_hex(8)}"
    folder.mkdir(parents=True)
    if not is_folder(last):
        return folder
    for name in members:
        with suppress(OSError):  # a new member, or a file system without hard links
            before = path / str(last) / name
            ignored = shutil.ignore_patterns(".lock")
            shutil.copytree(
                before, folder / name, copy_function=os.link, ignore=ignored
            )
    return folder


def delete_others(folder: Path) -> None:
    """Delete all dumps of the same kind beside a valid one."""
    kind = folder.name.partition("-")[0]
    for other in folder.parent.iterdir():
        match = _FOLDER.fullmatch(other.name)
        if match and match[1] == kind and other != folder:
            shutil.rmtree(other, ignore_errors=True)
