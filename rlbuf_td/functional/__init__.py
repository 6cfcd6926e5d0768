r"""Estimates of the future as functions on tensors: advantages, returns, and what one reports about them.

Names, arguments and shapes are those of ``torchrl.objectives.value.functional``: tensors are ``[*batch, T,
*F]``, time at ``time_dim``; ``done`` ends a trajectory (nothing of what follows counts), ``terminated`` says
that its value is zero from there on (nothing is bootstrapped). A step that is done but not terminated was
truncated: it bootstraps from its own ``next_state_value``. The last step of the tensors does so too unless it
    is terminated.

What holds for every estimate here:

* Floating dtypes of any width; bfloat16 and float16 are accumulated in float32, and returned as they came.
* Results are constants: inputs that require a gradient are detached. ``gamma`` or ``lmbda`` that require one
  are refused, since nobody could mean that.
* ``gamma`` and ``lmbda`` are floats in [0, 1] or tensors that broadcast to the inputs' shape (values not
  checked).
* A value behind ``terminated`` or ``done`` is not multiplied by zero but left out: NaN there does no harm.
* O(elements) on the CPU; on CUDA O(log T) launches and no host synchronisation. One shape for all inputs,
  bool flags and non-empty tensors, or ``ValueError`` / ``TypeError`` says which input was wrong.
"""

from rlbuf_td.functional.advantage import generalized_advantage_estimate
from rlbuf_td.functional.returns import td1_return_estimate, td_lambda_return_estimate
from rlbuf_td.functional.summary import explained_variance, normalize
from rlbuf_td.functional.vtrace import vtrace_advantage_estimate

__all__ = [
    "explained_variance",
    "generalized_advantage_estimate",
    "normalize",
    "td1_return_estimate",
    "td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]
