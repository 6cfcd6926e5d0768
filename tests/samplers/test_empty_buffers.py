"""Every sampler says in the same words that there is nothing to draw: before the first write, and after `empty`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import FreshRowsSampler, PackedStorage, ReplayBuffer, UniformSampler
from tests.catalogue import SAMPLERS

STEP = TensorDict({"next": {"done": torch.zeros(12, 1, dtype=torch.bool)}}, [12])
FORMS: dict[str, Any] = {"[T]": {}, "[T, E]": {"ndim": 2}, "lanes": {"ndim": 2, "lanes": 3}}


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [*SAMPLERS.values(), lambda rows: FreshRowsSampler(UniformSampler())])
def test_an_empty_buffer_is_refused_by_name(make: Any, form: str, cls: Any):
    storage = partial(PackedStorage, 12, **FORMS[form])
    rb, emptied = (cls(storage=storage(), sampler=make(12), batch_size=12) for _ in range(2))
    emptied.extend(STEP if form == "[T]" else STEP.view(3, 4))
    emptied.empty()
    for each in (rb, emptied):
        assert each.can_sample() is False
        with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage"):
            each.sample()
