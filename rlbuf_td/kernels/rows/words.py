"""How kernels on a GPU copy a row: in words of four bytes where a leaf allows it,
otherwise of one byte."""

from __future__ import annotations

import numpy as np

WIDE = 4  # bytes of a wide word


def words_of(extents: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the table of a layout, ``[5, words]`` int32, and how many of its words are
    wide; these come first.

    A column has, in bytes: the offset of a word in the row, its offset in its leaf, the
    size of this leaf in a row, the number of the leaf, and the size of all leaves
    before it. ``extents``, ``[leaves, 2]``: offset and size of each leaf in a row.
    """
    wide, narrow, before = [], [], 0
    for leaf, (offset, size) in enumerate(extents.tolist()):
        is_wide = not (offset % WIDE or size % WIDE)
        words = wide if is_wide else narrow
        for inside in range(0, size, WIDE if is_wide else 1):
            words.append((offset + inside, inside, size, leaf, before))
        before += size
    table = np.array(wide + narrow, np.int32).reshape(-1, 5)
    return np.ascontiguousarray(table.T), len(wide)
