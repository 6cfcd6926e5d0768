"""What newer releases of TorchRL have, so that a test of it says which release it needs
where it is skipped."""

from __future__ import annotations

import inspect

import pytest
import torchrl
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import ReplayBuffer

FEATURES = {
    "data sets": hasattr(ReplayBuffer, "as_dataset"),
    "waiting": hasattr(ReplayBuffer, "wait_until_sampleable"),
    "exports": hasattr(ReplayBuffer, "export"),
    "trajectory writes": "replay_write_mode"
    in inspect.signature(Collector.__init__).parameters,
    "stop signals": hasattr(torchrl.checkpoint, "StopOnSignal"),
    "parts of a checkpoint": hasattr(Checkpoint, "read_component"),
}


def needs(feature: str) -> pytest.MarkDecorator:
    """Skip a test if the installed TorchRL lacks the feature."""
    return pytest.mark.skipif(
        not FEATURES[feature], reason=f"TorchRL {torchrl.__version__} has no {feature}"
    )
