"""RolloutBuffer: extend, iterate, done."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs import Compose, RewardScaling, SelectTransform

from rlbuf_td.buffers.rollout import RolloutBuffer
from rlbuf_td.writers import RolloutWriter
from tests.catalogue import assert_same
from tests.random_walk import make_world


def filled(world, steps=8, data=None, **kwargs):
    data = world.steps(steps) if data is None else data
    kwargs = {"batch_size": 5, "gamma": 0.9, "lmbda": 0.8, "value_network": world.module()} | kwargs
    rollout = RolloutBuffer(steps, world.lanes, **kwargs)
    rollout.extend(data.clone())
    return rollout, data


@pytest.mark.parametrize(("lanes", "drop_last"), [(None, True), (3, False)])
def test_iteration_gives_every_row_once_an_epoch_with_its_estimates(lanes, drop_last):
    world = make_world(lanes or 1)
    data = world.steps(9)
    settings = {"batch_size": 4, "epochs": 2, "drop_last": drop_last, "gamma": 0.9, "lmbda": 0.8}
    rollout = RolloutBuffer(9, lanes, value_network=world.module(), **settings)
    rollout.extend(data.clone() if lanes else data[0].clone())
    advantage, target = world.estimates(data)
    for _ in range(2):
        seen = torch.zeros(9, lanes or 1, dtype=torch.int64)
        for batch in rollout:
            t, e = batch["index"].unbind(-1) if lanes else (batch["index"], torch.zeros_like(batch["index"]))
            torch.testing.assert_close(batch["observation"], data["observation"][e, t])
            torch.testing.assert_close(batch["next", "reward"], data["next", "reward"][e, t])
            torch.testing.assert_close(batch["advantage"], advantage[e, t])
            torch.testing.assert_close(batch["value_target"], target[e, t])
            seen[t, e] += 1
        assert seen.sum() == 2 * (8 if drop_last else 27)
        assert (seen <= 2).all()


@pytest.mark.parametrize("batch_size", [1, 5, 24, 100])
@pytest.mark.parametrize(("transform", "scale"), [(False, None), (False, "minibatch"), (True, "minibatch")])
def test_all_ways_to_draw_give_the_same_batches(batch_size, transform, scale):
    world = make_world(3)
    data = world.steps(8)
    batches = []
    for way in ("iterate", "sample", "general"):
        rollout, _ = filled(world, data=data, batch_size=batch_size, epochs=3, normalize_advantage=scale)
        rollout.set_rng(torch.Generator().manual_seed(5))
        if transform:  # which drops the index, too
            scaling = RewardScaling(1.0, 2.0, in_keys=[("next", "reward")])
            rollout.append_transform(Compose(scaling, SelectTransform("observation", "advantage", ("next", "reward"))))
        if way == "general":
            rollout.parts = rollout.parts._replace(draws="")
        count = -(-24 // batch_size) * 3
        batches.append(list(rollout) if way == "iterate" else [rollout.sample() for _ in range(count)])
        assert rollout.sampler.ran_out
    for one, *others in zip(*batches, strict=True):
        assert "index" in one
        for other in others:
            assert_same(one, other)


def test_a_loop_left_early_starts_over_next_time():
    rollout, _ = filled(make_world(3), epochs=2)
    for leave in (lambda: next(iter(rollout)), rollout.sample):
        assert len(leave()) == 5
        assert sum(len(batch) for batch in rollout) == 48


def test_sampling_within_a_loop_takes_its_turn():
    """The sampler knows one order: whoever draws takes the next rows, and no row comes twice."""
    rollout, _ = filled(make_world(3))
    seen = []
    for number, batch in enumerate(rollout):
        seen.append(batch["index"])
        if number == 0:
            seen.append(rollout.sample()["index"])
        if number == 1:  # a batch of another size
            flat, _ = rollout.sampler.draw(rollout.storage, 3)
            seen.append(torch.stack((flat // 3, flat % 3), -1))
    assert len(torch.cat(seen)) == len(torch.cat(seen).unique(dim=0)) == 24


def test_a_write_within_a_loop_is_noticed():
    world = make_world(3)
    rollout, _ = filled(world)
    with pytest.raises(RuntimeError, match="the rollout is not complete: 1 of 8 steps are written"):  # noqa: PT012
        for _ in rollout:
            rollout.add(world.steps(1)[:, 0])
    new = world.steps(8)
    rollout.empty()
    rollout.extend(world.steps(8))
    iterator = iter(rollout)
    next(iterator)
    rollout.extend(new.clone())
    rows = torch.cat([batch["observation"] for batch in iterator])
    assert {tuple(x) for x in rows.tolist()} == {tuple(x) for x in new["observation"].reshape(-1, 2).tolist()}


def test_every_batch_of_an_incomplete_rollout_is_estimated_or_refused():
    world = make_world()
    for partial in (False, True):
        rollout, data = filled(world, partial=partial)
        rollout.sample()  # the next batches are drawn by compiled code
        rollout.extend(data[:, :2].clone())
        if partial:
            assert rollout.sample()["advantage"].isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="the rollout is not complete: 2 of 8 steps"):
                rollout.sample()


def test_an_incomplete_rollout_can_be_read_on_request():
    world = make_world(3)
    data = world.steps(8, values=False)
    rollout = RolloutBuffer(8, 3, batch_size=4, partial=True, gamma=0.9, lmbda=0.8, value_network=world.module())
    for written in (4, 6, 8):
        rollout.extend(data[:, rollout.writer.steps : written].clone())
        assert rollout.writer.is_estimated == rollout.is_complete == (written == 8)
        advantage, _ = world.estimates(data[:, :written])
        for _ in range(2):
            batches = torch.cat(list(rollout))
            assert len(batches) == 3 * written
            t, e = batches["index"].unbind(-1)
            torch.testing.assert_close(batches["advantage"], advantage[e, t])
        assert rollout.summary()["advantage_mean"] == pytest.approx(advantage.mean().item(), abs=1e-6)
    assert len(world.network.asked) <= 2 * 3  # for each estimate: all steps, and the rows that break off


def test_the_summary_is_a_flat_dict_of_floats_computed_once_a_rollout(monkeypatch):
    world = make_world(3)
    rollout, data = filled(world)
    advantage, target = world.estimates(data)
    summary = rollout.summary()
    value = world.value(data["observation"])
    expected = {
        "advantage_mean": advantage.mean(),
        "advantage_std": advantage.std(correction=0),
        "value_target_mean": target.mean(),
        "value_target_std": target.std(correction=0),
        "explained_variance": 1 - (target - value).var(correction=0) / target.var(correction=0),
        "value_rows": world.rows_to_ask(data),
    }
    assert summary == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-4, abs=1e-5)
    assert all(type(x) is float for x in summary.values())
    for name in ("value_target_mean", "value_target_std", "explained_variance"):
        assert getattr(rollout, name) == summary[name]
    with monkeypatch.context() as patched:
        patched.setattr("rlbuf_td.buffers.rollout.explained_variance", None)
        summary["advantage_mean"] = 0.0  # the caller's own copy
        assert rollout.summary()["advantage_mean"] != 0
    saved, before = rollout.state_dict(), rollout.summary()
    rollout.extend(world.steps(8))
    assert rollout.summary() != before
    rollout.load_state_dict(saved)
    assert rollout.summary() == before


def test_a_writer_of_ones_own_sets_the_keys():
    world = make_world(3)
    network = world.module()
    writer = RolloutWriter(0.9, 0.8, value_network=network, advantage_key="adv", value_target_key=("targets", "v"))
    rollout, data = filled(world, writer=writer, gamma=None, lmbda=None, value_network=None)
    for batch in rollout:
        t, e = batch["index"].unbind(-1)
        torch.testing.assert_close(batch["adv"], world.estimates(data)[0][e, t])
        torch.testing.assert_close(batch["targets", "v"], world.estimates(data)[1][e, t])
    assert set(rollout.summary()) >= {"advantage_mean", "explained_variance"}
