"""RolloutBuffer: extend, iterate, done; in chunks for recurrent policies; with agents
that die and return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    GymEnv,
    InitTracker,
    RewardScaling,
    SelectTransform,
    SerialEnv,
    TransformedEnv,
)
from torchrl.modules import (
    LSTMModule,
    ProbabilisticActor,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import ClipPPOLoss

from rlbuf_td import PettingZooRecorder
from rlbuf_td.buffers.rollout import RolloutBuffer
from rlbuf_td.functional import generalized_advantage_estimate, normalize
from rlbuf_td.writers import RolloutWriter
from tests.catalogue import assert_same, make_world
from tests.multi_agent import Meadow, act


def filled(world, steps=8, data=None, **kwargs):
    data = world.steps(steps) if data is None else data
    kwargs = {
        "batch_size": 5,
        "gamma": 0.9,
        "lmbda": 0.8,
        "value_network": world.module(),
    } | kwargs
    rollout = RolloutBuffer(steps, world.lanes, **kwargs)
    rollout.extend(data.clone())
    return rollout, data


@pytest.mark.parametrize(("lanes", "drop_last"), [(None, True), (3, False)])
def test_iteration_gives_every_row_once_an_epoch_with_its_estimates(lanes, drop_last):
    world = make_world(lanes or 1)
    data = world.steps(9)
    settings = {
        "batch_size": 4,
        "epochs": 2,
        "drop_last": drop_last,
        "gamma": 0.9,
        "lmbda": 0.8,
    }
    rollout = RolloutBuffer(9, lanes, value_network=world.module(), **settings)
    rollout.extend(data.clone() if lanes else data[0].clone())
    advantage, target = world.estimates(data)
    for _ in range(2):
        seen = torch.zeros(9, lanes or 1, dtype=torch.int64)
        for batch in rollout:
            t, e = (
                batch["index"].unbind(-1)
                if lanes
                else (batch["index"], torch.zeros_like(batch["index"]))
            )
            torch.testing.assert_close(batch["observation"], data["observation"][e, t])
            torch.testing.assert_close(
                batch["next", "reward"], data["next", "reward"][e, t]
            )
            torch.testing.assert_close(batch["advantage"], advantage[e, t])
            torch.testing.assert_close(batch["value_target"], target[e, t])
            seen[t, e] += 1
        assert seen.sum() == 2 * (8 if drop_last else 27)
        assert (seen <= 2).all()


@pytest.mark.parametrize(
    ("batch_size", "transform", "scale"),
    [
        (5, False, None),
        (24, False, "minibatch"),
        (5, True, "minibatch"),
        (100, True, None),
    ],
)
def test_all_ways_to_draw_give_the_same_batches(batch_size, transform, scale):
    world = make_world(3)
    data = world.steps(8)
    batches = []
    for way in ("iterate", "sample", "general"):
        rollout, _ = filled(
            world, data=data, batch_size=batch_size, epochs=3, normalize_advantage=scale
        )
        rollout.set_rng(torch.Generator().manual_seed(5))
        if transform:  # which drops the index, too
            scaling = RewardScaling(1.0, 2.0, in_keys=[("next", "reward")])
            rollout.append_transform(
                Compose(
                    scaling,
                    SelectTransform("observation", "advantage", ("next", "reward")),
                )
            )
        if way == "general":
            rollout.parts = rollout.parts._replace(is_general=True)
        count = -(-24 // batch_size) * 3
        batches.append(
            list(rollout)
            if way == "iterate"
            else [rollout.sample() for _ in range(count)]
        )
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


def test_a_loop_left_early_starts_over_after_a_load():
    rollout, _ = filled(make_world(3), epochs=2)
    for _ in rollout:
        break
    other, _ = filled(make_world(3), epochs=2)
    other.load_state_dict(rollout.state_dict())
    assert sum(len(batch) for batch in other) == 48


def test_a_loop_whose_state_was_saved_goes_on_after_a_load():
    rollout, other = (
        filled(make_world(3), epochs=2, generator=torch.Generator().manual_seed(seed))[
            0
        ]
        for seed in (1, 2)
    )
    seen = []
    for number, batch in enumerate(rollout):
        if number == 2:
            other.load_state_dict(rollout.state_dict())
        if number > 2:
            seen.append(batch)
    rest = [*other]
    assert sum(len(batch) for batch in rest) == 48 - 3 * 5
    for batch, expected in zip(rest, seen, strict=True):
        assert torch.equal(batch["index"], expected["index"])
    assert sum(len(batch) for batch in other) == 48


def test_sampling_within_a_loop_takes_its_turn():
    """The sampler knows one order: whoever draws takes the next rows, and no row comes
    twice."""
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
    with pytest.raises(  # noqa: PT012
        RuntimeError, match="the rollout is not complete: 1 of 8 steps are written"
    ):
        for _ in rollout:
            rollout.add(world.steps(1)[:, 0])
    new = world.steps(8)
    rollout.empty()
    rollout.extend(world.steps(8))
    iterator = iter(rollout)
    next(iterator)
    rollout.extend(new.clone())
    rows = torch.cat([batch["observation"] for batch in iterator])
    assert {tuple(x) for x in rows.tolist()} == {
        tuple(x) for x in new["observation"].reshape(-1, 2).tolist()
    }


def test_every_batch_of_an_incomplete_rollout_is_estimated_or_refused():
    world = make_world()
    for partial in (False, True):
        rollout, data = filled(world, partial=partial)
        rollout.sample()  # the next batches are drawn by compiled code
        rollout.extend(data[:, :2].clone())
        if partial:
            assert rollout.sample()["advantage"].isfinite().all()
        else:
            with pytest.raises(
                RuntimeError, match="the rollout is not complete: 2 of 8 steps"
            ):
                rollout.sample()


def test_the_summary_is_a_flat_dict_of_floats_computed_once_a_rollout(monkeypatch):
    world = make_world(3)
    rollout, data = filled(world)
    advantage, target = world.estimates(data)
    summary = rollout.summary()
    value = world.value(data["observation"])
    expected: dict[str, Any] = {
        "advantage_mean": advantage.mean(),
        "advantage_std": advantage.std(correction=0),
        "value_target_mean": target.mean(),
        "value_target_std": target.std(correction=0),
        "explained_variance": 1
        - (target - value).var(correction=0) / target.var(correction=0),
        "value_rows": world.rows_to_ask(data),
    }
    assert summary == pytest.approx(
        {k: float(v) for k, v in expected.items()}, rel=1e-4, abs=1e-5
    )
    assert all(type(x) is float for x in summary.values())
    with monkeypatch.context() as patched:
        patched.setattr("rlbuf_td.buffers.rollout.explained_variance", None)
        summary["advantage_mean"] = 0.0  # the caller's own copy
        assert rollout.summary()["advantage_mean"] != 0
    saved, before = rollout.state_dict(), rollout.summary()
    rollout.extend(world.steps(8))
    assert rollout.summary() != before
    rollout.load_state_dict(saved)
    assert rollout.summary() == before


Chunk = tuple[int, int, int]  # first step, lane, number of steps


def steps_of(
    lanes: int, steps: int, often: float, first: Tensor | None = None
) -> TensorDict:
    """Return random steps ``[E, n]``, all of whose numbers are unique."""
    lead = lanes, steps
    terminated, truncated = (torch.rand(*lead, 1) < often / 2 for _ in range(2))
    done = terminated | truncated
    first = torch.ones(lanes, 1, dtype=torch.bool) if first is None else first
    after = {
        "reward": torch.randn(*lead, 1),
        "done": done,
        "terminated": terminated,
        "truncated": truncated,
    }
    data = {
        "x": torch.rand(*lead),
        "hidden": torch.randn(*lead, 2, 3),
        "state_value": torch.randn(*lead, 1),
    }
    data["is_init"] = torch.cat([first[:, None], done[:, :-1]], 1)
    return TensorDict(
        data | {"next": after | {"state_value": torch.randn(*lead, 1)}}, lead
    )


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


def check_batch(
    batch: TensorDict, data: TensorDict, rollout: RolloutBuffer, length: int
) -> list[Chunk]:
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
        for key in (
            "x",
            "hidden",
            "state_value",
            ("next", "reward"),
            ("next", "done"),
            ("next", "terminated"),
        ):
            assert torch.equal(chunk[key], rows[key]), key
        for key in ("advantage", "value_target"):
            assert torch.equal(chunk[key], rollout.storage[key][cells]), key
        assert torch.equal(chunk["is_init"][1:], rows["is_init"][1:])
        assert chunk["is_init"][0].all()
        assert chunk["collector", "slice_end"].flatten().nonzero().tolist() == [
            [size - 1]
        ]
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
    seed=st.integers(0, 999),
)
def test_an_epoch_has_every_row_once(
    steps, lanes, often, parts, length, size, drop_last, seed
):
    torch.manual_seed(seed)
    length = min(length, steps)
    settings: Any = {
        "batch_size": size * length,
        "epochs": 2,
        "drop_last": drop_last,
        "partial": True,
    }
    rollout = RolloutBuffer(steps, lanes, sequence_length=length, **settings)
    data: Any = None
    for part in parts:
        # then a new rollout begins
        data = None if data is None or data.shape[1] == steps else data
        known = 0 if data is None else data.shape[1]
        first = None if data is None else data["next", "done"][:, -1]
        written = steps_of(lanes or 1, min(part, steps - known), often, first)
        data = written if data is None else torch.cat([data, written], 1)
        rollout.extend(written if lanes else written[0])
        wanted = chunks_of(data["next", "done"][..., 0], length)
        if drop_last and len(wanted) < size:
            with pytest.raises(
                ValueError, match=r"drop_last leaves no batch: \d+ windows are fewer"
            ):
                next(iter(rollout))
            continue
        batches = [check_batch(batch, data, rollout, length) for batch in rollout]
        epoch = len(wanted) // size if drop_last else -(-len(wanted) // size)
        assert len(batches) == 2 * epoch
        for drawn in (batches[:epoch], batches[epoch:]):
            found = [chunk for batch in drawn for chunk in batch]
            assert (
                len({*found})
                == len(found)
                == (epoch * size if drop_last else len(wanted))
            )
            assert {*found} <= {*wanted}


def buffer(data: TensorDict, **kwargs: Any) -> RolloutBuffer:
    default: dict[str, Any] = {
        "batch_size": 12,
        "sequence_length": 4,
        "generator": torch.Generator(),
        "epochs": 2,
    }
    rollout = RolloutBuffer(data.shape[1], data.shape[0], **default | kwargs)
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
        torch.testing.assert_close(
            other["advantage"][mask], normalize(one["advantage"][mask])
        )
    assert padded > 0


def recurrent_parts() -> tuple[Any, Any, Any, Any]:
    """Return an LSTM, a module that runs it, an actor on top of that module, and a
    critic that reads its output."""
    embed = TensorDictModule(torch.nn.Linear(4, 8), ["observation"], ["features"])
    memory = LSTMModule(
        input_size=8, hidden_size=8, in_key="features", out_key="belief"
    )
    logits = TensorDictModule(torch.nn.Linear(8, 2), ["belief"], ["logits"])
    body = TensorDictSequential(embed, memory)
    distribution = {
        "distribution_class": torch.distributions.Categorical,
        "return_log_prob": True,
    }
    actor = ProbabilisticActor(
        TensorDictSequential(body, logits), in_keys=["logits"], **distribution
    )
    return memory, body, actor, ValueOperator(torch.nn.Linear(8, 1), ["belief"])


@torch.no_grad()
def assert_estimates_use_the_states_after_each_step(
    rollout: RolloutBuffer, data: TensorDict, lstm: Any, embed: Any, critic: Any
) -> None:
    after, features = (
        data["next"],
        embed(data["next", "observation"]).flatten(0, 1).unsqueeze(1),
    )
    states = (
        after[key].flatten(0, 1).transpose(0, 1).contiguous()
        for key in ("recurrent_state_h", "recurrent_state_c")
    )
    next_value = critic(lstm(features, tuple(states))[0]).view(*data.shape, 1)
    values = (
        data["state_value"],
        next_value,
        after["reward"],
        after["done"],
        after["terminated"],
    )
    _, target = generalized_advantage_estimate(0.99, 0.95, *values, time_dim=1)
    torch.testing.assert_close(rollout.storage["value_target"].transpose(0, 1), target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_recurrent_networks_start_from_the_stored_states():
    """Before the first update, a chunk gives the log-probabilities and values of the
    steps that were collected."""
    memory, body, actor, value = recurrent_parts()
    policy = TensorDictSequential(actor, value)
    env = TransformedEnv(
        SerialEnv(3, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)),
        InitTracker(),
    )
    env.append_transform(memory.make_tensordict_primer())
    rollout = RolloutBuffer(
        50, 3, batch_size=80, sequence_length=8, value_network=policy
    )
    collector = Collector(
        env,
        policy,
        frames_per_batch=150,
        total_frames=300,
        auto_register_policy_transforms=False,
    )
    for number, data in enumerate(collector):
        rollout.extend(data)
        assert int(data["next", "done"].sum()) > 0
        assert_estimates_use_the_states_after_each_step(
            rollout, data, memory.lstm, body[0].module, value.module
        )
        followed = 0
        for batch in rollout:
            mask = batch["mask"]
            with set_recurrent_mode(True), torch.no_grad():
                belief = body(batch.copy())["belief"]
                log_prob = actor.get_dist(batch.copy()).log_prob(batch["action"])
            torch.testing.assert_close(
                value.module(belief)[mask], batch["state_value"][mask]
            )
            torch.testing.assert_close(log_prob[mask], batch["action_log_prob"][mask])
            states = (
                batch[key][:, 0].transpose(0, 1).contiguous()
                for key in ("recurrent_state_h", "recurrent_state_c")
            )
            # no loop over the steps, and no resets
            plain, _ = memory.lstm(batch["features"], tuple(states))
            torch.testing.assert_close(plain[mask], belief[mask])
            followed += int(
                (batch["recurrent_state_h"][:, 0].abs().flatten(1).sum(1) > 0).sum()
            )
        assert followed > 0, "no chunk began in the middle of an episode"
        assert rollout.value_rows > 0, number
    collector.shutdown()


def test_torchrls_loss_leaves_padding_out():
    _, body, actor, value = recurrent_parts()
    critic = TensorDictSequential(body, value)
    data = steps_of(2, 12, 0.4)
    data["observation"], data["action"] = (
        torch.randn(2, 12, 4),
        torch.randint(2, (2, 12)),
    )
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
            losses.append(
                loss_module(batch).select(
                    "loss_objective", "loss_critic", "loss_entropy"
                )
            )
    torch.testing.assert_close(losses[0].to_dict(), losses[1].to_dict())
    assert len(rollout) == 24


pytest.importorskip("pettingzoo")


GAMMA, LMBDA, LENGTH, ENVS, GROUP = 0.9, 0.8, 48, 2, "wolf"
AGENTS: dict[str, Any] = {
    "gamma": GAMMA,
    "lmbda": LMBDA,
    "group": GROUP,
    "batch_size": 16,
}


def value_of(observation: torch.Tensor) -> torch.Tensor:
    return (observation * torch.tensor([0.3, -0.7]).to(observation)).sum(
        -1, keepdim=True
    )


def recorded(
    lanes: int = ENVS, *, stored: bool = True, **settings: Any
) -> tuple[RolloutBuffer, list[Meadow]]:
    """Return a rollout of random steps; with ``stored``, the values of the agents are
    stored with each step."""
    critic = TensorDictModule(
        value_of, [(GROUP, "observation")], [(GROUP, "state_value")]
    )
    envs = [Meadow(9 + e) for e in range(max(1, lanes))]
    settings = AGENTS | {"value_network": critic} | settings
    rollout = RolloutBuffer.from_env(envs if lanes else envs[0], LENGTH, **settings)
    recorder = PettingZooRecorder(rollout, envs if lanes else envs[0])
    for single in envs:
        for number, agent in enumerate(single.possible_agents):
            single.action_space(agent).seed(number)
    observed: list[Any] = (
        [result[0] for result in [recorder.reset(seed=4)][0]]
        if lanes
        else [recorder.reset(seed=4)[0]]
    )
    for _ in range(LENGTH):
        for e, env in enumerate(envs):
            if not env.agents:
                again = recorder.reset(
                    lanes=[e == each for each in range(lanes)] if lanes else None
                )
                observed[e] = again[e][0] if lanes else again[0]
        values = np.zeros((len(envs), 3, 1), np.float32)
        for e, seen in enumerate(observed):
            for i in range(3):
                if f"{GROUP}_{i}" in envs[e].agents:
                    values[e, i] = value_of(
                        torch.from_numpy(seen[f"{GROUP}_{i}"])
                    ).item()
        extras = (
            {GROUP: {"state_value": values if lanes else values[0]}} if stored else {}
        )
        actions = [act(env) for env in envs]
        results: Any = recorder.step(actions if lanes else actions[0], **extras)
        observed = [result[0] for result in results] if lanes else [results[0]]
    return rollout, envs


def by_history(envs: list[Meadow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and value targets of the wolves, from the environments' own
    histories."""
    advantage, target = torch.zeros(2, LENGTH, len(envs), 3, 1, dtype=torch.float64)
    for e, env in enumerate(envs):
        for i in range(3):
            agent, carried, later = f"{GROUP}_{i}", 0.0, None
            for t in reversed(range(LENGTH)):
                (
                    episode,
                    acted,
                    before,
                    _,
                    (seen, rewards, terminated, truncated, _),
                    _,
                ) = env.history[t]
                if agent not in acted:
                    carried, later = 0.0, None
                    continue
                goes_on = (
                    not (terminated[agent] or truncated[agent]) and later == episode
                )
                value = value_of(torch.from_numpy(before[agent])).item()
                following = (
                    0.0
                    if terminated[agent]
                    else value_of(torch.from_numpy(seen[agent])).item()
                )
                delta = float(np.float32(rewards[agent])) + GAMMA * following - value
                carried = delta + GAMMA * LMBDA * carried * goes_on
                advantage[t, e, i], target[t, e, i], later = (
                    carried,
                    carried + value,
                    episode,
                )
    return advantage, target


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("lanes", [0, ENVS])
def test_advantages_of_agents_end_where_the_agent_dies(lanes, stored):
    rollout, envs = recorded(lanes, stored=stored)
    rows, (advantage, target) = rollout.storage[:].reshape(LENGTH, -1), by_history(envs)
    acts = rows[GROUP, "mask"]
    assert 0.3 < acts.float().mean() < 0.9
    torch.testing.assert_close(
        rows[GROUP, "advantage"].double(), advantage, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        rows[GROUP, "value_target"].double(), target, rtol=1e-5, atol=1e-5
    )
    assert not rows[GROUP, "advantage"][~acts].any()
    summary = rollout.summary()
    assert summary["advantage_mean"] == pytest.approx(
        advantage[acts].mean().item(), rel=1e-4
    )
    assert summary["value_target_std"] == pytest.approx(
        target[acts].std(correction=0).item(), rel=1e-4
    )


