"""What the demos tell of their runs."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv

from rlbuf_td.cli.demos import report


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Always(torch.nn.Module):
    """Take the same action in every step."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.register_buffer("action", torch.tensor(action))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.action.expand(observation.shape[:-1])


def policy(action: int) -> TensorDictModule:
    return TensorDictModule(Always(action), ["observation"], ["action"])


def test_a_run_scores_episodes_as_it_is_told_to(tmp_path):
    returns = report.Run(make_env, tmp_path, 0, 500.0).evaluate(policy(0), seed=3, episodes=4)
    lengths = report.Run(make_env, tmp_path, 0, 500.0, score=len).evaluate(policy(0), seed=3, episodes=4)
    firsts = report.Run(make_env, tmp_path, 0, 500.0, score=lambda episode: 7.0).evaluate(policy(0), seed=3)
    assert 5 < returns == lengths < 20  # a reward of 1 a step
    assert firsts == 7.0


def test_the_last_of_the_best_policies_is_kept_and_tested_on_new_episodes(tmp_path):
    scores = iter([1.0] * 10 + [3.0] * 20 + [2.0] * 10 + [5.0] * 2)  # of four evaluations and the test
    run = report.Run(make_env, tmp_path, 0, 500.0, score=lambda episode: next(scores))
    for step, action in enumerate((0, 1, 0, 1)):
        run.is_solved_by(policy(action), step)
    tested = policy(1)
    run.test(tested, step=4, episodes=2)
    assert [score for _, score in run.evaluations] == [1.0, 3.0, 3.0, 2.0]
    assert int(tested.module.action) == 0  # the third one's
    assert run.final == 5.0


def test_a_comparison_gives_every_run_a_look_of_its_own(tmp_path, monkeypatch):
    drawn = []
    plot = Axes.plot

    def spy(axes, *arguments, **looks):
        drawn.append((arguments, looks))
        return plot(axes, *arguments, **looks)

    monkeypatch.setattr(Axes, "plot", spy)
    runs = {name: report.Run(make_env, tmp_path, 0, 500.0) for name in ("one", "two")}
    for shift, run in enumerate(runs.values()):
        run.evaluations = [(100, 1.0 + shift), (200, 2.0 + shift)]
        run.episodes = [(50, 0.0), (150, 4.0 + shift)]
    report.save_comparison(tmp_path / "picture.png", "Title", "score", runs)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    one, two = [(arguments, looks) for arguments, looks in drawn if "marker" in looks]
    assert one[0][:2] == ((100, 200), (1.0, 2.0))
    assert two[0][:2] == ((100, 200), (2.0, 3.0))
    assert one[0][2] != two[0][2]  # solid and dashed: grey tells them apart
    assert one[1]["marker"] != two[1]["marker"]
    assert (one[1]["label"], two[1]["label"]) == ("one", "two")
    assert ((50, 150), (0.0, 2.5), "--") in [arguments for arguments, _ in drawn]
