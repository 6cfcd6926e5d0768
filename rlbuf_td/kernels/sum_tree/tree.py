"""The state of a sum tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import record_of, uses_numba
from rlbuf_td.kernels.huge_pages import advise_huge_pages
from rlbuf_td.kernels.inference_mode import outside_inference_mode

#: A number, or a 0-dim tensor, whose changes ``torch.compile`` does not notice.
Number: TypeAlias = float | Tensor

BLOCK = 8
#: Bounds of weights, so that no sum overflows and no positive priority gets the weight 0.
SMALLEST, LARGEST = 1e-290, 1e290
#: What an update returns, instead of a magnitude, if it refuses the batch.
REFUSED = -2.0


@dataclass
class SumTree:
    """The tensors of a sum tree. Only trees on the CPU, for compiled loops, have nodes."""

    magnitude: Tensor  # ``[8 * blocks]`` float64, ``|td_error|`` of each row, -1 if not set
    weight: Tensor  # ``[8 * blocks]`` float64, 0 if not set
    sums: Tensor  # the sums of all levels, from the blocks to the root; each level is padded to whole groups
    before: Tensor  # same layout: the sum of the members before each member of a group
    minima: Tensor  # same layout: the smallest positive weight below each node, infinite if there is none
    #: Number of skipped NaN or infinite TD errors, 0-dim; 0 on the CPU, where a batch with such an error is refused.
    refused: Tensor = field(init=False, repr=False, compare=False)
    _places: list[int] | None = field(default=None, init=False, repr=False, compare=False)
    _addresses: np.ndarray = field(init=False, repr=False, compare=False)
    _address: int = field(default=0, init=False, repr=False, compare=False)

    NAMES: ClassVar = ("magnitude", "weight", "sums", "before", "minima")

    @classmethod
    def empty(cls, capacity: int, device: torch.device | str = "cpu") -> SumTree:
        """Return a tree for ``capacity`` rows, all without a priority."""
        rows, nodes = _sizes(capacity, uses_numba(torch.device(device)))
        tree = cls(*(_memory(size, device) for size in (rows, rows, nodes, nodes, nodes)))
        tree.clear_()
        return tree

    def __post_init__(self) -> None:
        with outside_inference_mode():
            self.refused = torch.zeros((), dtype=torch.int64, device=self.weight.device)

    def clear_(self) -> None:
        self.magnitude.fill_(-1.0)
        self.weight.zero_()
        self.sums.zero_()
        self.before.fill_(torch.inf)
        self.before[::BLOCK] = 0.0
        self.minima.fill_(torch.inf)

    @property
    def has_nodes(self) -> bool:
        return self.sums.shape[0] > 0

    @property
    def starts(self) -> list[int]:
        """The index at which each level begins in ``sums``, ``before`` and ``minima``."""
        return _starts(self.weight.shape[0])

    @property
    def total(self) -> Tensor:
        return self.sums[self.starts[-1]] if self.has_nodes else self.weight.sum()

    @property
    def smallest(self) -> Tensor:
        """The smallest positive weight, 0-dim; infinite if there is none."""
        if self.has_nodes:
            return self.minima[self.starts[-1]]
        return torch.where(self.weight > 0, self.weight, torch.inf).amin()

    def share_memory_(self) -> None:
        self.__dict__.update({name: tensor.clone().share_memory_() for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.NAMES}

    @property
    def addresses(self) -> np.ndarray:
        """A :data:`TREE` record, ``[1]``; compiled loops take this array.

        The array is the same object as long as no tensor has moved.
        """
        places = [*map(Tensor.data_ptr, (self.magnitude, self.weight, self.sums, self.before, self.minima))]
        if places != self._places:
            sizes = {"levels": len(self._starts), "rows": len(self.weight), "nodes": len(self.sums)}
            given = dict(zip(self.NAMES, places, strict=True), starts=self._starts.ctypes.data)
            record = record_of(TREE, **sizes, **given)
            address = record.ctypes.data
            self._addresses, self._address, self._places = record, address, places  # at once: an interrupt may come
        return self._addresses

    @property
    def address(self) -> int:
        """The address of :attr:`addresses`."""
        self.addresses  # noqa: B018  # made anew if a tensor has moved
        return self._address

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.array(self.starts, np.int64)

    def __getstate__(self) -> dict[str, Tensor]:
        return self.tensors()  # without the addresses, which are invalid in a copy

    def __setstate__(self, state: dict[str, Tensor]) -> None:
        self.__init__(**state)  # type: ignore[misc]


#: The numbers of levels, rows and nodes of a tree, and the addresses of its ``starts`` and of its tensors.
TREE = np.dtype([(name, np.int64) for name in ("levels", "rows", "nodes", "starts", *SumTree.NAMES)])


def tree_bytes(capacity: int, device: torch.device) -> int:
    """Return the memory of a tree for ``capacity`` rows: 20 bytes per row on the CPU, 16 on other devices."""
    rows, nodes = _sizes(capacity, device.type == "cpu")
    return 8 * (2 * rows + 3 * nodes)


def _sizes(capacity: int, has_nodes: bool) -> tuple[int, int]:
    rows = -(-capacity // BLOCK) * BLOCK
    return rows, (_starts(rows)[-1] + BLOCK) * has_nodes


def _starts(rows: int) -> list[int]:
    starts, size = [0], rows // BLOCK
    while size > 1:
        size = -(-size // BLOCK)
        starts.append(starts[-1] + size * BLOCK)
    return starts


def _memory(size: int, device: torch.device | str) -> Tensor:
    with outside_inference_mode():
        memory = torch.empty(size, dtype=torch.float64, device=device)
    if memory.is_cpu:
        advise_huge_pages(memory)
    return memory
