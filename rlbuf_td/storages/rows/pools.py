"""The memory of the pools to which deduplicated rows refer: of fixed capacity, or growing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from rlbuf_td.kernels.inference_mode import outside_inference_mode
from rlbuf_td.storages.dedup import DedupLayout, Sections

_LOOK = 4096  # rows whose names are checked at once
MakeRoom: TypeAlias = Callable[[int, int], None]  # (offset of a section, nbytes): reserves disk space


class BlockPools:
    """Pools of fixed capacity in one block on the CPU. If the block is a file, ``make_room`` reserves disk space."""

    is_compiled = True  # whether compiled loops read and write the entries

    def __init__(self, dedup: DedupLayout, block: torch.Tensor, sections: Sections, make_room: MakeRoom | None) -> None:
        self._sections, self._make_room = sections, make_room
        sizes = [(group.nbytes, most + 1) for group, most in zip(dedup.groups, sections.most, strict=True)]
        entries, stacks = zip(sections.entries, sizes, strict=True), zip(sections.stacks, sizes, strict=True)
        self.entries = [block[at:][: count * nbytes].view(count, nbytes) for at, (nbytes, count) in entries]
        self.stacks = [block[at:][: count * 4].view(torch.int32) for at, (_, count) in stacks]

    def reserve(self, g: int, count: int) -> None:
        """Make room for ``count`` entries in pool ``g``; raise an OSError if the disk is full."""
        if self._make_room is not None:  # memory needs no reservation: its pages are committed at their first write
            self._make_room(self._sections.stacks[g], 4 * (count + 1))
            self._make_room(self._sections.entries[g], self.entries[g].shape[1] * count)

    def clear_(self, names: torch.Tensor) -> None:
        """Set the names in all rows, ``[N, n]``, to 0."""
        for part in names.split(_LOOK):
            if part.any():  # memory that is only read stays uncommitted
                part.zero_()


class GrowingPools:
    """Pools on another device, which commits memory when it is allocated: they begin empty, and grow by a quarter."""

    is_compiled = False

    def __init__(self, dedup: DedupLayout, block: torch.Tensor, sections: Sections) -> None:
        self._most = sections.most
        self.entries = [block.new_empty((1, group.nbytes)) for group in dedup.groups]
        self.stacks = [block.new_empty(1, dtype=torch.int32) for _ in dedup.groups]

    def reserve(self, g: int, count: int) -> None:
        room = len(self.entries[g]) - 1
        for memory in (self.entries, self.stacks) if count > room else ():
            old = memory[g]
            with outside_inference_mode():
                memory[g] = old.new_empty((max(count, min(self._most[g], room * 5 // 4)) + 1, *old.shape[1:]))
            memory[g][:room] = old[:room]

    def clear_(self, names: torch.Tensor) -> None:
        names.zero_()


def grows(device: torch.device) -> bool:
    """Whether blocks on a device end before the pools, which then grow outside of them."""
    return device.type != "cpu"
