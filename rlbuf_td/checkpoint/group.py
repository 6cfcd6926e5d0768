"""Dumps of several buffers: each dump has a folder of its own, and is valid once a manifest elsewhere names the folder.

An interrupted dump leaves the previous one as it was, and the buffers of two dumps are never mixed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_FOLDER = re.compile(r"([a-z]+)-[0-9a-f]{16}")


def is_folder(name: object) -> bool:
    """Whether a name in a manifest can be that of a dump's folder."""
    return isinstance(name, str) and _FOLDER.fullmatch(name) is not None


def new_folder(path: Path, kind: str, last: object, members: Collection[str]) -> Path:
    """Return the folder of a new dump, with links to the ``members`` of the ``last`` one, if it is there.

    Members that have not changed are then not written again. The folder's name begins with ``kind``.
    """
    folder = path / f"{kind}-{secrets.token_hex(8)}"
    folder.mkdir(parents=True)
    for name in members if is_folder(last) else ():
        with suppress(OSError):  # a new member, or a file system without hard links
            before, ignored = path / str(last) / name, shutil.ignore_patterns(".lock")
            shutil.copytree(before, folder / name, copy_function=os.link, ignore=ignored)
    return folder


def delete_others(folder: Path) -> None:
    """Delete all dumps of the same kind beside a valid one."""
    kind = folder.name.partition("-")[0]
    for other in folder.parent.iterdir():
        found = _FOLDER.fullmatch(other.name)
        if found and found[1] == kind and other != folder:
            shutil.rmtree(other, ignore_errors=True)
