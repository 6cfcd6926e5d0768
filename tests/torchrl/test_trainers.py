"""TorchRL's trainers, made from its Hydra configurations with our parts as targets,
train and resume; its collectors write real environments into buffers and rollouts."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
)
from torchrl.checkpoint import Checkpoint, GlobalRNGState
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import (
    MLP,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate

from tests.backends import needs_torchrl

hydra = pytest.importorskip("hydra")
data = pytest.importorskip("torchrl.trainers.algorithms.configs.data")
trainers = pytest.importorskip("torchrl.trainers.algorithms.configs.trainers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # TorchRL's trainers give them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FRAMES = 200
UNIFORM = data.RandomSamplerConfig(_target_="rlbuf_td.UniformSampler")
PROPORTIONAL = data.PrioritizedSamplerConfig(
    _target_="rlbuf_td.ProportionalSampler",
    max_capacity=FRAMES,
    alpha=0.6,
    beta=0.4,
    eps=1e-8,
    reduction="max",
)
MINIBATCHES = data.SamplerWithoutReplacementConfig(
    _target_="rlbuf_td.MinibatchSampler", drop_last=True
)


def make_buffer(sampler: Any) -> Any:
    """Return a buffer as TorchRL's configurations describe it, every keyword of theirs
    included."""
    config = data.TensorDictReplayBufferConfig(
        _target_="rlbuf_td.ReplayBuffer",
        storage=data.LazyTensorStorageConfig(
            _target_="rlbuf_td.PackedStorage", max_size=FRAMES
        ),
        sampler=sampler,
        writer=data.RoundRobinWriterConfig(_target_="rlbuf_td.RingWriter"),
        batch_size=20,
    )
    return hydra.utils.instantiate(config)


def dqn(env: GymEnv) -> tuple[Any, dict[str, Any]]:
    policy = QValueActor(
        MLP(4, 2, num_cells=[16]), in_keys=["observation"], spec=env.action_spec
    )
    loss_module = DQNLoss(policy, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    return loss_module, {
        "value_network": policy,
        "target_net_updater": SoftUpdate(loss_module, eps=0.9),
    }


def sac(env: GymEnv) -> tuple[Any, dict[str, Any]]:
    network = torch.nn.Sequential(MLP(3, 2, num_cells=[16]), NormalParamExtractor())
    head = TensorDictModule(network, ["observation"], ["loc", "scale"])
    settings: Any = {
        "distribution_class": TanhNormal,
        "default_interaction_type": InteractionType.RANDOM,
    }
    actor = ProbabilisticActor(
        head, in_keys=["loc", "scale"], spec=env.action_spec, **settings
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation", "action"])
    loss_module = SACLoss(actor, critic, num_qvalue_nets=2)
    loss_module.make_value_estimator(gamma=0.99)
    return loss_module, {
        "actor_network": actor,
        "target_net_updater": SoftUpdate(loss_module, eps=0.9),
    }


def ppo(env: GymEnv) -> tuple[Any, dict[str, Any]]:
    head = TensorDictModule(MLP(4, 2, num_cells=[16]), ["observation"], ["logits"])
    law = torch.distributions.OneHotCategorical
    actor = ProbabilisticActor(
        head,
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=law,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation"])
    return ClipPPOLoss(actor, critic), {
        "actor_network": actor,
        "critic_network": critic,
        "num_epochs": 2,
    }


def interrupted(buffer: Any, folder: Path) -> None:
    """Write and sample until a signal asks to stop; save, and go on with another buffer
    from what was saved."""
    from torchrl.checkpoint import RunCheckpointer, StopOnSignal

    def run(rb: Any, resume: Path | None, steps: int) -> tuple[list[torch.Tensor], Any]:
        saved = RunCheckpointer(
            Checkpoint(replay_buffer=rb, rng=GlobalRNGState()),
            directory=folder,
            interval=100,
            resume_path=resume,
        )
        assert saved.restore() is (resume is not None)
        drawn = []
        with StopOnSignal() as stop:
            for step in range(steps):
                rb.extend(TensorDict({"x": torch.rand(10)}, [10]))
                drawn.append(rb.sample()["x"])
                if step == 2 and resume is None:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stop.requested:
                    saved.save(step + 1, force=True)
                    break
        return drawn, stop

    first, stop = run(buffer(), None, 9)
    assert (len(first), stop.signal_name) == (3, "SIGTERM")
    state = torch.get_rng_state()
    torch.manual_seed(5)
    after, _ = run(buffer(), folder, 2)
    torch.set_rng_state(state)
    again, _ = run(buffer(), folder, 2)
    assert all(map(torch.equal, after, again))


@needs_torchrl("stop signals")
@pytest.mark.parametrize(
    "sampler", [UNIFORM, PROPORTIONAL], ids=["uniform", "proportional"]
)
def test_a_run_that_a_signal_stops_goes_on_with_the_same_numbers(
    sampler: Any, tmp_path: Path
) -> None:
    interrupted(lambda: make_buffer(sampler), tmp_path)


CASES: dict[str, tuple[Any, Any, Any, str]] = {
    "DQN by priority": (dqn, trainers.DQNTrainerConfig, PROPORTIONAL, "CartPole-v1"),
    "SAC": (sac, trainers.SACTrainerConfig, UNIFORM, "Pendulum-v1"),
    "PPO": (ppo, trainers.PPOTrainerConfig, MINIBATCHES, "CartPole-v1"),
}


def make_trainer(case: str, **kwargs: Any) -> Any:
    learner, config, sampler, name = CASES[case]
    torch.manual_seed(0)
    env = GymEnv(name)
    env.set_seed(0)
    loss_module, parts = learner(env)
    collector = partial(
        Collector,
        env,
        frames_per_batch=50,
        total_frames=FRAMES,
        auto_register_policy_transforms=False,
    )
    # which gives its policy with exploration
    if config is not trainers.DQNTrainerConfig:
        collector = partial(collector, parts["actor_network"])
    parts |= {
        "collector": collector,
        "loss_module": loss_module,
        "replay_buffer": make_buffer(sampler),
        **kwargs,
    }
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
    missing = dict.fromkeys(["collector", "loss_module", "optimizer", "replay_buffer"])
    settings = {
        "total_frames": FRAMES,
        "optim_steps_per_batch": 3,
        "logger": None,
        "save_trainer_file": None,
    }
    settings |= {"progress_bar": False, "enable_logging": False}
    return hydra.utils.instantiate(
        config(**missing, **settings), optimizer=optimizer, **parts
    )


@needs_torchrl("stop signals")
def test_a_trainer_stops_at_a_signal_and_saves(tmp_path: Path) -> None:
    trainer = make_trainer(
        "SAC", checkpoint=Checkpoint(), save_trainer_file=str(tmp_path / "saved")
    )
    trainer.register_op("post_steps", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with trainer.stop_on_signal() as stop:
        trainer.train()
    assert stop.requested
    assert trainer.collected_frames < FRAMES
    restored = make_trainer("SAC", checkpoint=Checkpoint())
    restored.load_from_file(tmp_path / "saved")
    assert restored.collected_frames == trainer.collected_frames
    assert (restored.replay_buffer.storage[:] == trainer.replay_buffer.storage[:]).all()


@pytest.mark.parametrize("form", ["directory", "archive"])
@pytest.mark.parametrize("case", CASES)
def test_trainers_train_and_go_on_from_their_checkpoints(
    case: str, form: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(
        case,
        checkpoint=Checkpoint(format=form),
        save_trainer_file=str(tmp_path / "saved"),
    )
    before = [p.detach().clone() for p in trainer.loss_module.parameters()]
    trainer.train()  # saves at its end
    after = list(trainer.loss_module.parameters())
    assert any(
        not torch.equal(old, new) for old, new in zip(before, after, strict=True)
    )
    restored = make_trainer(case, checkpoint=Checkpoint(format=form))
    restored.load_from_file(tmp_path / "saved")
    assert restored.collected_frames == FRAMES
    assert all(
        torch.equal(own, new)
        for own, new in zip(restored.loss_module.parameters(), after, strict=True)
    )
    batches = []
    for rb in (trainer.replay_buffer, restored.replay_buffer):
        torch.manual_seed(1)
        batches.append([rb.sample().exclude("td_error") for _ in range(3)])
    assert all((ours == saved).all() for ours, saved in zip(*batches, strict=True))
