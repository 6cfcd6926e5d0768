"""Replay and rollout buffers, which combine storage, sampler and writer."""
