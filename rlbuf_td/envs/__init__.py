"""Schemas and transitions of environments, and recorders for those of Gymnasium and
PettingZoo.

A *schema* holds the keys, dtypes and shapes of a transition, which follow from an
environment's spaces. With a schema, a storage can reserve its rows before the first
step. Dict and Tuple spaces become nested keys.
"""
