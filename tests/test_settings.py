"""Settings say whether a value is no number, or a number out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rlbuf_td
from rlbuf_td.buffers.flow import FlowControl

td: Any = rlbuf_td  # the arguments are not checked: they are wrong on purpose


def flow(**settings: Any) -> FlowControl:
    return FlowControl(**{"samples_per_insert": 1.0} | settings)


#: For each setting: its maker, and numbers out of range.
SETTINGS: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "gamma": (lambda x: td.NStepSampler(td.UniformSampler(), 3, x), [-0.1, 1.5]),
    "n_steps": (lambda x: td.NStepSampler(td.UniformSampler(), x, 0.9), [0, 2.5]),
    "her_ratio": (
        lambda x: td.HindsightSampler(td.UniformSampler(), len, her_ratio=x),
        [-1, 2],
    ),
    "alpha": (lambda x: td.ProportionalSampler(4, x), [-1, float("inf")]),
    "beta": (lambda x: td.RankSampler(4, 0.5, x), [-1, float("nan")]),
    "eta": (
        lambda x: td.SequenceSampler(td.ProportionalSampler(4), 2, eta=x),
        [-1, 2],
    ),
    "half_life": (lambda x: td.RecencySampler(half_life=x), [-1, 0]),
    "epochs": (lambda x: td.MinibatchSampler(x), [-1, 0.5]),
    "max_age": (lambda x: td.UniformSampler(max_age=x), [-1, 0.5]),
    "max_size": (lambda x: td.PackedStorage(x), [0, 2.5]),
    "samples_per_insert": (lambda x: flow(samples_per_insert=x), [0, float("inf")]),
    "min_size": (lambda x: flow(min_size=x), [-1, 2.5]),
    "tolerance": (lambda x: flow(tolerance=x), [0, float("nan")]),
    "window": (lambda x: td.EpisodeStats(window=x), [0, 2.5]),
    "history": (lambda x: td.EpisodeStats(history=x), [0, 2.5]),
    "batch_size": (lambda x: td.ReplayBuffer().sample(x), [-1, 2.5]),
    "timeout": (lambda x: td.ReplayBuffer().wait_until_sampleable(1, x), [-1]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_that_is_no_number_is_a_type_error_that_names_the_setting(name):
    make, _ = SETTINGS[name]
    for value in ("0.5", [0.5], {}, True, torch.zeros(2)):
        with pytest.raises(TypeError, match=f"{name} must be .* got .*, of type"):
            make(value)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_number_out_of_range_is_a_value_error_that_names_the_setting(name):
    make, wrong = SETTINGS[name]
    for value in wrong:
        with pytest.raises(ValueError, match=f"{name} must be"):
            make(value)
