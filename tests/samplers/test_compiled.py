"""Compiled stages equal torch stages: whole buffers and single batches, over one list
of cases each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import is_tensor_collection

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    ProportionalSampler,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.samplers.wrapper import SamplerWrapper
from tests.backends import running
from tests.catalogue import SAMPLERS
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


@pytest.mark.parametrize(("sampler", "form"), turns(EVERY, len(PLACES)))
def test_a_buffer_gives_the_same_on_another_device_and_goes_on_there(
    sampler, form, tmp_path
):
    maker = FORMS[form].of(MORE[sampler])

    def run(rb: Any, backend: str, number: int) -> list[Any]:
        with running(backend):
            return maker.run(rb, number)

    buffers = {backend: made_by(maker, tmp_path, backend) for backend in BACKENDS}
    for number in range(maker.before + 1):
        assert_close(*(run(rb, backend, number) for backend, rb in buffers.items()))
    copies = {backend: made_by(maker, tmp_path, backend) for backend in BACKENDS}
    for backend, source in zip(BACKENDS, reversed(buffers.values()), strict=True):
        with running(backend):
            copies[backend].load_state_dict(source.state_dict())
    for number in maker.after():
        ours, *others = (
            run(rb, backend, number)
            for backend, rb in (*buffers.items(), *copies.items())
        )
        for theirs in others:
            assert_close(ours, theirs)


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


def made_by(maker: Maker, folder: Path, backend: str = "compiled"):
    with running(backend):
        return maker.make(folder, 0)


# -- batches of a compiled plan, and those of a plan of torch forms


def reward_fn(batch) -> torch.Tensor:
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).abs().sum(-1)
    return -distance * (1 + batch["action"] % 3) / 8


def terminated_fn(batch) -> torch.Tensor:
    return (batch["next", "achieved_goal"] == batch["desired_goal"]).all(-1)


def hindsight(inner, reward=reward_fn, **given) -> HindsightSampler:
    return HindsightSampler(inner, reward, **given)


per = ProportionalSampler
ALONE = (
    "uniform",
    "unique",
    "young",
    "proportional",
    "independent",
    "no norm",
    "rank",
    "recency",
)
KINDS: dict[str, Callable[[int], Any]] = {
    **{name: SAMPLERS[name] for name in ALONE},
    "n-step": lambda n: NStepSampler(per(n), 3, 0.9),
    "hindsight": lambda n: hindsight(per(n), terminated_fn=terminated_fn),
    "random goals": lambda n: hindsight(
        UniformSampler(), strategy={"episode": 0.5, "random": 0.5}
    ),
}
WINDOWS: dict[str, dict[str, Any]] = {
    "alone": {},
    "strict": {"length": 2, "boundary": "strict"},
    "strict, burn-in": {"length": 2, "boundary": "strict", "burn_in": 2},
    "shift": {"length": 3, "boundary": "shift", "burn_in": 1, "priority": "mix"},
    "pad": {"length": 4, "boundary": "pad"},
    "batch_time": {
        "length": 3,
        "boundary": "strict",
        "burn_in": 1,
        "output_layout": "batch_time",
    },
    "across": {
        "length": 3,
        "boundary": "strict",
        "burn_in": 1,
        "across_episodes": True,
    },
}
NESTED = [
    (kind, window, PLACES[(j + k) % 4])
    for j, kind in enumerate(KINDS)
    for k, window in enumerate(WINDOWS)
    if window != "across" or not ("hindsight" in kind or "goals" in kind)
]


def with_torch_forms(sampler):
    """Return a sampler that overrides a method of its own, by itself: then it has no
    compiled form of this method."""
    name = "draw_batch" if isinstance(sampler, SamplerWrapper) else "draw"
    setattr(sampler, name, getattr(sampler, name))
    return sampler


@pytest.mark.parametrize(("kind", "window", "form"), turns(NESTED, 4))
def test_a_compiled_batch_equals_that_of_the_torch_forms(kind, window, form, tmp_path):
    def sampler(rows: int):
        return (
            SequenceSampler(KINDS[kind](rows), **WINDOWS[window])
            if WINDOWS[window]
            else KINDS[kind](rows)
        )

    makers = [
        FORMS[form].of(make)
        for make in (sampler, lambda rows: with_torch_forms(sampler(rows)))
    ]
    compiled, torch_form = (made_by(maker, tmp_path) for maker in makers)
    rounds = 0
    for number in range(18):
        ours, theirs = (
            maker.run(rb, number)
            for maker, rb in zip(makers, (compiled, torch_form), strict=True)
        )
        assert_equal(ours, theirs, ALWAYS, f"round {number}")
        rounds += ", sample" in compiled.compiled.partition("; not")[0]
    # where some stages need torch
    assert rounds > 8 or form in ("lanes apart", "observations once")
    assert ("not sample" in torch_form.compiled) == isinstance(
        torch_form.sampler, SamplerWrapper
    )


def test_a_reward_function_may_move_its_batch_but_not_free_it(tmp_path):
    change: list[Any] = []

    def reward(batch) -> torch.Tensor:
        found = reward_fn(batch)
        for each in change:
            for leaf in batch.values(True, True):
                each(leaf)
        return found

    samplers = [
        lambda rows, fn=fn: SequenceSampler(hindsight(UniformSampler(), fn), 4)
        for fn in (reward, reward_fn)
    ]
    makers = [FORMS["rows"].of(sampler) for sampler in samplers]
    rb, plain = (made_by(maker, tmp_path) for maker in makers)
    for number in range(10):
        change[:] = [torch.Tensor.share_memory_] if number > 5 else []
        ours, theirs = (
            maker.run(each, number)
            for maker, each in zip(makers, (rb, plain), strict=True)
        )
        assert_equal(ours, theirs, ALWAYS)
    assert ", sample" in rb.compiled
    change[:] = [lambda leaf: leaf.untyped_storage().resize_(0)]
    with pytest.raises(RuntimeError, match=r"no memory|resized or freed"):
        rb.sample()
    change.clear()
    assert len(rb.sample()) == 8
