"""Sequences: windows that never cross a trajectory, their masks and flags, and priorities of whole windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors.utils import split_trajectories
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from rlbuf_td import (
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.model import World
from tests.statistics import assert_follows


def world(sampler: Any, cls: Any = ReplayBuffer, steps: int = 20, lanes: int = 2, **often: Any) -> World:
    return World.of(sampler, steps, lanes, 1.7, buffer=cls, **often)


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize("kind", ["uniform", "proportional", "stratified", "rank", "stratified by rank"])
def test_strict_windows_are_whole_and_their_anchors_follow_the_law(kind):
    length, burn_in = 4, 2
    inner: Any = {
        "uniform": UniformSampler,
        "proportional": lambda: ProportionalSampler(120, 1.0, eps=0.0, stratified=False),
        "stratified": lambda: ProportionalSampler(120, 1.0, eps=0.0),
        "rank": lambda: RankSampler(120, 1.0, stratified=False),
        "stratified by rank": lambda: RankSampler(120, 1.0),
    }[kind]()
    made = world(SequenceSampler(inner, length, burn_in=burn_in, boundary="strict"), steps=60, often=(0.04, 0.03, 0.02))
    rows = len(made.rb.storage)
    law = np.ones(rows)
    if kind != "uniform":
        error = 0.5 + (torch.arange(rows) * 7 % rows) / rows
        inner.update_priority(torch.arange(rows), error, storage=made.rb.storage)
        law = inner.probability(torch.arange(rows)).numpy()
    fits = np.array(
        [made.model.reach(row)[0] >= burn_in and made.model.reach(row)[1] >= length - 1 for row in made.model.rows()]
    )
    assert 0.2 < fits.mean() < 0.8
    counts = np.zeros(rows)
    torch.manual_seed(0)
    for _ in range(10):
        batch = made.rb.sample(2_000 * 6)
        assert batch["mask"].all()
        anchors = batch["anchor_index"].view(2_000, 6, 2)[:, 0] @ torch.tensor([made.model.lanes, 1])
        assert torch.equal(batch["index"].view(2_000, 6, 2)[:, burn_in] @ torch.tensor([made.model.lanes, 1]), anchors)
        np.add.at(counts, anchors.numpy(), 1)
    law = np.where(fits, law, 0)
    assert_follows(counts, law / law.sum())


@pytest.mark.parametrize("norm", ["buffer", "batch"])
@pytest.mark.parametrize("kind", [ProportionalSampler, RankSampler])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_strict_windows_carry_the_weights_of_their_own_anchors(cls, kind, norm):
    inner = kind(120, 0.8, 0.5, weight_norm=norm)
    made = world(SequenceSampler(inner, 3, burn_in=1, boundary="strict"), cls, steps=60, often=(0.05, 0.0, 0.0))
    rows = torch.arange(len(made.rb.storage))
    inner.update_priority(rows, 0.1 + rows / 50, storage=made.rb.storage)
    for _ in range(3):
        batch = made.rb.sample(40)
    flat = batch["anchor_index"] @ torch.tensor([made.model.lanes, 1])
    probability = inner.probability(rows)
    least = (probability if norm == "buffer" else probability[flat]).min()
    wanted = (probability[flat] / least) ** -0.5
    torch.testing.assert_close(batch["priority_weight"], wanted.float())


def test_strict_windows_at_the_end_of_an_epoch_are_whole():
    made = world(SequenceSampler(MinibatchSampler(), 3, boundary="strict"), steps=25, often=(0.2, 0.0, 0.0))
    batches = [made.rb.sample(3 * 7) for _ in range(20)]
    assert all(len(batch) % 3 == 0 for batch in batches)
    assert all(batch["mask"].all() for batch in batches)


@pytest.mark.parametrize("module", [LSTMModule, GRUModule])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torchrls_recurrent_modules_take_each_real_window_for_itself(cls, module):
    """The flat batch in recurrent mode gives what stepping through each window from its stored state gives."""
    lstm = module is LSTMModule
    states = ["hx", "cx"] if lstm else ["hx"]
    torch.manual_seed(0)
    net = module(
        input_size=2,
        hidden_size=4,
        in_keys=["observation", *states],
        out_keys=["out", *(("next", state) for state in states)],
    )
    storage = LazyTensorStorage(30) if cls is TensorDictReplayBuffer else PackedStorage(30)
    rb = cls(storage=storage, sampler=SequenceSampler(UniformSampler(), 3, burn_in=2))
    done = (torch.arange(30) % 7 == 6).unsqueeze(-1)
    data = TensorDict({"observation": torch.randn(30, 2), "is_init": done.roll(1, 0), "next": {"done": done}}, [30])
    for state in states:
        data[state] = torch.randn(30, 1, 4)
    rb.extend(data)
    batch = rb.sample(100)
    with set_recurrent_mode(True), torch.no_grad():
        found = net(batch.clone())["out"].view(20, 5, 4)
    cell = net.lstm if lstm else net.gru
    for rows, out in zip(batch.view(20, 5), found, strict=True):
        start = int(rows["mask"].int().argmax())
        hidden = [rows[state][start].unsqueeze(1) for state in states]
        for j in range(start, 5):
            if not rows["mask"][j]:
                break
            with torch.no_grad():
                here, following = cell(rows["observation"][j].view(1, 1, 2), tuple(hidden) if lstm else hidden[0])
            hidden = list(following) if lstm else [following]
            torch.testing.assert_close(out[j], here.flatten())


def errors_of(batch: TensorDictBase) -> torch.Tensor:
    return torch.linspace(-3, 2, len(batch)).unsqueeze(-1)


def test_rows_may_still_be_given_priorities_one_by_one():
    sampler = ProportionalSampler(40)
    made = world(SequenceSampler(sampler, 4, burn_in=2))
    rows = torch.tensor([3, 17, 5, 11, 30, 8])  # six rows, but no window
    made.rb.update_priority(rows, torch.arange(1.0, 7.0))
    assert sampler.priority(rows).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_split_trajectories_separates_the_windows_of_a_batch_without_its_padding():
    rb = ReplayBuffer(storage=PackedStorage(12), sampler=SequenceSampler(UniformSampler(unique=True), 3), batch_size=18)
    done = torch.arange(12).view(-1, 1) % 5 == 4
    rb.extend(TensorDict({"x": torch.arange(12), "next": {"done": done}}, [12]))
    batch = rb.sample()
    windows = [window["x"][window["mask"]].tolist() for window in batch.view(-1, 3)]
    split = split_trajectories(batch[batch["mask"]])
    assert [each["x"][each["mask"]].tolist() for each in split] == windows
