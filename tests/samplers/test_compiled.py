"""Compiled loops equal the torch forms, over whole buffers and single batches; and the
torch forms ask no device for a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, is_tensor_collection
from torch.utils._python_dispatch import TorchDispatchMode

from rlbuf_td import (
    HindsightSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
    functional,
)
from rlbuf_td.samplers.wrapper import SamplerWrapper
from tests import catalogue
from tests.backends import forced, running
from tests.catalogue import SAMPLERS, buffer_of
from tests.catalogue import numbered_rows as data
from tests.model import reward_fn
from tests.test_goes_on import ALWAYS, FORMS, MORE, Maker, assert_equal

# -- buffers, with the loops of the CPU and with the torch operations of other devices


def assert_close(left, right) -> None:
    """Compare nested values; real numbers may differ by rounding, because sums are in
    another order."""
    if is_tensor_collection(left):
        assert set(left.keys()) == set(right.keys())
        left, right = (
            [each.get(key) for key in sorted(left.keys())] for each in (left, right)
        )
    if isinstance(left, list | tuple):
        for pair in zip(left, right, strict=True):
            assert_close(*pair)
    else:
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


BACKENDS = "compiled", "reference"
# which take other numbers from the generator on other devices
DIFFERENT = "unique", "strict"
PLACES = "rows", "lanes", "lanes apart", "observations once"
EVERY = [(name, form) for name in MORE if name not in DIFFERENT for form in PLACES]


def turns(cases: list[Any], every: int) -> list[Any]:
    """Mark all but every n-th case as slow, another one each time."""
    marks = [
        [] if (j + j // every) % every == 0 else [pytest.mark.slow]
        for j in range(len(cases))
    ]
    return [
        pytest.param(*case, marks=slow) for case, slow in zip(cases, marks, strict=True)
    ]


def made_by(maker: Maker, folder: Path, backend: str = "compiled"):
    with running(backend):
        return maker.make(folder, 0)


def with_torch_forms(sampler):
    """Return a sampler that overrides a method of its own, by itself: then it has no
    compiled form of this method."""
    name = "draw_batch" if isinstance(sampler, SamplerWrapper) else "draw"
    setattr(sampler, name, getattr(sampler, name))
    return sampler


@pytest.mark.parametrize(("sampler", "form"), turns(EVERY, len(PLACES)))
def test_a_compiled_buffer_gives_what_the_torch_forms_give_here_and_on_another_device(
    sampler, form, tmp_path
):
    maker = FORMS[form].of(MORE[sampler])
    of_torch = FORMS[form].of(lambda rows: with_torch_forms(MORE[sampler](rows)))
    buffers = {backend: made_by(maker, tmp_path, backend) for backend in BACKENDS}
    rb = made_by(of_torch, tmp_path)

    def compare(number: int) -> None:
        outcomes = []
        for backend, other in (*buffers.items(), ("compiled", rb)):
            with running(backend):
                outcomes.append(maker.run(other, number))
        for outcome in outcomes[1:]:
            assert_close(outcomes[0], outcome)

    for number in range(maker.before + 1):
        compare(number)
    compiled, reference = (buffers[backend].state_dict() for backend in BACKENDS)
    for backend, state in zip(BACKENDS, (reference, compiled), strict=True):
        buffers[backend] = made_by(maker, tmp_path, backend)
        with running(backend):
            buffers[backend].load_state_dict(state)
    for number in maker.after():
        compare(number)
    assert ("not sample" in rb.compiled) == isinstance(rb.sampler, SamplerWrapper)


@pytest.mark.parametrize("name", ["proportional", "rank"])
def test_bad_errors_on_another_device_change_no_priority_and_are_counted(
    name, tmp_path
):
    maker = FORMS["rows"].of(SAMPLERS[name])
    with running("reference"):
        rb = maker.make(tmp_path, 0)
        maker.run(rb, 0)
        rb.update_priority(torch.tensor([0, 1, 2]), torch.tensor([5.0, 3.0, 4.0]))
        rb.update_priority(
            torch.tensor([0, 1, 2, -1]),
            torch.tensor([torch.nan, 7.0, -torch.inf, torch.nan]),
        )
        assert rb.sampler.priority(torch.arange(3)).tolist() == [5.0, 7.0, 4.0]
        assert rb.health()["refused_priorities"] == 2.0


# -- batches of a compiled plan, and those of a plan of torch forms


def test_a_reward_function_may_move_its_batch_but_not_free_it(tmp_path):
    changes: list[Any] = []

    def reward(batch) -> torch.Tensor:
        rewards = reward_fn(batch)
        for change in changes:
            for leaf in batch.values(True, True):
                change(leaf)
        return rewards

    def windows_of_goals(fn) -> Maker:
        return FORMS["rows"].of(
            lambda rows: SequenceSampler(HindsightSampler(UniformSampler(), fn), 4)
        )

    moving, plain = windows_of_goals(reward), windows_of_goals(reward_fn)
    rb, other = made_by(moving, tmp_path), made_by(plain, tmp_path)
    for number in range(10):
        changes[:] = [torch.Tensor.share_memory_] if number > 5 else []
        assert_equal(moving.run(rb, number), plain.run(other, number), ALWAYS)
    assert ", sample" in rb.compiled
    changes[:] = [lambda leaf: leaf.untyped_storage().resize_(0)]
    with pytest.raises(RuntimeError, match=r"no memory|resized or freed"):
        rb.sample()
    changes.clear()
    assert len(rb.sample()) == 8


# -- training loops ask no device for a value; inference mode is no matter


#: Operations whose result the host needs, as a value or as a shape.
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "is_nonzero",
}
_WAITS |= {"unique_consecutive", "bincount"}


class RefuseWaiting(TorchDispatchMode):
    """Raise a RuntimeError where an operation would wait for the device that its
    tensors are on.

    On the CPU, values and shapes that the host asks for are refused; ``numpy()``,
    ``tolist()`` and ``cpu()`` are no operations there. The meta device refuses these
    itself; copies between it and the CPU are refused here, and indices on the CPU,
    which an operation copies.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _waits(func, args, kwargs or {}):
            raise RuntimeError(f"{func.overloadpacket.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


def _waits(func, args, kwargs) -> bool:
    name = func.overloadpacket.__name__
    if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
        given = [index for index in args[1] if index is not None]
        return any(
            index.dtype is torch.bool or index.device != args[0].device
            for index in given
        )
    if name == "repeat_interleave":
        return func._overloadname == "Tensor" and kwargs.get("output_size") is None
    # a copy between devices waits, unless it is asked not to
    if name in ("copy_", "_to_copy"):
        source, target = (
            (args[1].device, args[0].device)
            if name == "copy_"
            else (args[0].device, kwargs.get("device"))
        )
        return target not in (None, source) and not (
            kwargs.get("non_blocking") or args[2:] == (True,)
        )
    return name in _WAITS


def loop(rb: ReplayBuffer, rows: list[TensorDict], td_error: torch.Tensor) -> None:
    for part in rows:
        rb.extend(part)
        rb.add(part[0])
        batch = rb.sample()
        batch["td_error"] = td_error
        rb.update_tensordict_priority(batch)
        if rb.parts.prioritized is not None:
            rb.update_priority(batch["index"], td_error)


def goals_that_end(rows: int) -> HindsightSampler:
    return HindsightSampler(
        ProportionalSampler(rows),
        catalogue.reward_fn,
        terminated_fn=lambda batch: catalogue.reward_fn(batch) == 0,
    )


WAIT = "minibatch", "chunks", "strict", "steps of episodes"
NEVER_WAIT = {name: made for name, made in SAMPLERS.items() if name not in WAIT} | {
    "goals that end": goals_that_end
}


@pytest.mark.parametrize("name", turns([(name,) for name in NEVER_WAIT], 6))
def test_a_training_loop_never_waits(name):
    """Episodes are noted by the kernel: with torch's operations alone, a write waits
    for the length of the newest episode."""
    pytest.importorskip("triton")
    with forced("torch"):
        rb = buffer_of(60, NEVER_WAIT[name](60), batch_size=32)
        rows, td_error = [data(35, 35 * k) for k in range(4)], torch.rand(32)
        with forced("triton"):
            rb.storage.reserve(rows[0][0])
        loop(rb, rows, td_error)  # what is bound to the rows at first is looked at once
        with RefuseWaiting():
            loop(rb, rows, td_error)
    assert rb.full


ON_META = [
    name
    for name in NEVER_WAIT
    if "n-step" not in name and name not in ("windows", "goals that end")
]


@pytest.mark.parametrize("name", ON_META)
def test_nothing_of_a_device_is_copied_to_the_host(name, monkeypatch):
    """On the meta device there is nothing to read: whatever the host asks for is an
    error, ``numpy()`` included."""
    # which refuses data on this device
    monkeypatch.setattr("rlbuf_td.storages.layout.refuse", lambda *args: None)
    rb = ReplayBuffer(
        storage=PackedStorage(60, device="meta"),
        sampler=NEVER_WAIT[name](60),
        batch_size=32,
    )
    rows = [data(35, 35 * k).to("meta") for k in range(4)]
    td_error = torch.rand(32, device="meta")
    loop(rb, rows[:1], td_error)  # what is bound to the rows is looked at once
    with RefuseWaiting():
        loop(rb, rows, td_error)
        if rb.parts.prioritized is not None:
            # as TorchRL's buffers do after a write
            rb.sampler.mark_update(rb.sample()["index"])
    assert rb.full
    assert rb.sample()["x"].is_meta


def test_advantages_never_wait():
    value, done = torch.randn(2, 9, 1), torch.rand(2, 9, 1) < 0.2
    with forced("torch"), RefuseWaiting():
        advantage, _ = functional.generalized_advantage_estimate(
            0.9, 0.8, value, value, value, done
        )
        returns = functional.td_lambda_return_estimate(0.9, 0.8, value, value, done)
        trace, _ = functional.vtrace_advantage_estimate(
            0.9, value, value, value, value, value, done
        )
    assert advantage.shape == returns.shape == trace.shape == value.shape


# -- memory that is made in inference mode cannot be written to outside of it


def use(rb: ReplayBuffer, first: int) -> None:
    loop(rb, [data(35, first + 35 * k) for k in range(2)], torch.rand(32))


@pytest.mark.parametrize("share_next", [False, ["x"]])
@pytest.mark.parametrize(
    "sampler",
    [UniformSampler, lambda: ProportionalSampler(20), lambda: RankSampler(20)],
)
def test_a_buffer_that_is_first_shared_and_written_in_inference_mode_takes_writes_outside_it(
    sampler, share_next
):
    rb = ReplayBuffer(
        storage=PackedStorage(20, shared=True, share_next=share_next),
        sampler=sampler(),
        batch_size=4,
    )
    seen = torch.rand(9, 3)
    rows = TensorDict({"x": seen[:8], "next": {"x": seen[1:]}}, [8])
    with torch.inference_mode():
        rb.extend(rows)
    for count in (16, 20, 20):
        rb.extend(rows)
        assert len(rb) == count
    rb.storage["x"] = rb[:]["x"]
    if sampler is not UniformSampler:
        rb.update_priority(torch.arange(8), torch.rand(8))
        rb.sampler.alpha = 0.5
    assert rb.sample()["x"].shape == (4, 3)


@pytest.mark.parametrize("path", ["numba", "torch"])
@pytest.mark.parametrize(
    "name", ["unique", "proportional", "rank", "n-step over hindsight", "windows"]
)
def test_what_was_made_in_inference_mode_is_written_to_outside_it(path, name):
    with forced(path):
        rb = buffer_of(60, SAMPLERS[name](60), batch_size=32)
        with torch.inference_mode():
            use(rb, 0)
            rb.load_state_dict(rb.state_dict())
        use(rb, 70)
        assert len(rb.sample()) == 32
