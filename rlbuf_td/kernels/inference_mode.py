"""Tensors that are made in inference mode cannot be changed outside of it; memory that lasts is made outside."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def outside_inference_mode() -> AbstractContextManager[object]:
    """Disable inference mode in a ``with`` block, so that tensors created in it can be modified in place later."""
    return torch.inference_mode(False)
