"""What the conversion of environments' steps refuses."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from rlbuf_td import SchemaError
from rlbuf_td.envs.specs import transition_schema
from tests.environments import Walk
from tests.refusals.makers import *

THREE = np.zeros(3, bool)
TRANSITION = {"obs": np.zeros(3), "action": np.zeros(3), "reward": np.zeros(3), "next_obs": np.zeros(3)}
TRANSITION |= {"terminated": THREE, "truncated": THREE}


def walkers(lanes: int = 3) -> Any:
    return SyncVectorEnv([Walk] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)


def from_env(env: Any) -> Any:
    return td.ReplayBuffer.from_env(env, 99)


def cart_poles() -> Any:
    return from_env(gymnasium.make_vec("CartPole-v1", num_envs=3))


def started(env: Any, infos: Any = {}, **extras: Any) -> Any:  # noqa: B006
    """Return a buffer with a step of its ``recorder``, if the step has extras."""
    rb = from_env(env)
    rb.recorder = td.GymnasiumRecorder(rb, env, infos=infos)
    rb.recorder.reset(seed=0)
    if extras:
        rb.recorder.step(0, **extras)
    return rb


REFUSALS: Table = {
    ("make_transition", nothing): [
        (lambda _: td.make_transition(zeros(3), 0, ones(3), 1.0, False, False), SchemaError, r"'observation' is of sha"
         r"pe \(3,\) before the step and of shape \(\) after it: the arguments are obs, action, reward, next_obs"),
        (lambda _: td.make_transition({"a": 1}, 0, 1.0, {"b": 1}, False, False), SchemaError, "'a' .*missing after it"),
        *((lambda _, reward=reward: td.make_transition(1, 0, reward, 1, False, False), SchemaError, word)
          for reward, word in ((None, "numbers"), ("1", "numbers"), (1j, "real"), ({"a": 1}, "a number or an array"))),
    ],
    **{("transition_schema", nothing): [
        *((lambda _, space=space: transition_schema(space, spaces.Discrete(2)), SchemaError, word) for space, word in [
            (spaces.Text(5), "'observation' is a Text space, which has no fixed size"),
            (spaces.Dict(a=spaces.Dict(b=spaces.Sequence(spaces.Discrete(2)))), r"'a', 'b'\) is a Sequence"),
            (spaces.Tuple((spaces.Graph(spaces.Box(0, 1, (2,)), None),)), r"\('observation', '0'\) is a Graph"),
            (spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))), "is a OneOf space"),
            (spaces.Box(-1, 1, (2,), np.longdouble), "has dtype float128, which torch does not have"),
            (spaces.Dict(action=spaces.Discrete(2)), "a key 'action', which is reserved"),
            (spaces.Dict({3: spaces.Discrete(2)}), "keys are strings, got 3 of type int"),
        ]),
        (lambda _: transition_schema(spaces.Discrete(2), 2), TypeError, "the action space must be .*, got a int"),
        (lambda _: transition_schema(spaces.Discrete(2), spaces.Discrete(2), 0), ValueError, "num_envs must be at"),
        (lambda _: td.schema_of("CartPole-v1"), TypeError, "a str has no keys, dtypes and shapes"),
        (lambda _: td.schema_of(TensorDict({"name": "x", "value": zeros(())}, [])), SchemaError, "holds non-tensor"),
        (lambda _: td.schema_of(steps(3), extras={"x": np.zeros(2)}), SchemaError, r"'x' has shape \(2,\), expected"),
    ]},
    ("make_transition, three environments", nothing): [
        *((lambda _, it=it: td.make_transition(**(TRANSITION | it)), SchemaError, word) for it, word in [
            ({"obs": {"a": {"b": "text"}}}, r"\('a', 'b'\) is a str of dtype <U4, which no tensor can hold"),
            ({"obs": {"a": np.zeros(3, object)}}, "'a' is a ndarray of dtype object"),
            ({"obs": {1: 2}}, "keys are strings, got 1"),
            ({"obs": {"next": 1}}, "a key 'next', which is reserved for the transition"),
            ({"obs": {"a": 1.0}, "next_obs": {"a": 1.0}}, r"'a' has shape \(\), expected the leading dims"),
            ({"terminated": 0}, "'terminated' must be bool, or an array of bool, got torch.int64"),
            ({"truncated": np.zeros(2, bool)}, r"'truncated' has shape \(2,\), expected that of 'terminated', \(3,\)"),
            ({"action": np.zeros(2)}, r"'action' has shape \(2,\), expected the leading dims \(3,\)"),
            ({"reward": 1.0}, r"\('next', 'reward'\) has shape \(\), expected the leading dims \(3,\)"),
            ({"reward": np.array([1, 2**24 + 1, 0])}, "16777217, which float32 changes to .*: pass rewards as a"),
            ({"next": 3}, "the extra 'next' must be a dict"),
            ({"next": {"done": True}}, "the extra 'done' has the name"),
            ({"observation": np.zeros(3)}, "the extra 'observation' has the name"),
        ]),
    ],
    **{("GymnasiumRecorder", walkers): [
        *((lambda env, made=made, given=given: td.GymnasiumRecorder(made(env), env, **given), error, word)
          for made, given, error, word in [
            (lambda env: cart_poles(), {}, SchemaError, r"gives 'observation' as torch.float32 of shape \(2,\)"),
            (lambda env: td.ReplayBuffer.from_env(walkers(1), 99), {}, SchemaError, r"has lanes \(1,\), the"),
            (lambda env: td.PackedStorage(3), {}, TypeError, "buffer must be"),
            (lambda env: td.RolloutBuffer(10), {}, SchemaError, r"rows \[T\] hold .* one environment, got 3.*\[T, 3\]"),
            (from_env, {"infos": ["energy"]}, TypeError, "infos must be a dict .*'score': 0.0}, got a list"),
            (lambda env: from_env(env).lane(1), {}, SchemaError, "lane 1 holds the transitions of one environment"),
            (lambda env: td.ReplayBuffer.from_schema(td.schema_of(env), 99).share(), {}, SchemaError,
             r"have no \('collector', 'traj_ids'\).*extras="),
        ]),
        (lambda env: td.GymnasiumRecorder(from_env(env).lane(1), gymnasium.make("CartPole-v1")), SchemaError,
         "the buffer's rows hold torch.float32 of shape"),
        (lambda env: td.GymnasiumRecorder(td.RolloutBuffer.from_env(env, 9).lane(0), Walk()), ValueError,
         "use a ReplayBuffer with a RingWriter, or record all lanes"),
        (lambda env: td.GymnasiumRecorder(td.GymnasiumRecorder(from_env(env), env), env), TypeError, "got a"),
    ]},
    **{("GymnasiumRecorder.step", lambda env=env, given=given: started(env(), **given)): [
        (lambda rb, do=do: do(rb.recorder), error, word)] for env, given, do, error, word in [
        (Walk, {}, lambda recorder: recorder.step(0.5), SchemaError, "'action' came as float64, expected int64"),
        (Walk, {}, lambda recorder: recorder.step(0, observation=1.0), SchemaError, "'observation' has the name"),
        (Walk, {"note": 1.0}, lambda recorder: recorder.step(0), SchemaError, "the first step had"),
        (Walk, {"note": 1.0}, lambda recorder: recorder.step(0, note=1.0, value=1.0), SchemaError, "the first step"),
        (Walk, {"note": 1.0}, lambda recorder: recorder.step(0, note=np.zeros(2)), SchemaError, "'note' came with"),
        (Walk, {"infos": {"energy": False}}, lambda recorder: recorder.step(0), SchemaError, r"'energy'\) came as"),
    ]},
}  # fmt: skip
