"""Compares the speed of this package with that of other libraries: ``python -m rlbuf_td bench``.

The table shows one run (``--rows 1e6``, two cores of a shared machine, one thread, batch 256, torch 2.15, torchrl
0.14.1). Each call is timed after a learner's step. Rows have 7 leaves and 167 bytes; image rows have two stacks of four
84 x 84 frames. ``us`` is this package's median time in microseconds. The columns after it hold the times of the others,
divided by this package's time:

- *Mixed*: TorchRL's buffer class with this package's storage, sampler and writer.
- *bare*: one ``torch.randint`` and one ``index_select``.
- *tight*: TorchRL's buffer, if calls follow each other without learner's steps.

Ratios vary by up to a factor of two between runs::

    operation                              rows      us  TorchRL  Mixed  bare  SB3  cpprb  Flashbax  tight
    sample, uniform                   1,000,000     142      4.6    2.1   0.8  2.9    1.8       3.6    7.4
    sample, proportional              1,000,000     202      5.6    2.1               2.8       3.8     11
    update priorities                 1,000,000     130      3.9    1.9               0.6       2.7    7.1
    sample + update, proportional     1,000,000     305      4.3    1.8               2.4       2.9    9.3
    sample, by rank*                  1,000,000     196      5.2                                       9.3
    update priorities, by rank*       1,000,000     218      2.5                                       3.3
    extend by 256, uniform            1,000,000     118      5.5    3.3               1.1       2.2     14
    extend by 256, proportional       1,000,000     138      7.7    3.9               1.1       2.8     29
    add one, uniform                  1,000,000      79      6.1    4.6        0.6    1.3       2.9     24
    add one, proportional             1,000,000      93      8.3    5.2               1.3       2.9     47
    sample, uniform                 5,000 image   2,152      5.0    1.1   1.4  1.9    0.9       1.2    4.2
    sample, proportional            5,000 image   2,003      5.6    1.1               1.0       1.1    4.5
    update priorities               5,000 image      76      5.5    2.2               0.6       3.5    9.5
    sample + update, proportional   5,000 image   2,230      5.3    1.2               0.9       1.1    4.6
    sample, by rank*                5,000 image   2,203      5.3                                       4.8
    update priorities, by rank*     5,000 image     121      4.1                                       2.7
    extend by 256, uniform          5,000 image   1,972      6.1    1.6               1.0       1.7    5.9
    extend by 256, proportional     5,000 image   2,050      6.2    1.7               1.0       1.8    5.7
    add one, uniform                5,000 image      88      5.5    4.3        0.7    1.2       3.0     13
    add one, proportional           5,000 image     101      7.4    5.2               1.2       2.9     26
    sample a Dict of 12 leaves     100,000 Dict     229      4.0                                       7.3
    the same bytes in 3 leaves     100,000 Dict     168      4.2                                       6.1
    record a step of 16 envs             16,000     283      2.5                                       5.2
    GAE, TorchRL's loop               [8, 2048]      82      209                                       736
    GAE, vectorized form              [8, 2048]      81       64                                       221
    GAE, TorchRL's loop              [4096, 32]     237      6.9                                       6.7
    GAE, vectorized form             [4096, 32]     235       21                                        28
    GAE, TorchRL's loop                [1, 128]      51       24                                       150
    GAE, vectorized form               [1, 128]      54       12                                        37
    PPO: extend, GAE, 4 epochs        [8, 2048]  11,752      5.9                                       5.3

``*``: TorchRL has no sampler by rank; the ratios are those of its proportional sampler. For *record a step*,
TorchRL writes a hand-made TensorDict, because it has no recorder for Gymnasium. TorchRL has two functions for GAE:
``generalized_advantage_estimate`` (a loop) and ``vec_generalized_advantage_estimate``.
"""
