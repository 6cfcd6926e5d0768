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
    sample, uniform                   1,000,000      88      6.1    2.0   0.5  3.3    2.0       4.2    8.6
    sample, proportional              1,000,000     116      6.2    1.9               3.8       4.2     11
    update priorities                 1,000,000      98      3.5    1.8               0.7       3.9    6.0
    sample + update, proportional     1,000,000     220      5.1    1.9               2.7       3.3    8.6
    sample, by rank*                  1,000,000     133      6.4                                       9.8
    update priorities, by rank*       1,000,000     147      2.2                                       2.9
    extend by 256, uniform            1,000,000      77      5.9    3.0               0.9       2.2     16
    extend by 256, proportional       1,000,000     125      5.7    2.6               1.1       2.0     13
    add one, uniform                  1,000,000      40      6.9    4.1        0.5    1.3       2.7     22
    add one, proportional             1,000,000      49     10.8    5.7               1.4       3.2     46
    sample, uniform                 5,000 image   1,301      7.3    1.1   0.9  2.1    1.1       1.2    7.8
    sample, proportional            5,000 image   1,660      6.6    1.2               1.2       1.2    6.8
    update priorities               5,000 image      49      5.5    2.2               0.6       3.2    9.3
    sample + update, proportional   5,000 image   1,480      7.1    1.2               1.1       1.4    7.8
    sample, by rank*                5,000 image   1,495      6.6                                       8.6
    update priorities, by rank*     5,000 image      86      3.2                                       2.3
    extend by 256, uniform          5,000 image   1,201      8.7    1.6               1.2       2.0    9.8
    extend by 256, proportional     5,000 image   1,236      8.8    1.7               1.1       2.0    9.1
    add one, uniform                5,000 image      56      6.5    4.6        0.9    1.3       3.3     15
    add one, proportional           5,000 image      69     10.1    6.1               1.5       3.0     32
    sample a Dict of 12 leaves     100,000 Dict     104      5.8                                       9.5
    the same bytes in 3 leaves     100,000 Dict     100      5.2                                       7.6
    record a step of 16 envs             16,000     164      2.8                                       5.0
    GAE, TorchRL's loop               [8, 2048]      43      429                                       836
    GAE, vectorized form              [8, 2048]      57      120                                       291
    GAE, TorchRL's loop              [4096, 32]     183      6.4                                       7.2
    GAE, vectorized form             [4096, 32]     155       26                                        31
    GAE, TorchRL's loop                [1, 128]      32       41                                       166
    GAE, vectorized form               [1, 128]      40     12.9                                        41
    PPO: extend, GAE, 4 epochs        [8, 2048]   8,395      8.3                                       8.4

``*``: TorchRL has no sampler by rank; the ratios are those of its proportional sampler. For *record a step*,
TorchRL writes a hand-made TensorDict, because it has no recorder for Gymnasium. TorchRL has two functions for GAE:
``generalized_advantage_estimate`` (a loop) and ``vec_generalized_advantage_estimate``.
"""
