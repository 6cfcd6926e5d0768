"""The uniform sampler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rlbuf_td import NStepSampler, PackedStorage, ReplayBuffer, SequenceSampler, UniformSampler
from tests.backends import forced
from tests.catalogue import assert_same
from tests.statistics import assert_follows, power


def filled(rows: int, capacity: int, *, lanes: int = 0) -> PackedStorage:
    storage = PackedStorage(capacity * max(lanes, 1), ndim=2 if lanes else 1)
    shape = [rows, lanes] if lanes else [rows]
    storage.set(range(rows), TensorDict({"x": torch.zeros(shape)}, shape))
    return storage


@pytest.mark.parametrize(("unique", "rows", "batch"), [(False, 50, 1000), (True, 50, 10), (True, 50, 25), (True, 5, 5)])
def test_every_written_row_is_as_likely_as_every_other(unique, rows, batch):
    storage, sampler = filled(rows, 300), UniformSampler(unique=unique)
    sampler._rng = torch.Generator().manual_seed(0)
    counts = torch.zeros(rows)
    draws = 200_000
    for _ in range(draws // batch):
        counts += torch.bincount(sampler.draw(storage, batch)[0], minlength=rows)
    assert power(torch.full((rows,), 1 / rows).numpy(), draws, bias=0.05) > 0.99
    assert_follows(counts, torch.full((rows,), 1 / rows, dtype=torch.float64))


@pytest.mark.parametrize("path", ["numba", "torch"])
@pytest.mark.parametrize("batch", [2, 3])
def test_a_unique_batch_takes_every_ordered_selection_equally_often(batch, path):
    storage, sampler = filled(8 * batch + 1, 100), UniformSampler(unique=True)
    sampler._rng = torch.Generator().manual_seed(1)
    first_two: dict[tuple[int, int], int] = {}
    for _ in range(10_000):
        with forced(path):
            drawn = sampler.draw(storage, batch)[0].tolist()
        pair = (drawn[0] % 4, drawn[1] % 4)
        first_two[pair] = first_two.get(pair, 0) + 1
    n = 8 * batch + 1
    sizes = [len(range(r, n, 4)) for r in range(4)]
    law = {(a, b): sizes[a] * (sizes[b] - (a == b)) / (n * (n - 1)) for a in range(4) for b in range(4)}
    assert_follows([first_two.get(pair, 0) for pair in law], list(law.values()))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5))
def test_a_unique_batch_has_no_row_twice_and_only_written_ones(rows, batch, seed):
    storage, sampler = filled(rows, 60), UniformSampler(unique=True)
    sampler._rng = torch.Generator().manual_seed(seed)
    if batch > rows:
        with pytest.raises(ValueError, match=f"cannot draw {batch} distinct rows of {rows}"):
            sampler.draw(storage, batch)
        return
    drawn = sampler.draw(storage, batch)[0]
    assert drawn.shape == (batch,)
    assert len(set(drawn.tolist())) == batch
    assert drawn.min() >= 0
    assert drawn.max() < rows


def first_distinct(rows: int, batch: int, generator: torch.Generator) -> list[int]:
    if 8 * batch > rows:
        return torch.randperm(rows, generator=generator).tolist()[:batch]
    found: list[int] = []
    while len(found) < batch:
        found = [*dict.fromkeys(found + torch.randint(rows, (batch,), generator=generator).tolist())]
    return found[:batch]


@pytest.mark.parametrize("lanes", [0, 2])
@given(st.integers(1, 150), st.integers(1, 150), st.integers(0, 1_000))
def test_a_unique_batch_is_the_first_distinct_rows_of_the_random_numbers(lanes, steps, batch, seed):
    rows = steps * max(lanes, 1)
    batch = min(batch, rows)
    rb = ReplayBuffer(storage=filled(steps, steps, lanes=lanes), sampler=UniformSampler(unique=True), batch_size=batch)
    rb.set_rng(torch.Generator().manual_seed(seed))
    wanted = torch.Generator().manual_seed(seed)
    for _ in range(4):  # the first draw is not bound
        index = rb.sample()["index"]
        flat = index @ torch.tensor([lanes, 1]) if lanes else index
        assert flat.tolist() == first_distinct(rows, batch, wanted)
    with pytest.raises(ValueError, match=f"cannot draw {rows + 1} distinct rows of {rows}"):
        rb.sampler.draw(rb.storage, rows + 1)


def test_the_generator_of_the_buffer_decides_and_else_the_default_one():
    storage, sampler = filled(100, 100), UniformSampler()
    torch.manual_seed(3)
    first = sampler.draw(storage, 20)[0]
    torch.manual_seed(3)
    assert torch.equal(first, sampler.draw(storage, 20)[0])
    sampler._rng = torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    assert torch.equal(first, sampler.draw(storage, 20)[0])


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("wrap", [lambda sampler: sampler, SequenceSampler, NStepSampler])
def test_td_errors_of_any_shape_change_nothing(wrap, ndim):
    window = {SequenceSampler: (4,), NStepSampler: (3, 0.9)}.get(wrap, ())
    rb = ReplayBuffer(storage=PackedStorage(40, ndim=ndim), sampler=wrap(UniformSampler(), *window), batch_size=8)
    step = {"reward": torch.zeros(20, 1), "done": torch.zeros(20, 1, dtype=torch.bool)}
    rows = TensorDict({"x": torch.arange(20.0), "next": {**step, "terminated": step["done"]}}, [20])
    rb.extend(rows if ndim == 1 else rows.expand(2, 20))
    batch = rb.sample()
    batch["td_error"] = torch.ones(*batch.batch_size, 2)
    before = rb.chronological()
    rb.update_tensordict_priority(batch)
    assert_same(rb.chronological(), before)


@pytest.mark.parametrize("wrap", [SequenceSampler, NStepSampler])
def test_td_errors_reach_a_wrapper_that_takes_them(wrap):
    taken = []
    own = type("Own", (wrap,), {"update_priority": lambda *arguments, **named: taken.append(arguments)})
    rb = ReplayBuffer(storage=PackedStorage(40), sampler=own(UniformSampler(), 4, *[0.9] * (wrap is NStepSampler)))
    step = {"reward": torch.zeros(20, 1), "done": torch.zeros(20, 1, dtype=torch.bool)}
    rb.extend(TensorDict({"next": {**step, "terminated": step["done"]}}, [20]))
    rb.update_tensordict_priority(rb.sample(8).set("td_error", torch.ones(8)))
    assert len(taken) == 1


def test_draws_live_where_the_rows_live(device):
    storage = PackedStorage(10, device=device)
    storage.set(range(10), TensorDict({"x": torch.zeros(10)}, [10]))
    for unique in (False, True):
        assert UniformSampler(unique=unique).draw(storage, 4)[0].device.type == device.type
