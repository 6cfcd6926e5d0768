"""Goodness of fit for samplers: how small a bias a test finds (:func:`power`), and how
often it fails a right sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from scipy import stats

Counts: TypeAlias = torch.Tensor | np.ndarray | Sequence[float]

#: A right sampler fails a test with this probability, at a random seed; the seeds are
# fixed.
FALSE_ALARM = 1e-4


def assert_follows(counts: Counts, probability: Counts) -> None:
    """Assert that ``counts`` of independent draws fit ``probability``, by chi-square.

    Cells that expect fewer than five draws are pooled, with the least of the others if
    all of them together expect fewer; a cell of probability 0 must not have been drawn
    at all. Stratified draws vary less than independent ones, so that a
    right sampler passes all the more.
    """
    counts = np.asarray(counts, dtype=np.float64)
    probability = np.asarray(probability, dtype=np.float64)
    assert probability.sum() == np.float64(1.0) or abs(probability.sum() - 1.0) < 1e-9
    assert not counts[probability == 0].any(), "a row of probability 0 was drawn"
    expected = probability * counts.sum()
    rare = expected < 5.0
    if 0 < expected[rare].sum() < 5.0 and not rare.all():
        rare |= expected == expected[~rare].min()
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert keep.sum() > 1 or (probability > 0).sum() == 1, (
        "too few draws to judge the law by"
    )
    if keep.sum() == 1:
        return
    p_value = stats.chisquare(
        observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()
    ).pvalue
    assert p_value > FALSE_ALARM, f"p = {p_value:.2e}: the draws do not follow the law"


def power(probability: np.ndarray, draws: int, bias: float) -> float:
    """Return how surely :func:`assert_follows` fails a sampler whose every other row is
    ``bias`` too likely."""
    probability = probability[probability > 0]
    tilt = np.where(np.arange(len(probability)) % 2 == 0, 1.0 + bias, 1.0 - bias)
    biased = probability * tilt / (probability * tilt).sum()
    noncentrality = draws * ((biased - probability) ** 2 / probability).sum()
    freedom = len(probability) - 1
    return float(
        stats.ncx2.sf(stats.chi2.isf(FALSE_ALARM, freedom), freedom, noncentrality)
    )
