"""Schemas and transitions of Gymnasium and TorchRL environments, and the recorder for Gymnasium environments.

A *schema* is an example of a transition, whose keys, dtypes and shapes come from an environment's spaces. With a
schema, a storage can reserve its rows before the first step. Dict and Tuple spaces become nested keys.
"""
