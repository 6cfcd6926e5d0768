"""``python -m rlbuf_td notebooks``: lists the notebooks, or copies them to a folder."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

from rlbuf_td.cli import UsageError

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = _PACKAGE / "notebooks", _PACKAGE.parent / "notebooks"  # of a wheel, of a clone


def find_notebooks() -> list[Path]:
    """Return the notebooks' files in reading order."""
    found = next((files for folder in _FOLDERS if (files := [*folder.glob("*_*.ipynb")])), [])
    return sorted(found, key=lambda path: int(path.name.partition("_")[0]))


def main(options: Namespace) -> int:
    notebooks = find_notebooks()
    if not notebooks:
        raise UsageError(f"this installation has no notebooks: {' and '.join(map(str, _FOLDERS))} hold none")
    if options.folder is None:
        print(f"{notebooks[0].parent}:")
        for path in notebooks:
            print(f"  {path.name}\n      {_title(path)}")
        print("python -m rlbuf_td notebooks DIR copies them to the folder DIR")
    else:
        _copy(notebooks, options.folder)
        where = options.folder.absolute()
        print(f"{len(notebooks)} notebooks are in {where}\nthey need: pip install 'rlbuf_td[notebooks]'")
    return 0


def _copy(notebooks: list[Path], folder: Path) -> None:
    edited = [path.name for path in notebooks if (to := folder / path.name).exists() and not _are_equal(path, to)]
    if edited:
        raise UsageError(f"{folder} has other files of these names, which are kept: {', '.join(edited)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in notebooks:
            shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise UsageError(f"cannot copy to {folder}: {error.strerror}") from error


def _are_equal(path: Path, other: Path) -> bool:
    return other.is_file() and path.read_bytes() == other.read_bytes()


def _title(path: Path) -> str:
    first: str = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"][0]
    return first.strip("# \n")
