"""The layout of a row: where each leaf lies, how much is padding, and what a saved layout says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.storages.layout import CACHE_LINE, RowLayout
from tests.catalogue import SCHEMAS, Schema, transitions

over_schemas = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)


def layout_of(schema: Schema) -> RowLayout:
    return RowLayout(transitions(schema, 2), lead_dims=1)


def bytes_layout(nbytes: int) -> RowLayout:
    return RowLayout(TensorDict({"x": torch.zeros(1, nbytes, dtype=torch.uint8)}, [1]), lead_dims=1)


def padded(nbytes: int) -> int:
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def offsets(layout: RowLayout) -> list[int]:
    rows = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    return [column[1].data_ptr() - rows[1].data_ptr() for column in layout.columns(rows)]


@over_schemas
def test_leaves_lie_aligned_in_descending_item_size(schema: Schema):
    layout = layout_of(schema)
    end, sizes = 0, [leaf.dtype.itemsize for leaf in layout.leaves]
    assert sizes == sorted(sizes, reverse=True)
    for leaf, offset in zip(layout.leaves, offsets(layout), strict=True):
        assert offset % leaf.dtype.itemsize == layout.row_bytes % leaf.dtype.itemsize == 0, leaf
        assert offset == (padded(end) if leaf.nbytes >= 1_024 else end) or not leaf.nbytes, leaf
        end = offset + leaf.nbytes if leaf.nbytes else end
    assert end == layout.data_bytes <= layout.row_bytes
    assert len(layout.groups) == len({leaf.dtype for leaf in layout.leaves})
    assert sorted(slot for group in layout.groups for _, slot, _ in group.parts) == list(range(len(layout.leaves)))


def test_a_row_is_padded_to_8_bytes_or_cheaply_to_a_cache_line() -> None:
    for nbytes, row_bytes in ((1, 8), (8, 8), (56, 56), (57, 64), (121, 128), (232, 232), (250, 256), (1_000, 1_024)):
        assert bytes_layout(nbytes).row_bytes == row_bytes


def test_the_order_of_the_keys_makes_no_difference() -> None:
    data = transitions(SCHEMAS["nested"], 1)
    reverse = TensorDict({}, [1])
    for key in reversed(list(data.keys(True, True))):
        reverse[key] = data[key]
    left, right = RowLayout(data, 1), RowLayout(reverse, 1)
    assert left == right
    assert left.leaves == right.leaves


def test_each_schema_has_a_layout_of_its_own() -> None:
    layouts = [layout_of(schema) for schema in SCHEMAS.values()]
    assert len(set(layouts)) == len(layouts)
    assert {RowLayout.from_state(layout.state()) for layout in layouts} == set(layouts)


def images(count: int) -> TensorDict:
    stacks = torch.arange(count * 2 * 1_030).remainder(251).to(torch.uint8).view(count, 2, 1_030)
    done = torch.zeros(count, 1, dtype=torch.bool)
    after = {"observation": stacks[:, 1], "reward": torch.rand(count, 1), "done": done, "terminated": done}
    return TensorDict({"observation": stacks[:, 0], "next": after}, [count])


def test_large_leaves_begin_at_a_cache_line() -> None:
    layout = RowLayout(images(2), 1)
    places = {leaf.key: offset for leaf, offset in zip(layout.leaves, offsets(layout), strict=True)}
    assert places == layout.offsets
    assert places[("observation",)] == 64
    assert places[("next", "observation")] == 64 + 1_088
    assert layout.row_bytes % CACHE_LINE == 0


@pytest.mark.parametrize("options", [{}, {"share_next": True}], ids=["plain", "deduplicated"])
@pytest.mark.filterwarnings("ignore:the 5 oldest time steps")
@pytest.mark.parametrize("capacity", [20, 15, 30])
def test_rows_of_an_earlier_version_are_aligned_by_a_load(tmp_path: Path, capacity: int, options: Any) -> None:
    data = images(20)
    old, *others = (ReplayBuffer(storage=PackedStorage(size, **options)) for size in (20, *[capacity] * 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlbuf_td.storages.layout._LARGE", 1 << 30)
        old.extend(data)
        state = old.state_dict()
    old.dumps(tmp_path)
    assert old.storage.layout.offsets[("next", "observation")] % CACHE_LINE
    _, started, emptied = others
    started.extend(images(3))
    emptied.extend(images(3))
    emptied.empty()
    kept = data[-capacity:]
    for new in others:
        new.loads(tmp_path)
        assert new.storage.layout == RowLayout(data, 1)
        assert (new.storage[:] == kept).all()
    if capacity == 20:
        for new in (*others, ReplayBuffer(storage=PackedStorage(capacity, **options))):
            new.empty()
            new.load_state_dict(state)
            assert new.storage.layout == RowLayout(data, 1)
            assert (new.storage[:] == data).all()
            new.extend(data[:5])
            assert (new.storage[:5] == data[:5]).all()
