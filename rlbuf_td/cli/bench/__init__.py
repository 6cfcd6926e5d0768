"""Compares the speed of this package with that of other libraries: ``python -m rlbuf_td bench``.

All results of one run (``--rows 1e6``, two cores of a shared machine, one thread, batch 256, torch 2.15, torchrl
0.14.1). Each call is timed after a learner's step. ``us`` is the median of this package in microseconds; the other
columns say how many times as long another library takes. *Mixed* is TorchRL's buffer with our parts, *bare* one
``torch.randint`` and one ``index_select``, *tight* TorchRL relative to us in a loop without a learner's step. Rows have
7 leaves and 167 bytes; image rows have two stacks of four 84 x 84 frames. Ratios vary by up to a factor of two between
runs::

    operation                              rows      us  TorchRL  Mixed  bare  SB3  cpprb  Flashbax  tight
    sample, uniform                   1,000,000     130      4.4    2.1   0.6  2.9    1.8       3.4    6.5
    sample, proportional              1,000,000     179      5.1    2.0               2.9       3.1    8.6
    update priorities                 1,000,000     134      3.2    1.7               0.5       2.4    6.9
    sample + update, proportional     1,000,000     289      3.9    1.7               2.4       2.5    9.0
    sample, by rank*                  1,000,000     167      5.3                                       8.6
    update priorities, by rank*       1,000,000     185      2.2                                       2.8
    extend by 256, uniform            1,000,000      98      5.6    3.4               1.0       2.6     15
    extend by 256, proportional       1,000,000     104      7.7    4.1               1.1       3.2     27
    add one, uniform                  1,000,000      68      5.6    4.2        0.6    1.1       2.7     21
    add one, proportional             1,000,000      73      8.0    5.2               1.2       3.0     39
    sample, uniform                 5,000 image   2,359      4.4    1.0   0.9  1.5    0.8       1.1    3.8
    sample, proportional            5,000 image   2,317      4.8    1.0               0.8       1.1    4.2
    update priorities               5,000 image      79      4.8    2.1               0.5       3.5    8.4
    sample + update, proportional   5,000 image   2,491      4.6    1.0               0.8       1.0    3.8
    sample, by rank*                5,000 image   2,170      4.8                                       4.6
    update priorities, by rank*     5,000 image     105      3.2                                       2.2
    extend by 256, uniform          5,000 image   1,862      6.2    1.6               1.0       1.9    6.0
    extend by 256, proportional     5,000 image   1,864      6.6    1.7               1.0       1.9    6.3
    add one, uniform                5,000 image      76      5.5    4.4        0.7    1.2       3.3     12
    add one, proportional           5,000 image      85      7.5    5.2               1.2       3.3     24
    sample a Dict of 12 leaves     100,000 Dict     183      4.2                                       7.1
    the same bytes in 3 leaves     100,000 Dict     138      4.2                                       6.0
    record a step of 16 envs             16,000     238      2.7                                       6.1
    GAE, TorchRL's loop               [8, 2048]      70      224                                       713
    GAE, vectorized form              [8, 2048]      66       69                                       215
    GAE, TorchRL's loop              [4096, 32]     210      6.2                                       7.7
    GAE, vectorized form             [4096, 32]     205       22                                        27
    GAE, TorchRL's loop                [1, 128]      39       28                                       151
    GAE, vectorized form               [1, 128]      41       10                                        21
    PPO: extend, GAE, 4 epochs        [8, 2048]  13,160      4.6                                       4.4

``*``: TorchRL has no sampler by rank; this is the time of its proportional one. TorchRL does not record Gymnasium
loops: the time is that of a hand-made TensorDict. GAE is compared with both forms of TorchRL's.
"""
