"""The doctor: values that are not finite, or out of bounds; saved buffers, the command."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict
from torchrl.data import Bounded, Composite
from torchrl.envs import GymEnv, SerialEnv

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.__main__ import main
from rlbuf_td.diagnostics.doctor import check
from rlbuf_td.diagnostics.doctor.record import bounds_of
from tests.diagnostics.test_doctor import FAULTS, held, nested, walk


@cache
def _rows() -> TensorDict:
    return walk(1_200)[:, 0]


@pytest.fixture
def rows() -> TensorDict:
    return _rows().clone()


@pytest.mark.parametrize(
    ("key", "value"),
    [("observation", float("nan")), (("next", "observation"), float("inf")), (("next", "reward"), float("-inf"))],
)
def test_a_value_that_is_not_finite_is_found_once(rows: TensorDict, key: Any, value: float) -> None:
    for t in (7, 700, 701):
        rows[key][t, 0] = value
    (finding,) = check(rows)
    assert (finding.code, finding.rows, finding.count, finding.of) == ("not-finite", (7, 700, 701), 3, 1_200)
    assert finding.key == ((key,) if isinstance(key, str) else key)


def test_actions_are_looked_at_and_what_a_policy_stores_beside_them_is_not(rows: TensorDict) -> None:
    rows["action"] = rows["action"].float()
    rows["logits"] = torch.full((1_200, 2), float("-inf"))  # of actions that a mask excludes
    assert check(rows).codes == []
    rows["action"][3] = float("nan")
    assert [(each.code, each.key) for each in check(rows)] == [("not-finite", ("action",))]


def test_a_report_names_five_rows_and_the_gravest_finding_first(rows):
    rows["next", "reward"][100:200] = float("nan")
    rows["next", "done"] = rows["next", "done"].roll(1, 0)
    shifted, finding = check(rows)
    assert (shifted.code, finding.code) == ("done-shifted", "not-finite")
    assert (finding.rows, finding.count) == ((100, 101, 102, 103, 104), 100)
    assert "100 of 1,200 rows (8.3%): 100, 101, 102, 103, 104 ..." in str(finding)
    assert check(rows, ignore="not-finite").codes == ["done-shifted"]
    assert check(rows, ignore=["not-finite", "done-shifted"]).healthy


BOX = Box(np.array([-9.0, -9.0, -np.inf], np.float32), np.array([9.0, 9.0, np.inf], np.float32))
SPEC = Composite(observation=Bounded(torch.tensor([-9.0, -9.0, -99.0]), torch.tensor([9.0, 9.0, 99.0])))


@pytest.mark.parametrize("space", [BOX, Dict(observation=BOX), SPEC, SPEC["observation"]], ids=["Box", "Dict", "C", ""])
def test_an_observation_out_of_its_bounds_is_found(rows: TensorDict, space: Any) -> None:
    assert check(rows, space=space).codes == []
    rows["observation"][33, 1] = 9.5
    rows["next", "observation"][32, 1] = 9.5
    found = {each.key: each.rows for each in check(rows, space=space)}
    assert found == {("observation",): (33,), ("next", "observation"): (32,)}


def test_bounds_are_those_of_the_parts_of_a_space_or_of_one_of_several_environments() -> None:
    space = Dict(camera=Dict(pixels=Box(100, 255, (1, 12, 12), np.uint8)), body=Dict(speed=Box(-9, 9, (3,))))
    found = check(walk(1_200, observe=nested)[:, 0], space=space)
    assert {each.key for each in found} == {("camera", "pixels"), ("next", "camera", "pixels")}
    makers = gymnasium.make_vec("CartPole-v1", 2), gymnasium.make("CartPole-v1"), GymEnv("CartPole-v1")
    for env in (*makers, SerialEnv(2, lambda: GymEnv("CartPole-v1"))):
        assert bounds_of(env)[("observation",)][1][0] == pytest.approx(4.8)
    with pytest.raises(TypeError, match=r"must be a Gymnasium space, a TorchRL spec .* got str"):
        bounds_of("CartPole-v1")


def test_entries_of_float64_are_found_once_and_the_environment_is_taken_by_name(rows: TensorDict) -> None:
    for key in ("observation", ("next", "observation")):
        rows[key] = rows[key].double()
    (found,) = check(rows)
    assert (found.code, found.count) == ("float64", 1_200)
    assert "'observation', ('next', 'observation'): float64" in found.explanation
    wrapped = gymnasium.wrappers.DtypeObservation(gymnasium.make("CartPole-v1"), np.float32)
    assert wrapped.reset()[0].dtype == np.float32
    cart = torch.zeros(3, 4)
    cart[1] = 100.0
    for env in ("CartPole-v1", wrapped):
        assert check(TensorDict({"observation": cart}, [3]), env=env).codes == ["out-of-bounds"]
    with pytest.raises(ValueError, match="pass env or space, not both"):
        check(rows, env=wrapped, space=BOX)
    with pytest.raises(ValueError, match="CartPole"):
        check(rows, env="CartPole-v17")


def test_a_check_changes_nothing(rows: TensorDict) -> None:
    rb = ReplayBuffer(storage=PackedStorage(1_000), batch_size=4)
    rb.extend(rows)
    before = rb.storage.rows.matrix.clone()
    attached = list(rb.storage._attached_entities)
    generator = torch.random.get_rng_state()
    check(rb)
    assert torch.equal(rb.storage.rows.matrix.view(torch.uint8), before.view(torch.uint8))
    assert list(rb.storage._attached_entities) == attached
    assert torch.equal(torch.random.get_rng_state(), generator)


# -- saved buffers, and the command


def saved(folder: Path, fault: str | None = None, *, lanes: int = 1) -> Path:
    rows = walk(400, lanes)
    rows = rows if fault is None else FAULTS[fault][0](rows)
    rb = held(rows, "packed ring")
    rb.dumps(folder)
    return folder


def test_the_command_returns_1_for_findings_and_2_for_what_it_cannot_read(tmp_path, capsys):
    path = str(saved(tmp_path / "dump"))
    lanes = check(saved(tmp_path / "lanes", lanes=2))
    assert (lanes.codes, lanes.rows) == ([], 640)
    assert main(["doctor", path]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 320 rows read: nothing found")
    assert main(["doctor", path, "--env", "Pendulum-v1"]) == 1  # |cos| and |sin| are at most 1, these walks go further
    assert "out-of-bounds: ('next', 'observation')" in capsys.readouterr().out
    assert main(["doctor", path, "--env", "NoSuchPole-v1"]) == 2
    assert main(["doctor", path, "--ignore", "speed"]) == 2
    assert "there is no finding speed" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "cannot examine" in capsys.readouterr().err
    late = str(saved(tmp_path / "late", "done late"))
    assert main(["doctor", late]) == 1
    assert "320 rows read: 1 finding\n\ndone-shifted\n    " in capsys.readouterr().out
    assert main(["doctor", late, "--ignore", "done-shifted"]) == 0
