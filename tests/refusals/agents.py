"""What the recorders of PettingZoo's environments refuse."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from rlbuf_td import SchemaError
from tests.refusals.makers import *

HAS_PETTINGZOO = find_spec("pettingzoo") is not None
if HAS_PETTINGZOO:
    from tests.multi_agent import AGENTS, Council, Meadow


def from_env(env: Any, **given: Any) -> Any:
    return td.ReplayBuffer.from_env(env, 30, **given)


def started(env: Any) -> Any:
    """Return a buffer with the ``recorder`` of an environment that has been reset."""
    rb = from_env(env)
    rb.recorder = (td.AECRecorder if isinstance(env, Council) else td.PettingZooRecorder)(rb, env)
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
        ({"all": AGENTS}, SchemaError, "'wolf_0' and 'sheep' differ in their spaces: put them in groups of their"),
        ({"wolf": wolves}, ValueError, "must name each of the agents"),
        ({"wolf": [*wolves, "wolf_0"], "sheep": ["sheep"]}, ValueError, "must name each of the agents"),
        ({"next": wolves, "sheep": ["sheep"]}, ValueError, "not reserved for the transition, got 'next'"),
        (["wolf"], TypeError, "group_map must be a dict from names to lists of agents, got a list"),
    ]


def table() -> Table:
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
        ("PettingZooRecorder.step", lambda: started(Meadow())): [
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
        ("AECRecorder.step", lambda: started(Council())): [
            (lambda rb: rb.recorder.step(None), ValueError, "agent 'ann' is alive, and needs an action, got None"),
            (lambda rb: rb.recorder.step(0.5), SchemaError, "'action' came as float64, expected int64"),
            (lambda rb: rb.recorder.step(0, action_mask=1.0), SchemaError, "'action_mask' has the name of an entry"),
        ],
    }  # fmt: skip


REFUSALS: Table = table() if HAS_PETTINGZOO else {}
