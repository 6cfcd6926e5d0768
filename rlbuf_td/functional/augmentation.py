"""Augmentation of images in sampled batches."""

from __future__ import annotations

import torch
from torch import Tensor


def random_shift(
    images: Tensor, pad: int = 4, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""Shift each image by a random number of pixels, and fill the gap with copies of
    the edge pixels (DrQ-v2).

    .. math:: y_{r, c} = x_{\mathrm{clip}(r + \delta_r),\, \mathrm{clip}(c + \delta_c)}, \qquad
        \delta_r, \delta_c \sim \mathcal{U}\{-\text{pad}, \dots, \text{pad}\}

    All channels of an image get the same shift, so that stacked frames stay aligned. As
    in DrQ-v2, call this function separately for the observation and the next
    observation.

    Args:
        images: ``[..., C, H, W]``, any dtype.
        pad: the largest shift in pixels, at least 0.
        generator: the random generator, on any device; ``None``: torch's default
            generator of the images' device.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: ``images`` has fewer than three dims, or ``pad`` is negative.

    Cost: one gather of the images, without host synchronisation if the generator is on
    the images' device.
    Source: Yarats et al., Mastering Visual Continuous Control, 2021. TorchRL has no
    random shift.

    Example:
        >>> images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
        >>> random_shift(images, 0).equal(images), random_shift(images, 2).dtype
        (True, torch.uint8)
    """
    if images.ndim < 3:
        raise ValueError(
            f"random_shift: images must be [..., C, H, W], got shape {tuple(images.shape)}."
        )
    if pad < 0:
        raise ValueError(f"random_shift: pad must be at least 0, got {pad}.")
    flat = images.flatten(0, -4) if images.ndim > 3 else images.unsqueeze(0)
    device = images.device
    count, channels, height, width = flat.shape
    source = device if generator is None else generator.device
    shift = torch.randint(
        -pad, pad + 1, (2, count, 1), generator=generator, device=source
    ).to(device)
    rows = (torch.arange(height, device=device) + shift[0]).clamp_(0, height - 1)
    columns = (torch.arange(width, device=device) + shift[1]).clamp_(0, width - 1)
    image = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return flat[image, channel, rows[:, None, :, None], columns[:, None, None, :]].view(
        images.shape
    )
