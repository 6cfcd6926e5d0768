"""Replay and rollout buffers for TorchRL in which a transition is one row."""
