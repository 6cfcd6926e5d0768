"""What the conversion of environments' steps, and the recorders, refuse."""

from __future__ import annotations

from importlib.util import find_spec
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

HAS_PETTINGZOO = find_spec("pettingzoo") is not None
if HAS_PETTINGZOO:
    from tests.multi_agent import AGENTS, Council, Meadow
THREE = np.zeros(3, bool)
TRANSITION = {
    "obs": np.zeros(3),
    "action": np.zeros(3),
    "reward": np.zeros(3),
    "next_obs": np.zeros(3),
}
TRANSITION |= {"terminated": THREE, "truncated": THREE}


def walkers(lanes: int = 3) -> Any:
    return SyncVectorEnv([Walk] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)


def from_env(env: Any, **given: Any) -> Any:
    return td.ReplayBuffer.from_env(env, 99, **given)


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
         r"pe \(3,\) before the step and of shape \(\) after it: give the observations before and after one step"),
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


# -- the recorders of PettingZoo's environments


def started_agents(env: Any) -> Any:
    """Return a buffer with the ``recorder`` of an environment of PettingZoo that has
    been reset."""
    rb = from_env(env)
    rb.recorder = (
        td.AECRecorder if isinstance(env, Council) else td.PettingZooRecorder
    )(rb, env)
    rb.recorder.reset(seed=1)
    return rb


def meadow() -> Any:
    return from_env(Meadow())


def council() -> Any:
    return from_env(Council())


def parallel(*given: Any) -> Any:
    return td.PettingZooRecorder(*given)


def turns(*given: Any) -> Any:
    return td.AECRecorder(*given)


def of_groups() -> list[Any]:
    wolves = AGENTS[:3]
    return [
        (
            {"all": AGENTS},
            SchemaError,
            "'wolf_0' and 'sheep' differ in their spaces: put them in groups of their",
        ),
        ({"wolf": wolves}, ValueError, "must name each of the agents"),
        (
            {"wolf": [*wolves, "wolf_0"], "sheep": ["sheep"]},
            ValueError,
            "must name each of the agents",
        ),
        (
            {"next": wolves, "sheep": ["sheep"]},
            ValueError,
            "not reserved for the transition, got 'next'",
        ),
        (
            ["wolf"],
            TypeError,
            "group_map must be a dict from names to lists of agents, got a list",
        ),
    ]


def of_agents() -> Table:
    small = {"sheep": {"observation": zeros(1, 2)}}
    return {
        ("PettingZooRecorder", meadow): [
            (lambda rb: parallel(rb, "meadow"), TypeError, "a ParallelEnv of PettingZoo or a list of them, got a str"),
            (lambda rb: parallel(rb, Council()), TypeError, "got a Council: AECRecorder records games whose agents"),
            (lambda rb: parallel(rb.storage, Meadow()), TypeError, "buffer must be a ReplayBuffer"),
            (lambda rb: parallel(rb, [Meadow(), Meadow()]), SchemaError, r"rows \[T\] hold .* one environment, got 2"),
            (lambda rb: parallel(from_env([Meadow()] * 3), [Meadow()] * 2), SchemaError, r"has lanes \(3,\), the"),
            (lambda rb: parallel(from_env([Meadow()] * 3).lane(0), [Meadow()] * 2), SchemaError, "lane 0 holds the"),
            (lambda rb: parallel(from_env(Meadow(), extras=small), Meadow()), SchemaError,
             r"gives \('sheep', 'observation'\) as torch.float64.*float32"),
            (lambda rb: from_env([Meadow(), Meadow(kind="dict")]), SchemaError, "1 has other agents or spaces"),
        ],
        ("schema_of agents", nothing): [
            (lambda _, groups=groups: td.schema_of(Meadow(), group_map=groups), error, word)
            for groups, error, word in of_groups()
        ],
        ("PettingZooRecorder.step", lambda: started_agents(Meadow())): [
            (lambda rb: rb.recorder.step({}), ValueError, r"needs an action of each living agent, \['wolf_0'"),
            (lambda rb: rb.recorder.reset(lanes=[True, False]), ValueError, "one element for each of 1 environments"),
            (lambda rb: rb.recorder.reset(seed=[1, 2]), ValueError, "one element for each of 1 environments"),
        ],
        ("AECRecorder", council): [
            (lambda rb: turns(rb, Meadow()), TypeError, "env must be an AECEnv .* take turns, got a Meadow"),
            (lambda rb: turns(rb.storage, Council()), TypeError, "must be a ReplayBuffer, or a dict from agents to la"),
            (lambda rb: turns({"dan": rb.lane(0)}, Council()), ValueError, r"has no agents \['dan'\]: its agents are"),
            (lambda rb: turns(rb, Council(unlike=True)), SchemaError, "'ann' and 'cy' differ .*: make buffers"),
            (lambda rb: from_env(Council(unlike=True)), SchemaError, "the agents 'ann' and 'cy' differ in their"),
            (lambda rb: turns(td.ReplayBuffer(), Council()), ValueError, "lanes are those of a Packed"),
            (lambda rb: turns(td.RolloutBuffer.from_env(Council(), 9), Council()), ValueError, "writes whole time ste"),
            (lambda rb: turns(td.ReplayBuffer.from_env([Meadow()] * 2, 30), Council()), SchemaError,
             "the buffer has 2 lanes, the environment 3 agents"),
        ],
        ("AECRecorder.step", lambda: started_agents(Council())): [
            (lambda rb: rb.recorder.step(None), ValueError, "agent 'ann' is alive, and needs an action, got None"),
            (lambda rb: rb.recorder.step(0.5), SchemaError, "'action' came as float64, expected int64"),
            (lambda rb: rb.recorder.step(0, action_mask=1.0), SchemaError, "'action_mask' has the name of an entry"),
        ],
    }  # fmt: skip


if HAS_PETTINGZOO:
    REFUSALS |= of_agents()
