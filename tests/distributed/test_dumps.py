"""Dumps and loads of shards in this process: complete, interrupted, damaged, and of earlier versions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbuf_td.buffers.flow import FlowControl
from rlbuf_td.checkpoint import CheckpointError
from rlbuf_td.distributed.dumps import newest_dump
from tests.distributed.local import World
from tests.distributed.test_law import fill, magnitudes, proportional, rows


def stored(world: World) -> list[list[int]]:
    return [sorted(shard.storage[:]["id"].tolist()) if len(shard.storage) else [] for shard in world.shards]


def loaded(path: Path, shards: int = 2) -> World:
    world = World(shards, proportional)
    world.buffer().loads(path)
    return world


def dumped(path: Path) -> tuple[World, list[list[int]]]:
    world = World(2, proportional)
    fill(world, 60)
    world.buffer().dumps(path)
    return world, stored(world)


def test_an_interrupted_dump_leaves_the_previous_one_as_it_was(tmp_path):
    world, before = dumped(tmp_path)
    priorities = magnitudes(world, 60)
    world.client(home=0).extend(rows(60, 20))
    world.handles[1].is_lost = True
    with pytest.raises(CheckpointError, match=r"shards \[1\] are lost: the dump is not complete"):
        world.buffer().dumps(tmp_path)
    other = loaded(tmp_path)
    assert stored(other) == before
    assert torch.equal(magnitudes(other, 60), priorities)
    assert newest_dump(tmp_path, 0, 2) == tmp_path / "shards-000001" / "shard-0000"
    world.handles[1].is_lost = False
    world.buffer().dumps(tmp_path)
    assert stored(loaded(tmp_path)) == stored(world) != before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["shards-000003", "shards.json"]


def test_a_shard_restarts_from_a_dump_of_as_many_shards_or_empty(tmp_path):
    world, before = dumped(tmp_path)
    for place in range(2):
        world.handles[place].restart(newest_dump(tmp_path, place, 2))
    assert stored(world) == before
    assert newest_dump(tmp_path, 0, 3) is None
    assert newest_dump(tmp_path / "elsewhere", 0, 2) is None


def test_a_shard_that_restarts_while_its_dump_is_replaced_takes_the_new_one(tmp_path):
    world, before = dumped(tmp_path)
    found = iter([tmp_path / "shards-000000" / "shard-0000", newest_dump(tmp_path, 0, 2)])
    world.handles[0].restart_from(lambda: next(found))
    assert stored(world) == before


def test_a_damaged_dump_changes_no_shard(tmp_path):
    dumped(tmp_path)
    world = World(2, proportional)
    fill(world, 30)
    before = stored(world)
    for file in (tmp_path / "shards-000001" / "shard-0001" / "data").iterdir():
        file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="shard-0001"):
        world.buffer().loads(tmp_path)
    world.handles[1].is_lost = True
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        world.buffer().loads(tmp_path)
    assert stored(world) == before
    assert world.shards[0]._prepared is None


def test_unchanged_data_is_not_written_again(tmp_path):
    world, _ = dumped(tmp_path)
    files = {file.stat().st_ino for file in tmp_path.glob("*/*/data/*")}
    world.client(home=1).extend(rows(60, 1))
    world.buffer().dumps(tmp_path)
    again = [file for file in tmp_path.glob("*/shard-0000/data/*") if file.stat().st_ino in files]
    assert sum(file.stat().st_size for file in again) > 0


def test_a_dump_of_an_earlier_version_is_loaded_and_then_replaced(tmp_path):
    world, before = dumped(tmp_path)
    for place in range(2):
        os.rename(tmp_path / "shards-000001" / f"shard-000{place}", tmp_path / f"shard-000{place}")
    manifest = json.loads((tmp_path / "shards.json").read_text())
    (tmp_path / "shards.json").write_text(json.dumps({"steps": manifest["steps"], "lanes": 1}))
    assert stored(loaded(tmp_path)) == before
    assert sorted(row for shard in stored(loaded(tmp_path, 3)) for row in shard) == list(range(60))
    world.buffer().dumps(tmp_path)
    assert stored(loaded(tmp_path)) == before
    assert not (tmp_path / "shard-0000").exists()


@pytest.mark.parametrize(
    "manifest", ["", "[]", '{"steps": [1.5], "lanes": 1}', '{"steps": [1], "lanes": 1, "dump": "../x"}', '{"lanes": 1}']
)
def test_a_folder_without_a_manifest_of_shards_is_refused(manifest, tmp_path):
    (tmp_path / "shards.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="no dump of a ShardedReplayBuffer"):
        loaded(tmp_path)


def counts(world: World) -> Any:
    return {
        name: int(count) for name, count in world.flow.limiter.flow.report().items() if name in ("inserts", "samples")
    }


def test_flow_control_goes_on_from_the_counts_of_the_dump(tmp_path):
    world = World(2, proportional, flow=FlowControl(4.0, 10, 400))
    client = world.client(home=0)
    client.extend(rows(0, 50))
    for _ in range(3):
        client.sample()
    world.buffer().dumps(tmp_path)
    for flow, expected in ((FlowControl(4.0, 10, 400), (50, 192)), (FlowControl(2.0, 10, 400), (50, 80))):
        other = World(1, proportional, flow=flow)
        other.buffer().loads(tmp_path)
        assert tuple(counts(other).values()) == expected
        assert other.client().sample().shape == (64,)
    manifest = json.loads((tmp_path / "shards.json").read_text())
    manifest["flow"]["counts"] = "none"
    (tmp_path / "shards.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="flow control needs 6 whole numbers"):
        other.buffer().loads(tmp_path)
