r"""Advantages, returns and their summaries, and random shifts of images, as functions on tensors.

Names, arguments and shapes are those of ``torchrl.objectives.value.functional``: tensors are ``[*batch, T, *F]``, with
time at ``time_dim``. ``done`` ends a trajectory; ``terminated`` also ends bootstrapping. A step that is done but not
terminated was truncated: it bootstraps from its ``next_state_value``. So does the last step unless it is terminated.

For every estimate:

* Any floating dtype works; bfloat16 and float16 are accumulated in float32, and results have the input dtype.
* Results are constants: inputs are detached. A ``gamma`` or ``lmbda`` that requires a gradient is refused.
* ``gamma`` and ``lmbda`` are floats in [0, 1] or tensors that broadcast to the inputs' shape (values unchecked).
* Values after ``terminated`` or ``done`` are ignored, not multiplied by zero, so NaN there has no effect.
* Linear in the number of elements on the CPU; on CUDA O(log T) kernel launches and no host synchronisation.
* ``ValueError``: shapes or devices differ, inputs are empty, coefficients are out of range, ``time_dim`` is invalid.
  ``TypeError``: a flag is not bool, or a value is not floating. Both messages name the input.
"""

from rlbuf_td.functional.advantage import generalized_advantage_estimate, vtrace_advantage_estimate
from rlbuf_td.functional.augmentation import random_shift
from rlbuf_td.functional.returns import td1_return_estimate, td_lambda_return_estimate
from rlbuf_td.functional.summary import explained_variance, normalize

__all__ = [
    "explained_variance",
    "generalized_advantage_estimate",
    "normalize",
    "random_shift",
    "td1_return_estimate",
    "td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]
