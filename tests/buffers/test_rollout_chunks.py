"""``RolloutBuffer(sequence_length=L)``: chunks of consecutive steps, for recurrent policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import LazyTensorStorage
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import LSTMModule, ProbabilisticActor, ValueOperator, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss

from rlbuf_td import MinibatchSampler, RolloutBuffer, SequenceSampler
from rlbuf_td.functional import generalized_advantage_estimate, normalize
from rlbuf_td.writers import RolloutWriter

Chunk = tuple[int, int, int]  # first step, lane, number of steps


def steps_of(lanes: int, steps: int, often: float, first: Tensor | None = None) -> TensorDict:
    """Return random steps ``[E, n]``, all of whose numbers are unique."""
    lead = lanes, steps
    terminated, truncated = (torch.rand(*lead, 1) < often / 2 for _ in range(2))
    done = terminated | truncated
    first = torch.ones(lanes, 1, dtype=torch.bool) if first is None else first
    after = {"reward": torch.randn(*lead, 1), "done": done, "terminated": terminated, "truncated": truncated}
    data = {"x": torch.rand(*lead), "hidden": torch.randn(*lead, 2, 3), "state_value": torch.randn(*lead, 1)}
    data["is_init"] = torch.cat([first[:, None], done[:, :-1]], 1)
    return TensorDict(data | {"next": after | {"state_value": torch.randn(*lead, 1)}}, lead)


def chunks_of(done: Tensor, length: int) -> list[Chunk]:
    """Divide the steps, ``[E, n]``, from the definition."""
    found = []
    for lane, flags in enumerate(done.tolist()):
        start = 0
        for step, ends in enumerate(flags):
            if ends or step + 1 == len(flags) or step + 1 - start == length:
                found.append((start, lane, step + 1 - start))
                start = step + 1
    return found


def check_batch(batch: TensorDict, data: TensorDict, rollout: RolloutBuffer, length: int) -> list[Chunk]:
    """Compare a batch with the written steps; return its chunks."""
    assert batch.shape[1:] == (length,)
    found = []
    for chunk in batch.unbind(0):
        index = chunk["index"].reshape(length, -1).tolist()
        (start, *rest), size = index[0], int(chunk["mask"].sum())
        lane = rest[0] if rest else 0
        assert chunk["mask"].tolist() == [True] * size + [False] * (length - size)
        assert not chunk["burn_in_mask"].any()
        steps = [*range(start, start + size)] + [start + size - 1] * (length - size)
        assert index == [[step, *rest] for step in steps]
        rows, cells = data[lane, steps], (steps, lane) if rest else (steps,)
        for key in ("x", "hidden", "state_value", ("next", "reward"), ("next", "done"), ("next", "terminated")):
            assert torch.equal(chunk[key], rows[key]), key
        for key in ("advantage", "value_target"):
            assert torch.equal(chunk[key], rollout.storage[key][cells]), key
        assert torch.equal(chunk["is_init"][1:], rows["is_init"][1:])
        assert chunk["is_init"][0].all()
        assert chunk["collector", "slice_end"].flatten().nonzero().tolist() == [[size - 1]]
        found.append((start, lane, size))
    return found


@given(
    steps=st.integers(1, 14),
    lanes=st.sampled_from([None, 1, 2, 3]),
    often=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    parts=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    length=st.integers(1, 14),
    size=st.integers(1, 6),
    drop_last=st.booleans(),
    storage=st.sampled_from([None, LazyTensorStorage]),
    seed=st.integers(0, 999),
)
def test_an_epoch_has_every_row_once(steps, lanes, often, parts, length, size, drop_last, storage, seed):
    torch.manual_seed(seed)
    length = min(length, steps)
    settings: Any = {"batch_size": size * length, "epochs": 2, "drop_last": drop_last, "partial": True}
    if storage is not None:
        settings["storage"] = storage(steps * (lanes or 1), ndim=1 if lanes is None else 2)
    rollout = RolloutBuffer(steps, lanes, sequence_length=length, **settings)
    data: Any = None
    for part in parts:
        data = None if data is None or data.shape[1] == steps else data  # then a new rollout begins
        known = 0 if data is None else data.shape[1]
        first = None if data is None else data["next", "done"][:, -1]
        written = steps_of(lanes or 1, min(part, steps - known), often, first)
        data = written if data is None else torch.cat([data, written], 1)
        rollout.extend(written if lanes else written[0])
        wanted = chunks_of(data["next", "done"][..., 0], length)
        if drop_last and len(wanted) < size:
            with pytest.raises(ValueError, match=r"drop_last leaves no batch: \d+ windows are fewer"):
                next(iter(rollout))
            continue
        batches = [check_batch(batch, data, rollout, length) for batch in rollout]
        epoch = len(wanted) // size if drop_last else -(-len(wanted) // size)
        assert len(batches) == 2 * epoch
        for drawn in (batches[:epoch], batches[epoch:]):
            found = [chunk for batch in drawn for chunk in batch]
            assert len({*found}) == len(found) == (epoch * size if drop_last else len(wanted))
            assert {*found} <= {*wanted}


def buffer(data: TensorDict, **kwargs: Any) -> RolloutBuffer:
    kwargs = {"batch_size": 12, "sequence_length": 4, "generator": torch.Generator(), "epochs": 2} | kwargs
    rollout = RolloutBuffer(data.shape[1], data.shape[0], **kwargs)
    rollout.extend(data)
    return rollout


@pytest.mark.parametrize("transform", [False, True])
def test_advantages_are_normalized_over_unpadded_rows(transform):
    data = steps_of(3, 20, 0.4)
    plain, scaled = buffer(data), buffer(data, normalize_advantage="minibatch")
    if transform:
        for rollout in (plain, scaled):
            rollout.append_transform(lambda batch: batch.exclude("mask"))
    padded = 0
    for one, other in zip(plain, scaled, strict=True):
        mask = one["mask"]
        padded += int((~mask).sum())
        torch.testing.assert_close(other["advantage"][mask], normalize(one["advantage"][mask]))
    assert padded > 0


def test_the_summary_is_that_of_all_rows():
    data = steps_of(3, 20, 0.4)
    chunks, plain = buffer(data), buffer(data, sequence_length=None)
    next(iter(chunks))
    assert chunks.summary() == plain.summary()


def test_a_shared_rollout_gives_the_same_chunks():
    data = steps_of(3, 20, 0.3)
    alone, shared = buffer(data), buffer(data)
    shared.share()
    for one, other in zip(alone, shared, strict=True):
        assert (one == other).all()
    more = steps_of(3, 20, 0.3)
    for rollout in (alone, shared):
        rollout.extend(more)
    assert sum(int(batch["mask"].sum()) for batch in shared) == 120


def test_trajectories_follow_the_keys_of_the_writer():
    data = steps_of(2, 8, 0.0).exclude(("next", "done"), ("next", "truncated"), ("next", "terminated"))
    data["next", "ends", "over"] = torch.zeros(2, 8, 1, dtype=torch.bool)
    data["next", "ends", "over"][:, 2] = True
    data["episode"] = torch.arange(8).div(5, rounding_mode="floor").expand(2, 8).clone()
    keys: Any = {"done_key": ("next", "ends", "over"), "terminated_key": ("next", "ends", "over")}
    rollout = buffer(data, batch_size=8, writer=RolloutWriter(**keys, trajectory_key="episode"))
    sizes = torch.cat([batch["mask"].sum(1) for batch in rollout])
    assert sorted(sizes.tolist()) == [2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3]


def recurrent_parts() -> tuple[Any, Any, Any, Any]:
    """Return an LSTM, a module that runs it, an actor on top of that module, and a critic that reads its output."""
    embed = TensorDictModule(torch.nn.Linear(4, 8), ["observation"], ["features"])
    memory = LSTMModule(input_size=8, hidden_size=8, in_key="features", out_key="belief")
    logits = TensorDictModule(torch.nn.Linear(8, 2), ["belief"], ["logits"])
    body = TensorDictSequential(embed, memory)
    distribution = {"distribution_class": torch.distributions.Categorical, "return_log_prob": True}
    actor = ProbabilisticActor(TensorDictSequential(body, logits), in_keys=["logits"], **distribution)
    return memory, body, actor, ValueOperator(torch.nn.Linear(8, 1), ["belief"])


@torch.no_grad()
def assert_estimates_use_the_states_after_each_step(
    rollout: RolloutBuffer, data: TensorDict, lstm: Any, embed: Any, critic: Any
) -> None:
    after, features = data["next"], embed(data["next", "observation"]).flatten(0, 1).unsqueeze(1)
    states = (
        after[key].flatten(0, 1).transpose(0, 1).contiguous() for key in ("recurrent_state_h", "recurrent_state_c")
    )
    next_value = critic(lstm(features, tuple(states))[0]).view(*data.shape, 1)
    values = data["state_value"], next_value, after["reward"], after["done"], after["terminated"]
    _, target = generalized_advantage_estimate(0.99, 0.95, *values, time_dim=1)
    torch.testing.assert_close(rollout.storage["value_target"].transpose(0, 1), target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_recurrent_networks_start_from_the_stored_states():
    """Before the first update, a chunk gives the log-probabilities and values of the steps that were collected."""
    memory, body, actor, value = recurrent_parts()
    policy = TensorDictSequential(actor, value)
    env = TransformedEnv(SerialEnv(3, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)), InitTracker())
    env.append_transform(memory.make_tensordict_primer())
    rollout = RolloutBuffer(50, 3, batch_size=80, sequence_length=8, value_network=policy)
    collector = Collector(env, policy, frames_per_batch=150, total_frames=300, auto_register_policy_transforms=False)
    for number, data in enumerate(collector):
        rollout.extend(data)
        assert int(data["next", "done"].sum()) > 0
        assert_estimates_use_the_states_after_each_step(rollout, data, memory.lstm, body[0].module, value.module)
        followed = 0
        for batch in rollout:
            mask = batch["mask"]
            with set_recurrent_mode(True), torch.no_grad():
                belief = body(batch.copy())["belief"]
                log_prob = actor.get_dist(batch.copy()).log_prob(batch["action"])
            torch.testing.assert_close(value.module(belief)[mask], batch["state_value"][mask])
            torch.testing.assert_close(log_prob[mask], batch["action_log_prob"][mask])
            states = (
                batch[key][:, 0].transpose(0, 1).contiguous() for key in ("recurrent_state_h", "recurrent_state_c")
            )
            plain, _ = memory.lstm(batch["features"], tuple(states))  # no loop over the steps, and no resets
            torch.testing.assert_close(plain[mask], belief[mask])
            followed += int((batch["recurrent_state_h"][:, 0].abs().flatten(1).sum(1) > 0).sum())
        assert followed > 0, "no chunk began in the middle of an episode"
        assert rollout.value_rows > 0, number
    collector.shutdown()


def test_torchrls_loss_leaves_padding_out():
    _, body, actor, value = recurrent_parts()
    critic = TensorDictSequential(body, value)
    data = steps_of(2, 12, 0.4)
    data["observation"], data["action"] = torch.randn(2, 12, 4), torch.randint(2, (2, 12))
    data["action_log_prob"] = torch.randn(2, 12)
    for key in ("recurrent_state_h", "recurrent_state_c"):
        data[key] = torch.randn(2, 12, 1, 8)
    rollout = buffer(data, batch_size=400)
    loss_module = ClipPPOLoss(actor, critic)
    loss_module.loss_mask_key = "mask"
    losses = []
    for factor in (1.0, 100.0):
        batch = next(iter(buffer(data, batch_size=400)))
        assert not batch["mask"].all()
        for key in ("advantage", "value_target", "action_log_prob"):
            batch[key][~batch["mask"]] *= factor
        with set_recurrent_mode(True):
            losses.append(loss_module(batch).select("loss_objective", "loss_critic", "loss_entropy"))
    torch.testing.assert_close(losses[0].to_dict(), losses[1].to_dict())
    assert len(rollout) == 24


def test_a_sampler_of_ones_own_may_burn_in():
    data = steps_of(2, 12, 0.2)
    sampler = SequenceSampler(MinibatchSampler(), 3, burn_in=2, stride=3, output_layout="batch_time")
    rollout = buffer(data, sampler=sampler, sequence_length=None, epochs=None, batch_size=10)
    learned = torch.cat([batch["index"][batch["mask"] & ~batch["burn_in_mask"]] for batch in rollout])
    assert len(learned) == len(learned.unique(dim=0)) == 24


@pytest.mark.parametrize("lanes", [None, 2])
def test_a_new_rollout_does_not_continue_the_last_one(lanes):
    """Rows of the last rollout that are not replaced yet are no longer stored."""
    rollout = RolloutBuffer(6, lanes, batch_size=6, sequence_length=6, partial=True)
    for steps in (6, 4, 2, 5):
        data = steps_of(lanes or 1, steps, 0.0)
        rollout.extend(data if lanes else data[0])
        if steps == 4:
            sizes = torch.cat([batch["mask"].sum(1) for batch in rollout])
            assert sizes.tolist() == [4] * (lanes or 1)
    sizes = torch.cat([batch["mask"].sum(1) for batch in rollout])
    assert sizes.tolist() == [5] * (lanes or 1)
