r"""Advantages, returns, explained variance, normalization and random shifts of images,
as functions on tensors.

Names, arguments and shapes are those of ``torchrl.objectives.value.functional``:
tensors are ``[*batch, T, *F]``, and ``time_dim`` is the dimension of time. A trajectory
ends at ``done``. At the end of a trajectory and at the last step, estimates bootstrap
from ``next_state_value``, unless the step is ``terminated``.

The following holds for every estimate of an advantage or return:

* Any floating dtype works. bfloat16 and float16 are computed in float32; results have
  the dtype of the values.
* Results have no gradient: inputs are detached. A ``gamma`` or ``lmbda`` that requires
  a gradient raises a ValueError.
* ``gamma`` and ``lmbda`` are floats in [0, 1], or tensors that broadcast to the inputs'
  shape. The range of a tensor's values is not checked.
* A NaN in the value of a terminal state, or after the end of a trajectory, does not
  reach the trajectory's estimates.
* Cost: O(elements) on the CPU; on CUDA, O(log T) kernel launches without host
  synchronisation.
* ``ValueError``: shapes or devices differ, inputs are empty, coefficients are out of
  range, or ``time_dim`` is invalid.
* ``TypeError``: an input is not a tensor, ``done`` or ``terminated`` is not bool, a
  state value or log-probability is not floating, a reward is complex, or a coefficient
  is not a number or tensor.
"""

from rlbuf_td.functional.advantage import (
    generalized_advantage_estimate,
    vtrace_advantage_estimate,
)
from rlbuf_td.functional.augmentation import random_shift
from rlbuf_td.functional.returns import (
    reward2go,
    td1_return_estimate,
    td_lambda_return_estimate,
)
from rlbuf_td.functional.summary import explained_variance, normalize

__all__ = [
    "explained_variance",
    "generalized_advantage_estimate",
    "normalize",
    "random_shift",
    "reward2go",
]
__all__ += [
    "td1_return_estimate",
    "td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]
