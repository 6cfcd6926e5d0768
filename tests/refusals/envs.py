"""What the conversion of environments' steps refuses."""

from __future__ import annotations

from rlbuf_td import SchemaError
from tests.refusals.makers import *

REFUSALS: Table = {
    ("make_transition", nothing): [
        (lambda _: td.make_transition(zeros(3), 0, ones(3), 1.0, False, False), SchemaError, r"'observation' is of sha"
         r"pe \(3,\) before the step and of shape \(\) after it: the arguments are obs, action, reward, next_obs"),
        (lambda _: td.make_transition({"a": 1}, 0, 1.0, {"b": 1}, False, False), SchemaError, "'a' .*missing after it"),
        *((lambda _, reward=reward: td.make_transition(1, 0, reward, 1, False, False), SchemaError, word)
          for reward, word in ((None, "numbers"), ("1", "numbers"), (1j, "real"), ({"a": 1}, "a number or an array"))),
    ],
}  # fmt: skip
