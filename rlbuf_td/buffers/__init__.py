"""Replay and rollout buffers: storage, sampler and writer put together."""
