"""Sequences: the law of strict windows, batches [B, L], chunks of an epoch, and
TorchRL's recurrent modules.

What windows hold, and whose priorities their errors set, is in ``test_composition.py``
and ``test_lockstep.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer
from torchrl.modules import GRUModule, set_recurrent_mode

from rlbuf_td import (
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.storages.tensordict_fast import folded
from tests.backends import forced
from tests.catalogue import SCHEMAS, assert_same, buffer_of, numbered_rows, transitions
from tests.model import Model, Recipe, Row, World, importance
from tests.statistics import assert_follows
from tests.test_composition import BUFFERS, counts_of, wrapped

# -- strict windows


def world(sampler, cls=ReplayBuffer, steps: int = 20, **options) -> World:
    return World.of(sampler, steps, 2, 1.7, buffer=cls, **options)


def of_episodes(world: World, row: Row) -> tuple[int, int]:
    return world.model.reach(row)[:2]


def of_lanes(world: World, row: Row) -> tuple[int, int]:
    rows = [*world.model.rows_of[row.lane]]
    return rows.index(row), len(rows) - 1 - rows.index(row)


STRICT = Recipe(sequence=True, boundary="strict")


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize("reach", [of_episodes, of_lanes])
@pytest.mark.parametrize(
    "make",
    [
        UniformSampler,
        partial(ProportionalSampler, 120, 1.0),
        partial(RankSampler, 120, 1.0, stratified=False),
    ],
)
def test_strict_windows_are_whole_and_their_anchors_follow_the_law(make, reach):
    inner, recipe = make(), replace(STRICT, across=reach is of_lanes)
    made = world(wrapped(inner, recipe), steps=60, often=(0.04, 0.03, 0.02))
    every = torch.arange(120)
    if make is not UniformSampler:
        made.rb.update_priority(every, 0.5 + every * 7 % 120 / 120)
    made.check_batch(made.rb.sample(60), recipe)
    law = inner.probability(every, storage=made.rb.storage).numpy()
    around = np.array([reach(made, row) for row in made.model.rows()])
    has_window = (around >= (recipe.burn_in, recipe.length - 1)).all(1)
    assert has_window.mean() > 0.2
    law = np.where(has_window, law, 0)
    assert_follows(counts_of(made, recipe, 20_000), law / law.sum())


@pytest.mark.parametrize("norm", ["buffer", "batch"])
@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (ReplayBuffer, ProportionalSampler),
        (ReplayBuffer, RankSampler),
        (TensorDictReplayBuffer, ProportionalSampler),
    ],
)
def test_strict_windows_carry_the_weights_of_their_own_anchors(cls, kind, norm):
    inner = kind(120, 0.8, 0.5, weight_norm=norm)
    made = world(wrapped(inner, STRICT), cls, steps=60, often=(0.05, 0.0, 0.0))
    rows = torch.arange(120)
    inner.update_priority(rows, 0.1 + rows / 50, storage=made.rb.storage)
    for _ in range(3):
        batch = made.rb.sample(60)
    drawn = batch["anchor_index"] @ torch.tensor([2, 1])
    law = inner.probability(rows).tolist()
    weight = torch.tensor(importance(law, drawn.tolist(), 0.5, norm))
    torch.testing.assert_close(batch["priority_weight"], weight)


def test_strict_windows_at_the_end_of_an_epoch_are_whole():
    made = world(
        SequenceSampler(MinibatchSampler(), 3, boundary="strict"),
        steps=25,
        often=(0.2, 0.0, 0.0),
    )
    batches = [made.rb.sample(3 * 7) for _ in range(20)]
    assert all(len(batch) % 3 == 0 and batch["mask"].all() for batch in batches)


# -- recurrent networks


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torchrls_recurrent_modules_take_each_real_window_for_itself(cls):
    """The flat batch in recurrent mode gives what stepping through each window from its
    stored state gives."""
    keys = {"in_keys": ["observation", "hx"], "out_keys": ["out", ("next", "hx")]}
    net = GRUModule(input_size=2, hidden_size=4, **keys)
    rows = numbered_rows(30)
    rows["observation"], rows["hx"] = torch.randn(30, 2), torch.randn(30, 1, 4)
    rows["is_init"] = rows["next", "done"].roll(1, 0)
    sampler = SequenceSampler(UniformSampler(), 3, burn_in=2)
    batch = buffer_of(30, sampler, cls=cls, rows=rows).sample(100)
    with set_recurrent_mode(True), torch.no_grad():
        outputs = net(batch.clone())["out"].view(20, 5, 4)
    for window, output in zip(batch.view(20, 5), outputs, strict=True):
        real = window["mask"].nonzero().flatten().tolist()
        hidden = window["hx"][real[0]].unsqueeze(1)
        for j in real:
            observation = window["observation"][j].view(1, 1, 2)
            with torch.no_grad():
                wanted, hidden = net.gru(observation, hidden)
            torch.testing.assert_close(output[j], wanted.flatten())


def test_windows_across_episodes_get_is_init_if_the_rows_have_none():
    sampler = SequenceSampler(
        UniformSampler(), 4, across_episodes=True, output_layout="batch_time"
    )
    rb = ReplayBuffer(storage=PackedStorage(20), sampler=sampler, batch_size=80)
    x = torch.arange(20)
    rb.extend(TensorDict({"x": x, "next": {"done": x % 7 == 6}}, [20]))
    for _ in range(2):
        batch = rb.sample()
        begins = batch["mask"] & (batch["x"] % 7 == 0)
        begins[:, 0] = True
        assert torch.equal(batch["is_init"][..., 0], begins)


# -- batches [B, L]

STEPS = 40
FLAGS = ("next", "done"), ("next", "truncated")


def steps(lanes: int) -> TensorDict:
    rows = numbered_rows(STEPS, lanes=lanes if lanes > 1 else 0)
    return rows.update(
        {"value": torch.rand(*rows.shape, 3), "is_init": rows["x"] % 7 == 0}
    )


def of_steps(cls, lanes: int, sampler=None, **layout):
    torch.manual_seed(0)
    sequences = SequenceSampler(sampler or UniformSampler(), 3, burn_in=1, **layout)
    rb = cls(
        storage=PackedStorage(STEPS * lanes, ndim=1 + (lanes > 1)),
        sampler=sequences,
        batch_size=24,
    )
    rb.extend(steps(lanes))
    return rb


@pytest.mark.parametrize(
    ("cls", "lanes", "boundary"),
    [
        (ReplayBuffer, 1, "pad"),
        (ReplayBuffer, 2, "strict"),
        (TensorDictReplayBuffer, 1, "shift"),
    ],
)
def test_batches_have_the_windows_of_flat_batches(cls, lanes, boundary, device):
    flat, other = (
        of_steps(cls, lanes, boundary=boundary, output_layout=name)
        for name in ("flat", "batch_time")
    )
    for _ in range(3):
        torch.manual_seed(5)
        one, flat_info = flat.sample(return_info=True)
        torch.manual_seed(5)
        batch, info = other.sample(return_info=True)
        assert batch.shape == (6, 4)
        names = {*one.keys(True, True)}
        assert {*batch.keys(True, True)} == names | {("collector", "slice_end")}
        for key in names - {*FLAGS}:
            assert torch.equal(batch[key].reshape(one[key].shape), one[key]), key
        cells = batch["index"].unbind(-1) if lanes > 1 else [batch["index"].view(6, 4)]
        for key in FLAGS:
            assert torch.equal(batch[key], other.storage[key][tuple(cells)])
        mask = info["mask"]
        is_last = mask & ~torch.nn.functional.pad(mask, (0, 1))[:, 1:]
        assert torch.equal(batch["mask"], mask)
        assert torch.equal(batch["collector", "slice_end"][..., 0], is_last)
        shaped, flat_cells = (
            found["index"][0] if lanes > 1 else found["index"]
            for found in (info, flat_info)
        )
        assert torch.equal(shaped.flatten(), flat_cells.flatten())
        assert batch.names == [None, "time"] or cls is TensorDictReplayBuffer


ERRORS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda error: error,
    torch.Tensor.double,
    torch.Tensor.half,
    lambda error: error[..., None],
    lambda error: torch.stack((error, 2 * error), -1),
    lambda error: torch.stack((error, error), -1)[..., 0],
    lambda error: error.clone().requires_grad_(),
]


@pytest.mark.parametrize(
    "options", [{}, {"priority": "mix", "eta": 0.3}, {"boundary": "shift"}], ids=str
)
@pytest.mark.parametrize("lanes", [1, 2])
def test_priorities_are_those_of_the_torch_form_for_errors_of_any_kind(lanes, options):
    def updated(backend: Any, layout: str) -> tuple[torch.Tensor, float]:
        inner = ProportionalSampler(STEPS * lanes)
        with forced(backend):
            rb = of_steps(ReplayBuffer, lanes, inner, output_layout=layout, **options)
            for turn, kind in enumerate(ERRORS * 2):
                torch.manual_seed(turn)
                batch = rb.sample()
                batch["td_error"] = kind(torch.sin(9 * batch["value"].sum(-1)))
                rb.extend(steps(lanes)[..., : 1 + turn % 5])
                has_stamps = turn < len(ERRORS)
                rb.update_tensordict_priority(
                    batch if has_stamps else batch.exclude("sampled_at")
                )
            every = torch.arange(STEPS * lanes)
            return inner.priority(every), rb.health()["stale_updates"]

    expected, stale = updated("torch", "flat")
    assert stale > 0
    for layout in ("flat", "batch_time"):
        priority, count = updated("numba", layout)
        assert torch.equal(priority, expected)
        assert count == stale


def test_priorities_of_windows_of_an_empty_storage_are_refused_or_skipped():
    rb = of_steps(ReplayBuffer, 1, ProportionalSampler(STEPS))
    rb.empty()
    index = torch.arange(rb.sampler.window)
    ones = torch.ones(len(index))
    rb.sampler.update_priority(
        index.new_full(index.shape, -1), ones, storage=rb.storage
    )
    with pytest.raises(IndexError, match="0 rows"):
        rb.sampler.update_priority(index, ones, storage=rb.storage)


def test_states_are_written_back_from_windows():
    options = {"time_dim_name": None, "slice_end_key": "last"}
    rb = of_steps(ReplayBuffer, 1, output_layout="batch_time", **options)
    batch = rb.sample()
    stamps = rb.storage.stamps(batch["index"].flatten(0, 1)).view(batch.batch_size)
    batch["value"] += 10
    assert 0 < rb.write_back(batch, ["value"], sampled_at=stamps) <= 24
    written = (rb.storage["value"] >= 10).all(1).nonzero().flatten()
    assert torch.equal(written, batch["index"][batch["mask"]].unique())
    assert (batch["last"].shape, batch.names) == ((6, 4, 1), [None, None])
    assert rb.stats()["samples_returned"] == 24


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
def test_rows_of_any_kind_are_folded_as_torch_reshapes_them(schema):
    rows = transitions(schema, 12)
    for count in (12, 0):
        found, wanted = (
            folded(rows[:count], 3, "time"),
            rows[:count].reshape(count // 3, 3, *schema.element),
        )
        assert_same(found, wanted)
        assert found.names == [None, "time", *[None] * len(schema.element)]


# -- chunks: each window of divided trajectories once per epoch


class Divided(SequenceSampler):
    """A subclass that changes nothing."""


def chunks(recipe: Recipe, stride: int, **epochs) -> SequenceSampler:
    inner = wrapped(MinibatchSampler(**epochs), replace(recipe, sequence=False))
    return Divided(
        inner,
        recipe.length,
        burn_in=recipe.burn_in,
        stride=stride,
        across_episodes=recipe.across,
    )


def anchors_of(world: World, stride: int, across: bool) -> list[Row]:
    """Return, from the definition, each ``stride``-th row of each trajectory, or of
    each lane."""
    reach = of_lanes if across else of_episodes
    return [row for row in world.model.rows() if reach(world, row)[0] % stride == 0]


def check_epoch(
    world: World, recipe: Recipe, stride: int, size: int, drop_last: bool, shuffle: bool
) -> None:
    wanted, drawn = anchors_of(world, stride, recipe.across), cast("list[Row]", [])
    learned: Counter[Row] = Counter()
    full, rest = divmod(len(wanted), size)
    for number, batch in enumerate(world.rb):
        anchors = world.check_batch(batch, recipe)
        assert len(anchors) == (size if number < full else rest)
        drawn += anchors
        learned.update(
            world.rows_at(batch[batch["mask"] & ~batch["burn_in_mask"]]["index"])
        )
    assert len(drawn) == (full * size if drop_last else len(wanted))
    assert len({*drawn}) == len(drawn)
    assert {*drawn} <= {*wanted}
    assert shuffle or drawn == wanted[: len(drawn)]
    if stride == recipe.length:
        assert set(learned.values()) <= {1}
        assert drop_last or {*learned} == {*world.model.rows()}


@pytest.mark.slow
@given(
    buffer=st.sampled_from(["ours", *BUFFERS]),
    often=st.sampled_from(
        [(0.0, 0.0, 0.0), (0.1, 0.05, 0.05), (0.5, 0.2, 0.2), (1.0, 0.0, 0.0)]
    ),
    steps=st.integers(1, 12),
    lanes=st.sampled_from([1, 2, 3]),
    writes=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    apart=st.booleans(),
    length=st.integers(1, 6),
    less=st.sampled_from([0, 0, 0, 1, 3]),
    burn_in=st.sampled_from([0, 0, 1, 3]),
    inner=st.sampled_from(["plain", "across", "n_step", "hindsight"]),
    size=st.integers(1, 7),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 999),
)
def test_an_epoch_has_every_window_once(
    buffer,
    often,
    steps,
    lanes,
    writes,
    apart,
    length,
    less,
    burn_in,
    inner,
    size,
    drop_last,
    shuffle,
    seed,
):
    within = {name: inner == name for name in ("n_step", "hindsight", "across")}
    recipe, stride = (
        Recipe(sequence=True, length=length, burn_in=burn_in, **within),
        max(1, length - less),
    )
    cls, storage, writer = BUFFERS[buffer]
    apart = apart and buffer == "ours" and lanes > 1
    given: dict[str, Any] = {"ndim": 2 if lanes > 1 else 1} | (
        {"lanes": lanes} if apart else {}
    )
    sampler = chunks(recipe, stride, shuffle=shuffle, drop_last=drop_last)
    rb = cls(
        storage=storage(steps * lanes, **given),
        sampler=sampler,
        writer=writer(),
        batch_size=size * recipe.window,
    )
    world = World(rb, Model(steps, lanes if lanes > 1 else 0), seed, often)
    for count in writes:
        world.append(
            [world.rng.randrange(lanes) for _ in range(count)]
        ) if apart else world.extend(count)
        if drop_last and len(anchors_of(world, stride, recipe.across)) < size:
            assert not rb.can_sample(size * recipe.window)
            with pytest.raises(
                ValueError,
                match=f"drop_last leaves no batch: .* are fewer than .* size {size}",
            ):
                rb.sample()
            continue
        assert rb.can_sample(size * recipe.window)
        for _ in range(2):
            check_epoch(world, recipe, stride, size, drop_last, shuffle or apart)


@pytest.mark.usefixtures("boundaries")
def test_large_rings_are_divided_alike_on_every_device():
    recipe = Recipe(sequence=True, length=7, burn_in=0)
    world = World.of(
        chunks(recipe, 7), 150, 3, 2.3, batch_size=70, often=(0.03, 0.01, 0.01)
    )
    check_epoch(world, recipe, 7, 10, False, True)


def of_chunks(**parts):
    sampler = SequenceSampler(MinibatchSampler(3), 3, stride=3)
    rows = numbered_rows(10, lanes=2, every=4)
    return buffer_of(10, sampler, 2, rows=rows, batch_size=6, **parts)


def test_writes_and_edits_of_done_flags_begin_new_epochs():
    rb = of_chunks()
    changes: list[Callable[[], Any]] = [
        lambda: rb.extend(numbered_rows(10, lanes=2, every=4)),
        lambda: rb.extend(numbered_rows(2, lanes=2, every=4)),
        lambda: rb.set_at_(("next", "done"), True, (4, 0)),
        lambda: rb.storage.set(
            range(10), numbered_rows(10, lanes=2, every=5).transpose(0, 1).contiguous()
        ),
    ]
    for change in changes:
        rb.sample()
        change()
        epoch = [rb.sample() for _ in range(4)]
        found = torch.cat([batch["index"][batch["mask"]] for batch in epoch])[: len(rb)]
        assert len(found.unique(dim=0)) == len(found)
    rb.sample()
    position = rb.sampler.innermost.position
    rb.set_at_("x", 7, (4, 0))  # the same trajectories
    rb.sample()
    assert rb.sampler.innermost.position == position + 2


def test_errors_of_the_burn_in_do_not_count_in_an_update_by_index():
    sampler = SequenceSampler(ProportionalSampler(20), 2, burn_in=2)
    rb = ReplayBuffer(storage=PackedStorage(20), sampler=sampler)
    rb.extend(TensorDict({"next": {"done": torch.zeros(12, 1).bool()}}, [12]))
    errors = torch.tensor([9.0, 9.0, 1.0, 2.0])
    # as TorchRL's buffers call it
    sampler.update_priority(torch.arange(4, 8), errors, storage=rb.storage)
    assert sampler.innermost.priority(torch.tensor([6])).item() == 2


def test_a_load_goes_on_in_its_epoch_whatever_was_divided_before():
    made = [
        buffer_of(
            20,
            SequenceSampler(MinibatchSampler(), 3, stride=3),
            rows=numbered_rows(20, every=every),
            batch_size=6,
        )
        for every in (5, 7)
    ]
    for rb in made:
        rb.sample()
    one, other = made
    other.load_state_dict(one.state_dict())
    for _ in range(2):
        assert_same(one.sample().exclude("index"), other.sample().exclude("index"))
    assert one.sampler.innermost.position == other.sampler.innermost.position > 0
