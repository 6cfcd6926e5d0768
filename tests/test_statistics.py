"""The statistical tests themselves can fail."""

from __future__ import annotations

import numpy as np
import pytest

from tests.statistics import assert_follows, power


def test_a_right_sampler_passes_and_one_two_percent_off_fails():
    rng = np.random.default_rng(0)
    probability = rng.random(100) + 0.5
    probability /= probability.sum()
    biased = probability * np.where(np.arange(100) % 2 == 0, 1.02, 0.98)
    biased /= biased.sum()
    draws = 1_000_000
    assert power(probability, draws, bias=0.02) > 0.999
    assert_follows(rng.multinomial(draws, probability), probability)
    with pytest.raises(AssertionError, match="do not follow the law"):
        assert_follows(rng.multinomial(draws, biased), probability)
    with pytest.raises(AssertionError, match="probability 0"):
        assert_follows(np.array([999, 1]), np.array([1.0, 0.0]))
