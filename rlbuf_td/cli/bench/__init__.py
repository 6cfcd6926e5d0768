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
    sample, uniform                   1,000,000      66      6.2    2.0   0.7  3.5    2.3       4.4    9.0
    sample, proportional              1,000,000      95      7.0    2.0               4.3       3.8   11.3
    update priorities                 1,000,000      87      3.9    1.8               0.7       3.1    6.9
    sample + update, proportional     1,000,000     198      5.7    2.1               3.0       2.6    9.3
    sample, by rank*                  1,000,000     144      6.6                                      10.2
    update priorities, by rank*       1,000,000     201      2.3                                       3.0
    extend by 256, uniform            1,000,000      78      6.8    3.6               1.1       2.6     18
    extend by 256, proportional       1,000,000      89      9.6    4.2               1.3       3.1     32
    add one, uniform                  1,000,000      48      7.3    4.3        0.6    1.4       3.0     32
    add one, proportional             1,000,000      49     10.4    5.7               1.4       3.2     72
    sample, uniform                 5,000 image   1,228      7.5    1.1   1.0  2.3    1.2       1.2    8.0
    sample, proportional            5,000 image   1,334      7.2    1.1               1.1       1.3    8.4
    update priorities               5,000 image      51      5.2    2.5               0.6       4.3    9.9
    sample + update, proportional   5,000 image   1,621      6.5    1.2               1.1       1.2    7.8
    sample, by rank*                5,000 image   1,450      6.7                                       8.7
    update priorities, by rank*     5,000 image      70      2.9                                       2.3
    extend by 256, uniform          5,000 image     677     13.6    2.5               2.0       3.0   14.7
    extend by 256, proportional     5,000 image     694     13.8    2.6               1.9       3.1     15
    add one, uniform                5,000 image      29      8.7    5.7        1.0    1.9       4.2     22
    add one, proportional           5,000 image      31     14.0    8.1               2.0       4.5     47
    sample a Dict of 12 leaves     100,000 Dict      95      5.8                                       9.3
    the same bytes in 3 leaves     100,000 Dict      74      5.0                                       7.5
    record a step of 16 envs             16,000     149      2.9                                       5.1
    GAE, TorchRL's loop               [8, 2048]      44      393                                       824
    GAE, vectorized form              [8, 2048]      51      116                                       259
    GAE, TorchRL's loop              [4096, 32]     159      6.7                                       6.8
    GAE, vectorized form             [4096, 32]     157       26                                        29
    GAE, TorchRL's loop                [1, 128]      20       52                                       152
    GAE, vectorized form               [1, 128]      21       16                                        39
    PPO: extend, GAE, 4 epochs        [8, 2048]   8,565      7.7                                       7.8

``*``: TorchRL has no sampler by rank; the ratios are those of its proportional sampler. For *record a step*,
TorchRL writes a hand-made TensorDict, because it has no recorder for Gymnasium. TorchRL has two functions for GAE:
``generalized_advantage_estimate`` (a loop) and ``vec_generalized_advantage_estimate``.
"""
