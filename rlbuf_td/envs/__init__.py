"""Gymnasium and TorchRL environments: schemas, transitions and the recorder.

A *schema* is one example transition, whose keys, dtypes and shapes come from an environment's spaces (``specs.py``);
with it, a storage reserves its rows before the first step. Both Dict and Tuple spaces become nested keys.

The recorder steps a Gymnasium environment, and copies its results into memory with the layout of a row. Vector
environments that reset themselves return the first observation of the next episode instead of the final one, or add
a step that is no transition. The recorder therefore restores the final observation, drops the added step, and queues
the rows of each lane until a whole time step is complete. Read ``gymnasium_recorder.py`` and ``lane_queues.py``.
"""