@pytest.mark.parametrize("beside", [(), (GROUP,)], ids=["of the step", "of agents"])
def test_an_estimator_of_ones_own_gets_the_flags_of_agents(beside):
    def estimator(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        names = ("state_value", "reward", "done", "terminated")
        keys: list[Any] = [
            (GROUP, names[0]),
            ("next", GROUP, names[0]),
            ("next", GROUP, names[1]),
        ]
        flags = [data[("next", *beside, name)] for name in names[2:]]
        return generalized_advantage_estimate(
            GAMMA, LMBDA, *(data[key] for key in keys), *flags, time_dim=1
        )

    critic = TensorDictModule(
        value_of, [(GROUP, "observation")], [(GROUP, "state_value")]
    )
    expected, _ = recorded(stored=False)
    rollout = RolloutBuffer(
        LENGTH, ENVS, estimator=estimator, value_network=critic, group=GROUP
    )
    rows = expected.storage[:].exclude(
        (GROUP, "advantage"), (GROUP, "value_target"), (GROUP, "state_value")
    )
    rollout.extend(rows.transpose(0, 1))
    for key in ((GROUP, "advantage"), (GROUP, "value_target")):
        torch.testing.assert_close(rollout.storage[key], expected.storage[key])


@pytest.mark.parametrize("how", ["rollout", "minibatch"])
def test_absent_agents_do_not_count_for_normalization(how):
    rollout, envs = recorded(normalize_advantage=how)
    advantage, _ = by_history(envs)
    if how == "rollout":
        rows = rollout.storage[:]
        acts, found = rows[GROUP, "mask"], rows[GROUP, "advantage"]
        expected = advantage[acts]
        expected = (expected - expected.mean()) / expected.std(correction=0)
        torch.testing.assert_close(found[acts].double(), expected, rtol=1e-4, atol=1e-5)
        assert not found[~acts].any()
        return
    for batch in rollout:
        acts, found = batch[GROUP, "mask"], batch[GROUP, "advantage"].double()
        assert found[acts].mean().item() == pytest.approx(0, abs=1e-5)
        assert found[acts].std(correction=0).item() == pytest.approx(1, rel=1e-4)
        assert not found[~acts].any()


def test_a_group_names_the_entries_of_its_agents_unless_they_are_given():
    writer = RolloutWriter(group=("teams", "red"), value_target_key="target")
    assert writer.estimator.reward_key == ("next", "teams", "red", "reward")
    assert writer.estimator.group == ("teams", "red")
    assert (
        writer.value_key
        == writer.estimator.value_key
        == ("teams", "red", "state_value")
    )
    assert (writer.advantage_key, writer.value_target_key) == (
        ("teams", "red", "advantage"),
        "target",
    )
