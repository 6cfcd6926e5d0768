"""Random generators as plain values, for pickles.

A spawned process receives a tensor as a descriptor of its memory, which must stay open until the process has started.
A tensor that a pickler makes, such as the state of a generator, is freed before.
"""

from __future__ import annotations

import numpy as np
import torch


def pickled_generator(generator: torch.Generator | None) -> tuple[str, bytes] | None:
    """Return the device and the state of a generator."""
    return None if generator is None else (str(generator.device), generator.get_state().numpy().tobytes())


def unpickled_generator(pickled: tuple[str, bytes] | None) -> torch.Generator | None:
    if pickled is None:
        return None
    device, state = pickled
    generator = torch.Generator(device)
    generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    return generator
