"""The state of a sum tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.device_scalars import PriorityState, outside_inference_mode
from rlbuf_td.kernels.huge_pages import advise_huge_pages

#: A number, or a 0-dim tensor whose changes captured graphs see.
Number: TypeAlias = float | Tensor

BLOCK = 8
#: Bounds of weights, so that no sum overflows and no positive priority gets the weight 0.
SMALLEST, LARGEST = 1e-290, 1e290
#: What an update returns, instead of a magnitude, if it refuses the batch.
REFUSED = -2.0


@dataclass
class SumTree:
    """The tensors of a sum tree."""

    magnitude: Tensor  # ``[8 * blocks]`` float64, ``|td_error|`` of each row, -1 if not set
    weight: Tensor  # ``[8 * blocks]`` float64, 0 if not set
    sums: Tensor  # the sums of all levels, from the blocks to the root; each level is padded to whole groups
    before: Tensor  # same layout: the sum of the members before each member of a group
    minima: Tensor  # same layout: the smallest positive weight below each node, infinite if there is none
    _device_state: PriorityState | None = field(default=None, init=False, repr=False, compare=False)

    NAMES: ClassVar = ("magnitude", "weight", "sums", "before", "minima")

    @classmethod
    def empty(cls, capacity: int, device: torch.device | str = "cpu") -> SumTree:
        """Return a tree for ``capacity`` rows, all without a priority; the tree takes about 20 bytes per row."""
        rows = -(-capacity // BLOCK) * BLOCK
        nodes = _starts(rows)[-1] + BLOCK
        tree = cls(*(_memory(size, device) for size in (rows, rows, nodes, nodes, nodes)))
        tree.clear_()
        return tree

    def clear_(self) -> None:
        self.magnitude.fill_(-1.0)
        self.weight.zero_()
        self.sums.zero_()
        self.before.fill_(torch.inf)
        self.before[::BLOCK] = 0.0
        self.minima.fill_(torch.inf)
        if self._device_state is not None:
            self._device_state.largest.fill_(-1.0)

    @property
    def starts(self) -> list[int]:
        """The index at which each level begins in ``sums``, ``before`` and ``minima``."""
        return _starts(self.weight.shape[0])

    @property
    def total(self) -> Tensor:
        return self.sums[self.starts[-1]]

    @property
    def smallest(self) -> Tensor:
        """The smallest positive weight, 0-dim; infinite if there is none."""
        return self.minima[self.starts[-1]]

    @property
    def device_state(self) -> PriorityState:
        """Settings and counters in device memory, created at first use."""
        found = self.__dict__.get("_device_state")  # attribute access would make torch.compile compile twice
        if found is None:
            names = "alpha", "eps", "beta", "drawn", "named", "entry"
            found = self.__dict__["_device_state"] = PriorityState(names, self.weight.device)
        return found

    @cached_property
    def starts_on_device(self) -> Tensor:
        with outside_inference_mode():
            return torch.tensor(self.starts, device=self.weight.device)

    @property
    def refused(self) -> Tensor | int:
        """Number of skipped NaN or infinite TD errors; 0 on the CPU, where a batch with such an error is refused."""
        return 0 if self._device_state is None else self._device_state.refused

    def share_memory_(self) -> None:
        self.__dict__.update({name: tensor.clone().share_memory_() for name, tensor in self.tensors().items()})
        self.__dict__.pop("addresses", None)

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.NAMES}

    @cached_property
    def addresses(self) -> np.ndarray:
        """The numbers of levels, rows and nodes, and the tensors' addresses, int64; compiled loops take this array."""
        arrays = self.starts_on_device, *self.tensors().values()
        sizes = len(arrays[0]), len(self.weight), len(self.sums)
        return np.array([*sizes, *(array.data_ptr() for array in arrays)], np.int64)

    def __getstate__(self) -> dict[str, Tensor]:
        return self.tensors()  # without the addresses, which are invalid in a copy


def _starts(rows: int) -> list[int]:
    starts, size = [0], rows // BLOCK
    while size > 1:
        size = -(-size // BLOCK)
        starts.append(starts[-1] + size * BLOCK)
    return starts


def _memory(size: int, device: torch.device | str) -> Tensor:
    with outside_inference_mode():
        memory = torch.empty(size, dtype=torch.float64, device=device)
    if not memory.is_cuda:
        advise_huge_pages(memory)
    return memory
