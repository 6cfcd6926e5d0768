"""What estimates refuse."""

from __future__ import annotations

from typing import Any

from tests.refusals.makers import *


def gae(gamma: Any, lmbda: Any, **inputs: Any) -> Any:
    return F.generalized_advantage_estimate(gamma, lmbda, **(estimates() | inputs))


def estimates(length: int = 9) -> dict[str, Any]:
    """Return the arguments of all estimates, [2, T, 1]."""
    made = {
        name: zeros(2, length, 1)
        for name in ("state_value", "next_state_value", "reward")
    }
    return made | {name: zeros(2, length, 1).bool() for name in ("done", "terminated")}


FUNCTIONS: list[Any] = [
    lambda **inputs: F.generalized_advantage_estimate(0.9, 0.8, **inputs),
    lambda state_value, **inputs: F.td_lambda_return_estimate(0.9, 0.8, **inputs),
    lambda state_value, **inputs: F.td1_return_estimate(0.9, **inputs),
    lambda **inputs: F.vtrace_advantage_estimate(
        0.9, inputs["reward"], inputs["reward"], **inputs
    ),
]
REFUSALS: Table = {
    ("functional", nothing): [
        *((lambda _, f=f, bad=bad: f(**(estimates() | bad)), error, word) for f in FUNCTIONS for bad, error, word in [
            ({"done": zeros(2, 9).bool()}, ValueError, r"all inputs must share one shape.*'done': \(2, 9\)"),
            ({"done": zeros(2, 9, 1).long()}, TypeError, "done must be a bool tensor, got torch.int64. Pass"),
            ({"terminated": zeros(2, 9, 1)}, TypeError, "terminated must be a bool tensor"),
            ({"next_state_value": zeros(2, 9, 1).long()}, TypeError, "next_state_value .* floating dtype, got"),
            ({"done": [False] * 9}, TypeError, "done must be a tensor, got list"),
            ({"time_dim": 3}, ValueError, r"time_dim=3 does not exist in inputs of shape \(2, 9, 1\)"),
            (estimates(0), ValueError, r"the inputs are empty \(shape \(2, 0, 1\)\)"),
            ({name: leaf[0, :, 0] for name, leaf in estimates().items()}, ValueError, "exist .* pass time_dim=-1"),
        ]),
        (lambda _: gae(nan, 0.5), ValueError, r"gamma must lie in \[0, 1\], got nan"),
        (lambda _: gae(0.5, 2), ValueError, r"lmbda must lie in \[0, 1\], got 2.0"),
        (lambda _: gae(None, 0.5), TypeError, "gamma must be a number or a tensor, got NoneType"),
        (lambda _: gae(ones(9), 0.5), ValueError, r"gamma of shape \(9,\) does not broadcast to the inputs' shape"),
        (lambda _: gae(tensor(0.5, requires_grad=True), 0.5), ValueError, "requires a gradient.*Pass"),
        *((lambda _, spoil=spoil: gae(0.9, 0.9, state_value=spoil(zeros(2, 9, 1))), (RuntimeError, TypeError),
           "memory|[nN]ested|storage") for spoil in (freed, shrunk, nested)),
        *((lambda _, f=f: f(**estimates(), rolling_gamma=False), ValueError, "rolling_gamma=False is not supported")
          for f in FUNCTIONS[1:3]),
        (lambda _: FUNCTIONS[3](**estimates(), rho_thresh=-1.0), ValueError, "rho_thresh must be at least 0, got -1"),
        (lambda _: F.explained_variance(zeros(3, 1), zeros(3)), ValueError, "must share one shape"),
        (lambda _: F.normalize(zeros(0)), ValueError, "normalize: the tensor is empty"),
        (lambda _: F.normalize(zeros(3), eps=0), ValueError, "eps must be positive, got 0"),
        *((lambda _, mask=mask: F.normalize(zeros(5, 4, 2), mask=mask), ValueError,
           r"the mask must be bool with the first dims of \(5, 4, 2\), got")
          for mask in (ones(5, 4), ones(4, 4).bool(), ones(5, 4, 3).bool())),
        (lambda _: F.reward2go(zeros(4, 9), zeros(4, 9).bool(), 0.9, mask=ones(4, 5).bool()), ValueError, "mask must"),
        (lambda _: F.reward2go(zeros(4, 9), zeros(4, 9).bool(), 0.9, mask=ones(4, 9)), TypeError, "mask must be a"),
        (lambda _: F.random_shift(zeros(3, 4)), ValueError, r"images must be \[..., C, H, W\], got shape \(3, 4\)"),
        (lambda _: F.random_shift(zeros(1, 3, 4), -1), ValueError, "pad must be at least 0, got -1"),
    ],
}  # fmt: skip
