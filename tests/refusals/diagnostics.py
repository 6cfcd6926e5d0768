"""What diagnostics refuse."""

from __future__ import annotations

from tensordict import TensorDict

from rlbuf_td import SchemaError
from rlbuf_td.diagnostics.memory_plan import priority_bytes
from tests.diagnostics.test_episode_stats import KEYS, play
from tests.refusals.makers import *

REFUSALS: Table = {
    ("EpisodeStats", nothing): [
        *((lambda _, given=given: td.EpisodeStats(**given), ValueError, word) for given, word in [
            ({"window": 0}, "window must be a whole number, at least 1, got 0"),
            ({"keys": {("next", "speed"): "median"}}, "metrics are reduced by 'sum', 'mean' or 'last', got .*median"),
            ({"keys": ["speed", ("next", "speed")]}, "needs a unique name"),
            ({"keys": ["return"]}, "needs a unique name"),
            ({"reasons": [("next", "truncated")]}, "needs a unique name"),
        ]),
    ],
    ("EpisodeStats.update", lambda: td.EpisodeStats(KEYS)): [
        (lambda stats: stats.update(play(2, 5, 0).exclude("height")), KeyError, "no 'height' in the data"),
        (lambda stats: stats.update(play(2, 5, 0).exclude(*ENDS, ("next", "truncated"))), KeyError, r"no \('next'"),
        (lambda stats: stats.update(play(2, 5, 0)[0, 0]), ValueError, "no time dim -1 in batch size"),
        (lambda stats: stats.update(play(2, 5, 0).set(REWARD, zeros(2, 5, 3))), ValueError, "one number per step, got"),
        (lambda stats: stats.update(play(2, 5, 0).set(("collector", "traj_ids"), zeros(2, 5, 2).long())), ValueError,
         r"got \('collector', 'traj_ids'\) of shape \[2, 5, 2\] for 10 steps"),
        (lambda stats: stats.load_state_dict(td.EpisodeStats().state_dict()), ValueError, "make EpisodeStats with the"),
    ],
    ("plan", nothing): [
        (lambda _: td.plan("CartPole-v1", 10), TypeError, "has no keys, dtypes and shapes"),
        (lambda _: td.plan(steps()), TypeError, "capacity must be a whole number, at least 1, got None"),
        (lambda _: td.plan(TensorDict({"s": "text"}), 10), SchemaError, "'s' .*non-tensor"),
        (lambda _: td.plan(fresh()), TypeError, "has not been written to"),
        (lambda _: priority_bytes("random", 10), TypeError, "must be one of uniform, proportional, rank, .* got"),
        (lambda _: priority_bytes(td.NStepSampler, 10), TypeError, "wraps a sampler that its class does not specify"),
    ],
    ("check", nothing): [
        (lambda _: td.check(3), TypeError, "the doctor reads a buffer, a storage, .* not a int"),
        (lambda _: td.check(of_numbers()), TypeError, "storages of TensorDicts, not a ListStorage"),
        (lambda _: td.check(td.PackedStorage(10)), ValueError, "the buffer is empty: there is nothing to read"),
        (lambda _: td.check(quietly(emptied)), ValueError, "the buffer is empty: there is nothing to read"),
        (lambda _: td.check("/nowhere/at/all"), td.CheckpointError, "holds no dump: there is no such folder"),
        (lambda _: td.check(filled(), ignore="speed"), ValueError, "there is no finding speed; there are lanes-mixed"),
    ],
}  # fmt: skip
