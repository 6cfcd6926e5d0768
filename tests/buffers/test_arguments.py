"""Wrong arguments of buffers: errors say what was meant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import rlbuf_td

td: Any = rlbuf_td  # the arguments are not checked: they are wrong on purpose

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a capacity": (
        lambda: td.ReplayBuffer(100),
        r"ReplayBuffer takes keywords only, got 100: .*storage=PackedStorage\(",
    ),
    "a storage": (
        lambda: td.ReplayBuffer(td.PackedStorage(4)),
        "takes keywords only, got PackedStorage",
    ),
    "a queue's capacity": (
        lambda: td.ExperienceQueue(100),
        r"ExperienceQueue\(storage=PackedStorage",
    ),
    "capacity=": (
        lambda: td.ReplayBuffer(capacity=100),
        r"no keyword capacity=: .*storage=PackedStorage\(",
    ),
    "alpha=": (
        lambda: td.ReplayBuffer(alpha=0.6),
        r"no keyword alpha=: .*sampler=ProportionalSampler\(\.\.\., alpha=",
    ),
    "n_steps=": (
        lambda: td.ReplayBuffer(n_steps=3),
        r"sampler=NStepSampler\(\.\.\., n_steps=",
    ),
    "lanes=": (
        lambda: td.ReplayBuffer(lanes=3),
        r"storage=PackedStorage\(\.\.\., lanes=",
    ),
    "value_key=": (
        lambda: td.RolloutBuffer(4, value_key="v"),
        r"RolloutBuffer has no .*writer=RolloutWriter\(\.\.\., value_key=",
    ),
    "alpha= of a queue": (
        lambda: td.ExperienceQueue(alpha=0.6),
        "ExperienceQueue has no keyword alpha=: there are .*batch_size",
    ),
    "a word": (
        lambda: td.ReplayBuffer(nothing_of_the_kind=1),
        "no keyword nothing_of_the_kind=: there are .*batch_size, .*transform",
    ),
    "a storage class": (
        lambda: td.ReplayBuffer(storage=td.PackedStorage),
        r"the class PackedStorage: make one, storage=PackedStorage\(\.\.\.\).*'max_size'",
    ),
    "a sampler class": (
        lambda: td.ReplayBuffer(sampler=td.ProportionalSampler),
        r"the class ProportionalSampler: make one, .*'max_capacity'",
    ),
    "a prioritized buffer's storage class": (
        lambda: td.PrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=td.PackedStorage
        ),
        "the class PackedStorage: make one",
    ),
    "a writer class": (
        lambda: td.RolloutBuffer(4, writer=td.RolloutWriter),
        "the class RolloutWriter: make one",
    ),
    "a wrapped class": (
        lambda: td.NStepSampler(td.UniformSampler, 3, 0.9),
        "wraps a sampler, got the class UniformSampler: make one",
    ),
    "a class of statistics": (
        lambda: td.ReplayBuffer(stats=td.EpisodeStats),
        "stats= takes an EpisodeStats, got the class EpisodeStats: make one",
    ),
    "set_sampler": (
        lambda: td.ReplayBuffer().set_sampler(td.UniformSampler),
        "set_sampler takes a sampler, got the class UniformSampler: make one",
    ),
    "set_writer": (
        lambda: td.ReplayBuffer().set_writer(td.RingWriter),
        "set_writer takes a writer, got the class RingWriter: make one",
    ),
    "set_storage": (
        lambda: td.ReplayBuffer().set_storage(td.PackedStorage),
        "set_storage takes a storage, got the class PackedStorage: make one",
    ),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_an_error_says_what_was_meant(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_classes_and_functions_that_need_no_arguments_still_make_parts():
    rb = td.ReplayBuffer(
        storage=partial(td.PackedStorage, 8),
        sampler=td.UniformSampler,
        writer=td.RingWriter,
    )
    assert (rb.storage.max_size, type(rb.writer)) == (8, td.RingWriter)


def test_a_buffer_of_ones_own_may_take_positional_arguments():
    class Mine(td.ReplayBuffer):
        def __init__(self, size: int, **kwargs: Any) -> None:
            super().__init__(storage=td.PackedStorage(size), **kwargs)

    assert Mine(8, batch_size=2).storage.max_size == 8
