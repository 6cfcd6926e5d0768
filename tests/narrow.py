"""The width of what commands print."""

from __future__ import annotations

import re


def assert_narrow(text: str) -> None:
    """Check that every line, of a progress bar as well, fits a terminal of 80 columns."""
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").split("\n")
    wide = [line for line in lines if len(line) > 80]
    assert not wide, wide
