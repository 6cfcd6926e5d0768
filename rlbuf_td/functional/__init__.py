r"""Advantages, returns and summaries of them, as functions on tensors.

Names, arguments and shapes are those of ``torchrl.objectives.value.functional``: tensors are ``[*batch, T, *F]``, time
at ``time_dim``. ``done`` ends a trajectory, ``terminated`` also bootstrapping. A step that is done but not terminated
was truncated: it bootstraps from its ``next_state_value``, as the last step of the tensors does unless terminated.

For every estimate:

* Floating dtypes of any width; bfloat16 and float16 are accumulated in float32, and returned as they came.
* Results are constants: inputs are detached. A ``gamma`` or ``lmbda`` that requires a gradient is refused.
* ``gamma`` and ``lmbda`` are floats in [0, 1] or tensors that broadcast to the inputs' shape (values unchecked).
* Values after ``terminated`` or ``done`` are left out, not multiplied by zero: NaN there does no harm.
* One pass over the data on the CPU; on CUDA O(log T) launches and no host synchronisation.
* ``ValueError``: shapes or devices differ, empty inputs, coefficients out of range, no such ``time_dim``.
  ``TypeError``: a flag is not bool, a value not floating. Both name the input.
"""

from rlbuf_td.functional.advantage import generalized_advantage_estimate, vtrace_advantage_estimate
from rlbuf_td.functional.returns import td1_return_estimate, td_lambda_return_estimate
from rlbuf_td.functional.summary import explained_variance, normalize

__all__ = [
    "explained_variance",
    "generalized_advantage_estimate",
    "normalize",
    "td1_return_estimate",
    "td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]
