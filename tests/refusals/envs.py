"""What the conversion of environments' steps, and the recorders, refuse."""

from __future__ import annotations

from importlib.util import find_spec

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.environments import Walk
from tests.refusals.makers import *

HAS_PETTINGZOO = find_spec("pettingzoo") is not None
if HAS_PETTINGZOO:
    from tests.multi_agent import AGENTS, Council, Meadow


def walkers(lanes: int = 3):
    return SyncVectorEnv([Walk] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)


def from_env(env, **given):
    return td.ReplayBuffer.from_env(env, 99, **given)


def cart_poles():
    return from_env(gymnasium.make_vec("CartPole-v1", num_envs=3))


def started(env, infos={}, **extras):  # noqa: B006
    """Return a buffer with a step of its ``recorder``, if the step has extras."""
    rb = from_env(env)
    rb.recorder = td.GymnasiumRecorder(rb, env, infos=infos)
    rb.recorder.reset(seed=0)
    if extras:
        rb.recorder.step(0, **extras)
    return rb


REFUSALS: Table = {
    ("GymnasiumRecorder", walkers): [
        *each(lambda env, made: td.GymnasiumRecorder(made(env), env),
              (lambda env: cart_poles(), r"SchemaError: gives 'observation' as torch.float32 of shape \(2,\)"),
              (lambda env: from_env(walkers(1)), r"SchemaError: has lanes \(1,\), the"),
              (lambda env: td.PackedStorage(3), "TypeError: buffer must be"),
              (lambda env: td.GymnasiumRecorder(from_env(env), env), "TypeError: got a"),
              (lambda env: td.RolloutBuffer(10),
               r"SchemaError: rows \[T\] hold .* one environment, got 3.*\[T, 3\]"),
              (lambda env: from_env(env).lane(1), "SchemaError: lane 1 holds the transitions of one environment"),
              (lambda env: td.ReplayBuffer.from_schema(td.schema_of(env), 99).share(),
               r"SchemaError: have no \('collector', 'traj_ids'\).*extras=")),
        (lambda env: td.GymnasiumRecorder(from_env(env), env, infos=["energy"]),
         "TypeError: infos must be a dict .*'score': 0.0}, got a list"),
        (lambda env: td.GymnasiumRecorder(from_env(env).lane(1), gymnasium.make("CartPole-v1")),
         "SchemaError: the buffer's rows hold torch.float32 of shape"),
        (lambda env: td.GymnasiumRecorder(td.RolloutBuffer.from_env(env, 9).lane(0), Walk()),
         "ValueError: use a ReplayBuffer with a RingWriter, or record all lanes"),
    ],
    **{("GymnasiumRecorder.step", lambda options=options: started(Walk(), **options)): each(
        lambda rb, step: rb.recorder.step(**{"action": 0} | step), *cases) for options, cases in [
        ({}, [({"action": 0.5}, "SchemaError: 'action' came as float64, expected int64"),
              ({"observation": 1.0}, "SchemaError: 'observation' has the name")]),
        ({"note": 1.0}, [({}, "SchemaError: the first step had"),
                         ({"note": 1.0, "value": 1.0}, "SchemaError: the first step"),
                         ({"note": np.zeros(2)}, "SchemaError: 'note' came with")]),
        ({"infos": {"energy": False}}, [({}, r"SchemaError: 'energy'\) came as")]),
    ]},
}  # fmt: skip


# -- the recorders of PettingZoo's environments


def started_agents(env):
    """Return a buffer with the ``recorder`` of an environment of PettingZoo that has
    been reset."""
    rb = from_env(env)
    rb.recorder = (
        td.AECRecorder if isinstance(env, Council) else td.PettingZooRecorder
    )(rb, env)
    rb.recorder.reset(seed=1)
    return rb


def meadow():
    return from_env(Meadow())


def council():
    return from_env(Council())


def parallel(*given):
    return td.PettingZooRecorder(*given)


def turns(*given):
    return td.AECRecorder(*given)


