"""Gymnasium and TorchRL environments: schemas, transitions and the recorder."""
