"""Random shifts of images: those of DrQ-v2, each equally likely."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from rlbuf_td.functional import random_shift


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("lead", [(), (6,), (2, 3)])
def test_each_image_is_a_crop_of_itself_padded(lead, dtype, device):
    images = torch.randint(256, (*lead, 2, 9, 7), device=device).to(dtype)
    shifted = random_shift(images, 3)
    assert (shifted.shape, shifted.dtype, shifted.device) == (images.shape, dtype, images.device)
    for image, result in zip(images.reshape(-1, 2, 9, 7), shifted.reshape(-1, 2, 9, 7), strict=True):
        padded = torch.nn.functional.pad(image.float()[None], (3, 3, 3, 3), mode="replicate")[0].to(dtype)
        crops = [padded[:, y : y + 9, x : x + 7] for y in range(7) for x in range(7)]
        assert any(torch.equal(result, crop) for crop in crops)


def test_all_shifts_are_equally_likely():
    images = (torch.arange(25) + 25).view(1, 1, 5, 5).expand(100_000, 1, 5, 5)
    centre = random_shift(images, 2)[:, 0, 2, 2] - 25
    assert chisquare(centre.bincount(minlength=25)).pvalue > 1e-3


def test_a_generator_fixes_the_shifts_and_nothing_is_changed_in_place():
    images = torch.rand(50, 1, 8, 8)
    before = images.clone()
    one, other = (random_shift(images, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, images)
    assert torch.equal(images, before)