def of_agents() -> Table:
    small, wolves = {"sheep": {"observation": zeros(1, 2)}}, AGENTS[:3]
    return {
        ("PettingZooRecorder", meadow): [
            (lambda rb: parallel(rb, "meadow"), "TypeError: a ParallelEnv of PettingZoo or a list of them, got a str"),
            (lambda rb: parallel(rb, Council()), "TypeError: got a Council: AECRecorder records games whose agents"),
            (lambda rb: parallel(rb.storage, Meadow()), "TypeError: buffer must be a ReplayBuffer"),
            (lambda rb: parallel(rb, [Meadow(), Meadow()]), r"SchemaError: rows \[T\] hold .* one environment, got 2"),
            (lambda rb: parallel(from_env([Meadow()] * 3), [Meadow()] * 2), r"SchemaError: has lanes \(3,\), the"),
            (lambda rb: parallel(from_env([Meadow()] * 3).lane(0), [Meadow()] * 2), "SchemaError: lane 0 holds the"),
            (lambda rb: parallel(from_env(Meadow(), extras=small), Meadow()),
             r"SchemaError: gives \('sheep', 'observation'\) as torch.float64.*float32"),
            (lambda rb: from_env([Meadow(), Meadow(kind="dict")]), "SchemaError: 1 has other agents or spaces"),
        ],
        ("schema_of agents", nothing): each(
            lambda _, groups: td.schema_of(Meadow(), group_map=groups),
            ({"all": AGENTS}, "SchemaError: 'wolf_0' and 'sheep' differ in their spaces: put them in groups of their"),
            ({"wolf": wolves}, "ValueError: must name each of the agents"),
            ({"wolf": [*wolves, "wolf_0"], "sheep": ["sheep"]}, "ValueError: must name each of the agents"),
            ({"next": wolves, "sheep": ["sheep"]}, "ValueError: not reserved for the transition, got 'next'"),
            (["wolf"], "TypeError: group_map must be a dict from names to lists of agents, got a list")),
        ("PettingZooRecorder.step", lambda: started_agents(Meadow())): [
            (lambda rb: rb.recorder.step({}), r"ValueError: needs an action of each living agent, \['wolf_0'"),
            (lambda rb: rb.recorder.reset(lanes=[True, False]), "ValueError: one element for each of 1 environments"),
            (lambda rb: rb.recorder.reset(seed=[1, 2]), "ValueError: one element for each of 1 environments"),
        ],
        ("AECRecorder", council): [
            (lambda rb: turns(rb, Meadow()), "TypeError: env must be an AECEnv .* take turns, got a Meadow"),
            (lambda rb: turns(rb.storage, Council()), "TypeError: must be a ReplayBuffer, or a dict from agents to la"),
            (lambda rb: turns({"dan": rb.lane(0)}, Council()), r"ValueError: has no agents \['dan'\]: its agents are"),
            (lambda rb: turns(rb, Council(unlike=True)), "SchemaError: 'ann' and 'cy' differ .*: make buffers"),
            (lambda rb: from_env(Council(unlike=True)), "SchemaError: the agents 'ann' and 'cy' differ in their"),
            (lambda rb: turns(td.ReplayBuffer(), Council()), "ValueError: lanes are those of a Packed"),
            (lambda rb: turns(td.RolloutBuffer.from_env(Council(), 9), Council()), "ValueError: writes whole time ste"),
            (lambda rb: turns(td.ReplayBuffer.from_env([Meadow()] * 2, 30), Council()),
             "SchemaError: the buffer has 2 lanes, the environment 3 agents"),
        ],
        ("AECRecorder.step", lambda: started_agents(Council())): [
            (lambda rb: rb.recorder.step(None), "ValueError: agent 'ann' is alive, and needs an action, got None"),
            (lambda rb: rb.recorder.step(0.5), "SchemaError: 'action' came as float64, expected int64"),
            (lambda rb: rb.recorder.step(0, action_mask=1.0), "SchemaError: 'action_mask' has the name of an entry"),
        ],
    }  # fmt: skip


if HAS_PETTINGZOO:
    REFUSALS |= of_agents()
