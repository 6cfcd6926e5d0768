"""A time step in NumPy arrays, from which a compiled write copies the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import SchemaError, show_key, walk


class StagedStep:
    """One time step, whose memory is filled again before each write.

    The arrays are never replaced, so that their addresses stay valid as long as this
    object. A copy, also by pickling, has arrays of its own.

    Args:
        columns: a contiguous array ``[E, *shape]`` for each leaf of the rows.
        nodes: the nested TensorDicts of a step, without leaves.
    """

    def __init__(
        self, columns: Mapping[tuple[str, ...], np.ndarray], nodes: TensorDict
    ) -> None:
        self.columns, self._nodes = dict(columns), nodes
        #: Whether the rows are ``[T]``; E is 1 then.
        self.is_flat = not nodes.ndim
        self.size = len(next(iter(self.columns.values())))
        #: The step over the same memory as :meth:`ReplayBuffer.add` takes it.
        self.rows = self._as_rows()

    @classmethod
    def like(cls, schema: TensorDict, is_flat: bool) -> StagedStep:
        """Return a step of zeros, with the keys, dtypes and shapes of ``schema``,
        ``[E]``; ``is_flat``: for rows ``[T]``.

        Raises:
            SchemaError: NumPy lacks a dtype, such as bfloat16.
        """
        columns = {}
        for key, value in walk(schema):
            try:
                dtype = torch.empty(0, dtype=value.dtype).numpy().dtype
            except TypeError as error:
                raise SchemaError(
                    f"{show_key(key)} is {value.dtype}, which NumPy lacks: write TensorDicts, with add"
                ) from error
            columns[key] = np.zeros(value.shape, dtype)
        nodes = cast("TensorDict", schema[0]) if is_flat else schema
        return cls(columns, nodes.empty(recurse=True, device="cpu"))

    def like_this(self) -> StagedStep:
        """Return another step with memory of its own."""
        columns = {key: np.empty_like(column) for key, column in self.columns.items()}
        return StagedStep(columns, self._nodes)

    def completed(
        self, layout: RowLayout, added: Sequence[tuple[str, ...]]
    ) -> StagedStep:
        """Return this step, over the same memory, with the leaves ``added`` that it
        lacks, filled with NaN."""
        blanks = {}
        for key in added:
            if key in layout.places and key not in self.columns:
                leaf = layout.leaves[layout.places[key]]
                blank = torch.full(
                    (self.size, *leaf.shape), torch.nan, dtype=leaf.dtype
                )
                if leaf.dtype is torch.bfloat16:
                    return self  # NumPy lacks it
                blanks[key] = blank.numpy()
        return StagedStep(self.columns | blanks, self._nodes) if blanks else self

    def _as_rows(self) -> TensorDict:
        rows = self._nodes.copy()
        for key, column in self.columns.items():
            rows.set(key, torch.from_numpy(column[0, ...] if self.is_flat else column))
        return rows

    def addresses_in(self, layout: RowLayout) -> list[int] | None:
        """Return the address of each leaf of ``layout``, in their order; None if the
        rows have other keys, dtypes or shapes."""
        if self.columns.keys() != layout.places.keys():
            return None
        for leaf in layout.leaves:
            value = self.rows.get(leaf.key)
            shape = leaf.shape if self.is_flat else (self.size, *leaf.shape)
            if value.dtype is not leaf.dtype or value.shape != torch.Size(shape):
                return None
        return [self.columns[leaf.key].ctypes.data for leaf in layout.leaves]

    def __getstate__(self) -> dict[str, Any]:
        return {"columns": self.columns, "nodes": self._nodes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
