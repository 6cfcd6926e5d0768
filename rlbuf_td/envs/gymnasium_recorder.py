"""Record the transitions of a running Gymnasium environment in a buffer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.envs.infos import fill_, fill_final_, fill_infos_, info_example, joined, part_of, to_array
from rlbuf_td.envs.lane_queues import LaneQueues
from rlbuf_td.envs.recorder_state import (
    BufferLane,
    TrajectoryNumbers,
    array_of,
    buffer_state,
    checked_buffer,
    copied,
    refuse_other,
    refuse_other_rows,
    resume_buffer,
    saved_rows,
    schema_of_rows,
)
from rlbuf_td.envs.specs import Key, autoreset_mode_of, paths_of, schema_of, show_extra
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.storages.checks import state_of
from rlbuf_td.storages.indexing import attached_or_new, stand_apart
from rlbuf_td.storages.notebooks import ROLLOUTS, TRANSITIONS
from rlbuf_td.storages.schema import show_key, walk
from rlbuf_td.writers import RolloutWriter

_REWARD, _DONE = ("next", "reward"), ("next", "done")
_GIVEN = _REWARD, ("next", "terminated"), ("next", "truncated")
_REMEDY = "make the buffer with from_env(env, ...)"
_FAR_AHEAD = 1_024
_SAME_STEP = (
    "gymnasium.make_vec(id, num_envs, vectorization_mode='sync', "
    "vector_kwargs={'autoreset_mode': gymnasium.vector.AutoresetMode.SAME_STEP})"
)


class GymnasiumRecorder:
    """Steps a Gymnasium environment, and stores the transitions in a buffer.

    :meth:`reset` and :meth:`step` return the environment's results unchanged. With same-step autoreset, the stored next
    observation at the end of an episode is ``final_obs`` from the infos. With next-step autoreset, the steps that only
    reset the environment are not stored. ``done`` is ``terminated | truncated``. A reward is a number or an array, such
    as one number per objective. Rewards are stored as float32; a whole number that float32 lacks, such as 2**24 + 1,
    raises a SchemaError, unless the buffer was made with a float64 reward in ``extras``.

    Each episode has a unique number, stored under ``trajectory_key``. If ``reset`` interrupts an episode, its last
    transition keeps ``done=False``, and the next episode has a new number. Loading a checkpoint into the buffer
    interrupts all episodes and drops the :attr:`pending` transitions; call :meth:`reset` before the next step. If the
    environment can restore its state, :meth:`state_dict` and :meth:`load_state_dict` go on in mid-episode instead.

    In a buffer ``[T, E]``, environment ``e`` is lane ``e``, and each transition is written at once. With next-step
    autoreset, a lane that begins an episode has no transition in that step, and the lanes get unlike lengths (see
    :meth:`ReplayBuffer.lane`). If the storage, the writer or the sampler cannot have such lanes, a time step is written
    when every lane has its transition for this step, and transitions of lanes that are ahead wait in memory;
    ``rb.health()`` counts them. If a lane falls 1,024 steps behind, a warning says so. Rollouts require same-step
    autoreset, ``SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)``, with which the lanes stay together.

    A buffer ``[T]`` stores the transitions of a single environment immediately. With several environments, each lane
    collects transitions in memory. They are stored together when the lane's episode ends, or when the lane holds
    ``stretch`` of them. :meth:`flush` stores the transitions of all lanes.

    With ``rb.lane(e)`` in place of the buffer, a single environment (or a vector environment with one sub-environment)
    is lane ``e`` of a replay buffer ``[T, E]``. Each actor, in a thread or after ``rb.share()`` in a process, then has
    a recorder of its own, and waits for no other. The lane gets the same rows as from a vector environment.

    Args:
        buffer: a :class:`ReplayBuffer` or :class:`RolloutBuffer`, for example from ``from_env(env, ...)``; or one lane
            of a :class:`ReplayBuffer`, ``rb.lane(e)``.
        env: a Gymnasium environment, or a vector environment.
        infos: names of infos to store under ``"next"``, such as ``"score"`` or the nested ``("episode", "r")``. Every
            step must return each info, unless ``infos`` is a dict from names to default values.
        trajectory_key: the key of the episode numbers. With ``None``, no numbers are stored, and a ``reset`` that would
            interrupt an episode raises an error.
        stretch: the number of transitions that a lane collects before they are stored, with a buffer ``[T]`` and
            several environments.
        autoreset_mode: the autoreset mode of a vector environment whose metadata does not have it. This argument does
            not change the environment.

    Raises:
        TypeError: ``buffer``, ``env`` or ``infos`` has the wrong type.
        ValueError: ``stretch`` is below 1; ``autoreset_mode`` contradicts the environment's metadata; a RolloutBuffer
            is combined with several environments that reset in the next step, or is ``[T]``; or the buffer of a lane
            cannot write single lanes.
        SchemaError: the environment's transitions do not fit the buffer's rows or lanes, or a lane gets several
            environments.
        RuntimeError: ``trajectory_key`` is ``None``, and the newest stored step has ``done=False`` in a lane. The
            next episode would seem to continue this step.

    Warns:
        RuntimeWarning: neither the metadata nor ``autoreset_mode`` gives the autoreset mode of a vector environment;
            or a lane is 1,024 steps behind another.

    Cost: about 0.3 ms per step of 16 environments in a training loop, without the time of the environments
    (``python -m rlbuf_td bench --only record``).

    TorchRL has no recorder for Gymnasium environments; its collectors step TorchRL environments.

    Example:
        >>> import gymnasium
        >>> from rlbuf_td import GymnasiumRecorder, ReplayBuffer
        >>> env = gymnasium.make_vec("CartPole-v1", num_envs=2)
        >>> rb = ReplayBuffer.from_env(env, 1_000, batch_size=8)
        >>> recorder = GymnasiumRecorder(rb, env)
        >>> obs, info = recorder.reset(seed=0)
        >>> for _ in range(100):
        ...     obs, reward, terminated, truncated, info = recorder.step(env.action_space.sample())
        >>> rb.sample()["next", "observation"].shape
        torch.Size([8, 4])
    """

    def __init__(
        self,
        buffer: TensorDictReplayBuffer | BufferLane,
        env: Any,
        *,
        infos: Sequence[str | Key] | Mapping[Any, Any] = (),
        trajectory_key: Key | None = ("collector", "traj_ids"),
        stretch: int = 1_000,
        autoreset_mode: Any = None,
    ) -> None:
        #: The number of the lane to which this recorder writes; None: all lanes of the buffer, or a buffer ``[T]``.
        self._lane = buffer.number if isinstance(buffer, BufferLane) else None
        buffer = checked_buffer(buffer.buffer if isinstance(buffer, BufferLane) else buffer)
        if stretch < 1:
            raise ValueError(f"stretch must be at least 1, got {stretch}")
        if isinstance(infos, str):
            raise TypeError(f"infos must be a sequence of names or a dict with defaults, got the string {infos!r}")
        schema = schema_of(env)
        self.buffer, self.env, self.stretch = buffer, env, stretch
        self._single = not schema.ndim
        self._lanes = 1 if self._single else schema.shape[0]
        self._flat = buffer.storage.ndim == 1
        self._mode = autoreset_mode_of(env, autoreset_mode, self._single)
        self._refuse_lanes()
        self._obs_paths, self._action_paths = paths_of(env, schema, self._single)
        self._next_paths = [(("next", *key), path) for key, path in self._obs_paths]
        defaults = infos if isinstance(infos, Mapping) else dict.fromkeys(infos)
        self._infos = {(name,) if isinstance(name, str) else tuple(name): value for name, value in defaults.items()}
        self._trajectory_key = trajectory_key
        self._schema = self._fitted(schema.unsqueeze(0) if self._single else schema)
        self._queues: LaneQueues | None = None  # None before the first step
        self._obs: Any = None
        self._ended = np.zeros(self._lanes, bool)  # the episode has ended, and no new one has begun
        self._fresh = np.ones(self._lanes, bool)  # no step of the episode has been recorded
        self._trajectories = np.zeros(self._lanes, np.int64)
        self._numbers = attached_or_new(buffer.storage, TrajectoryNumbers)
        self._numbers.recorders.add(self)
        self._loads, self._warned = self._numbers.loads, False
        self._refuse_open_end()

    def _refuse_lanes(self) -> None:
        """Raise an error if the environments cannot be recorded in the lanes of the buffer, or in a single lane."""
        if self._lane is not None:
            self._refuse_lane()
        elif not self._single and isinstance(self.buffer.writer, RolloutWriter):
            self._refuse_rollouts()

    def _refuse_rollouts(self) -> None:
        """Raise a ValueError if the rollouts of several environments would hold rows of older policies."""
        if self._flat:
            raise ValueError(f"a rollout of {self._lanes} environments needs lanes: RolloutBuffer(T, {self._lanes})")
        if self._mode == "NextStep" and self._lanes > 1:
            why = "a lane that resets falls a step behind, so that later rollouts hold rows of older policies"
            how = f"use same-step autoreset, for example {_SAME_STEP}"
            raise ValueError(f"a rollout cannot be recorded with next-step autoreset: {why}. Instead, {how}{ROLLOUTS}")

    def _refuse_lane(self) -> None:
        """Raise an error if the environment or the buffer does not allow to record a single lane."""
        if self._lanes > 1:
            fault = f"lane {self._lane} holds the transitions of one environment, got {self._lanes} environments"
            raise SchemaError(f"{fault}: pass one of them, or record them in the whole buffer")
        if not self._writes_lanes:
            fault = f"a {type(self.buffer.writer).__name__} of this buffer writes whole time steps, and no single lane"
            raise ValueError(f"{fault}: use a ReplayBuffer with a RingWriter, or record all lanes with one recorder")

    def _time_step(self, schema: TensorDict) -> TensorDict:
        """Return the schema of a time step of the buffer, ``[]`` or ``[E]``, for the schema of the environment."""
        if self._flat:
            return schema[0]
        return schema if self._lane is None else schema.expand(self.buffer.storage.lane_count)

    def _fitted(self, schema: TensorDict) -> TensorDict:
        """Reserve the buffer's rows, or check that reserved rows match ``schema``; return the completed schema."""
        if self._trajectory_key is not None:
            schema.set(self._trajectory_key, torch.empty(schema.shape, dtype=torch.int64, device="meta"))
        storage = self.buffer.storage
        with storage.lock:  # recorders of other lanes may be made, or write first rows
            self._fit_rows(storage, schema)
        return schema

    def _fit_rows(self, storage: PackedStorage, schema: TensorDict) -> None:
        if storage.layout is None:
            storage.reserve(self._time_step(schema))
        lanes = tuple(self._time_step(schema).shape)
        if storage.lanes != lanes:
            raise SchemaError(f"the buffer has lanes {tuple(storage.lanes)}, the environment {lanes}: {_REMEDY}")
        stored = {} if storage.layout is None else {leaf.key: leaf for leaf in storage.layout.leaves}
        for key, value in list(walk(schema)):
            leaf = stored.get(key)
            if leaf is None:
                self._refuse_missing(key, value)
            elif key == _REWARD and leaf.dtype.is_floating_point:  # the first step tells the shape of rewards
                schema.set(key, torch.empty((self._lanes, *leaf.shape), dtype=leaf.dtype, device="meta"))
            elif (value.dtype, value.shape[1:]) != (leaf.dtype, leaf.shape):
                given = f"the environment gives {show_key(key)} as {value.dtype} of shape {tuple(value.shape[1:])}"
                stored_as = f"the buffer's rows hold {leaf.dtype} of shape {tuple(leaf.shape)}"
                raise SchemaError(f"{given}, {stored_as}: {_REMEDY}")

    def _refuse_missing(self, key: Key, value: torch.Tensor) -> None:
        """Raise a SchemaError if the buffer's rows have no entry ``key``, and the first write can no longer add it."""
        storage = self.buffer.storage
        if storage.is_reserved or storage.layout is None or key in storage.layout.places:
            return
        fault = f"the buffer's rows have no {show_key(key)}, which the recorder writes, and can no longer get it"
        remedy = f"make the buffer with from_env(env, ..., {show_extra(key, value[0] if self._single else value)})"
        without = ", or pass trajectory_key=None" if key == self._trajectory_key else ""
        raise SchemaError(f"{fault}: {remedy}{without}")

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and return the result; ``options={"reset_mask": mask}`` resets only some lanes.

        Raises:
            RuntimeError: the reset interrupts an episode, and ``trajectory_key`` is ``None``.
        """
        self._notice_load()
        mask = (options or {}).get("reset_mask")
        lanes = np.ones(self._lanes, bool) if mask is None else np.array(mask, bool)
        begun = np.ones_like(lanes) if self._obs is None else lanes  # all: every lane lacks the step that failed
        broken = (begun & ~self._ended & ~self._fresh).nonzero()[0].tolist()
        if self._trajectory_key is None and broken:
            remedy = "let them end, or store trajectory numbers"
            raise RuntimeError(
                f"reset interrupts episodes in lanes {broken} without a trajectory_key: {remedy}{TRANSITIONS}"
            )
        self._obs, info = self.env.reset(seed=seed, options=options)
        self._write_stretches(lanes)
        self._ended &= ~lanes
        self._begin(begun)
        return self._obs, info

    def step(self, action: Any, **extras: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step, store its transitions, and return the result of the environment's ``step``.

        Args:
            action: the action.
            **extras: further entries of the transitions, such as a policy's ``state_value`` of shape ``[E, 1]``. Every
                step must have the same extras. Extras are arrays, tensors, or nested dicts of arrays and tensors.

        Raises:
            RuntimeError: the environment must be reset before this step; or an episode has ended in an environment with
                same-step autoreset, and the infos have no ``final_obs``.
            SchemaError: the dtype or shape of an entry differs from its space or from the first step.
        """
        self._notice_load()
        if self._obs is None:
            when = "before its first step(), after a step that failed, and after a checkpoint was loaded"
            raise RuntimeError(f"call the recorder's reset() {when}{TRANSITIONS}")
        resetting = np.count_nonzero(self._ended)  # faster than any()
        if resetting and self._mode == "Disabled":
            how = "" if self._single else ", with options={'reset_mask': terminated | truncated}"
            ended = self._ended.nonzero()[0].tolist()
            raise RuntimeError(f"the episode has ended in lanes {ended}: reset before the next step{how}{TRANSITIONS}")
        lanes = ~self._ended if resetting else None
        if self._queues is None:
            before = deepcopy((self._obs, action))  # the environment may overwrite them
        else:
            self._fill_before(self._obs, action, extras)
        self._obs = None  # if this step fails, a reset must follow
        result = self.env.step(action)
        info = [result[4]] if self._single and self._infos else result[4]
        info = joined(info) if isinstance(info, list) else info
        if self._queues is None:
            self._queues = self._make_queues(extras, result[1], info)
            self._fill_before(*before, extras)
        done = self._fill_after(result, info, lanes)
        self._store(self._queues, lanes, done)
        self._obs = result[0]
        self._fresh[:] = False
        if self._mode == "SameStep":
            self._begin(done)
        elif lanes is None:
            self._ended[:] = done
        else:  # this step has reset the lanes that had ended
            begun, self._ended = self._ended, done & lanes
            self._begin(begun)
        return result

    @property
    def pending(self) -> int:
        """The number of transitions that are not yet in the buffer."""
        return 0 if self._queues is None else self._queues.pending

    @property
    def pending_steps(self) -> int:
        """The number of time steps of a buffer ``[T, E]`` that are not yet written, because a lane lacks them."""
        return 0 if self._queues is None or self._flat else int(self._queues.waiting.max())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a recorder needs to go on in mid-episode, as tensors and plain values.

        It holds the current observation, the trajectory numbers, and the :attr:`pending` transitions. The rows are in
        the buffer, and the environment saves its own state. Save all three at the same moment, and not between a load
        of the buffer and :meth:`load_state_dict`::

            rb.dumps("run/buffer")
            torch.save({"recorder": recorder.state_dict(), "env": state_of_env}, "run/agent.pt")
        """
        self._notice_load()
        queues = self._queues
        waiting = None
        if queues is not None:
            flags = {"extras": sorted(map(list, self._extra_keys)), "single_reward": self._is_single_reward}
            waiting = queues.contents() | flags | {"layout": saved_rows(queues.layout)}
        return {
            "settings": self._settings(),
            "observation": None if self._obs is None else copied(self._obs),
            "ended": torch.from_numpy(self._ended.copy()),
            "fresh": torch.from_numpy(self._fresh.copy()),
            "trajectories": torch.from_numpy(self._trajectories.copy()),
            "queues": waiting,
            "buffer": buffer_state(self.buffer, self._numbers),
        }

    def _settings(self) -> dict[str, Any]:
        key = self._trajectory_key
        return {
            "recorder": type(self).__name__,
            "lanes": 0 if self._single else self._lanes,
            "rows": "[T]" if self._flat else "[T, E]" if self._lane is None else f"lane {self._lane}",
            "autoreset_mode": self._mode,
            "trajectory_key": key if key is None or isinstance(key, str) else [*key],
            "infos": sorted(map(list, self._infos)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in mid-episode from a :meth:`state_dict`, after the buffer and the environment have been restored.

        The next step then continues the trajectories of the newest rows, as if the program had not been stopped::

            rb, recorder = ReplayBuffer.from_env(env, ...), GymnasiumRecorder(rb, env)
            rb.loads("run/buffer")
            ...  # restore the environment's state and random generator
            recorder.load_state_dict(torch.load("run/agent.pt")["recorder"])

        Raises:
            ValueError: the state is from another number of environments, autoreset mode, set of infos or kind of rows;
                or the buffer does not hold the rows of the moment when the state was saved. Nothing has changed.
        """
        with state_of(self):
            refuse_other(self._settings(), state_dict["settings"], "the state")
            names = "ended", "fresh", "trajectories"
            arrays = [array_of(state_dict, name, getattr(self, f"_{name}")) for name in names]
            observation, queues = state_dict["observation"], None
            for key, path in self._obs_paths if observation is not None else ():
                column, value = self._schema[key], part_of(observation, path)
                shape = column.shape[self._single :]
                if value.shape != shape:
                    raise ValueError(
                        f"the saved {show_key(key)} has shape {tuple(value.shape)}, expected {tuple(shape)}"
                    )
            if (saved := state_dict["queues"]) is not None:
                queues = LaneQueues(schema_of_rows(saved["layout"], self._lanes, self._schema, self.buffer.storage))
                if saved["layout"] != saved_rows(queues.layout):
                    raise ValueError("the saved rows have their entries in another order")
                queues.restore(array_of(saved, "waiting", self._trajectories), saved["rows"].numpy())
                bound = {tuple(key) for key in saved["extras"]}, bool(saved["single_reward"])
            refuse_other_rows(self.buffer, state_dict["buffer"])
            resume_buffer(self.buffer, self._numbers, state_dict["buffer"])
        self._ended, self._fresh, self._trajectories = arrays
        self._loads, self._obs, self._queues = (
            self._numbers.loads,
            None if observation is None else copied(observation),
            queues,
        )
        if queues is not None:
            self._bind(queues, *bound)

    def flush(self) -> None:
        """Write all pending transitions to a buffer ``[T]``. With a buffer ``[T, E]``, they stay pending."""
        self._notice_load()
        self._write_stretches(np.ones(self._lanes, bool))

    def _notice_load(self) -> None:
        """If a checkpoint was loaded into the buffer, begin a new trajectory in each lane, after a reset."""
        if self._loads != self._numbers.loads:
            self._refuse_open_end()
            self._loads, self._obs = self._numbers.loads, None
            if self._queues is not None:
                self._queues.clear()
            self._begin(np.ones(self._lanes, bool))

    def _refuse_open_end(self) -> None:
        """Raise a RuntimeError if the next rows would seem to continue the newest stored episode."""
        if self._trajectory_key is None and len(self.buffer) and not bool(self._newest_done().all()):
            remedy = "store trajectory numbers, or set ('next', 'truncated') and ('next', 'done') there"
            fault = "the buffer's newest rows do not end an episode and would run into the next"
            raise RuntimeError(f"{fault}: {remedy}{TRANSITIONS}")

    def _newest_done(self) -> torch.Tensor:
        """Return the done flags of the newest row of each recorded lane that has rows."""
        storage = self.buffer.storage
        if self._lane is None and not stand_apart(storage):
            return self.buffer.last(1)[_DONE]
        with storage.lock:
            newest = torch.from_numpy(storage.ring.newest_of_lanes)
            lanes = (newest >= 0).nonzero().squeeze(1)
            lanes = lanes if self._lane is None else lanes[lanes == self._lane]
            return storage.get((newest[lanes], lanes))[_DONE]

    def _begin(self, lanes: np.ndarray) -> None:
        count = int(np.count_nonzero(lanes))
        if not count:
            return
        self._trajectories[lanes] = self._numbers.take(count, self._trajectory_key)
        self._fresh[lanes] = True
        if self._queues is not None and self._trajectory_key is not None:
            self._queues.columns[self._trajectory_key][...] = self._trajectories

    def _make_queues(self, extras: Mapping[str, Any], reward: Any, info: Mapping[str, Any]) -> LaneQueues:
        """Return queues whose rows have the keys of the schema and of the first step's extras and infos."""
        more = {key: torch.as_tensor(to_array(value), device="cpu") for key, value in walk(extras)}
        if self._single:
            more = {key: value.unsqueeze(0) for key, value in more.items()}
        more |= {("next", *path): info_example(path, x, info, self._lanes) for path, x in self._infos.items()}
        schema = self._schema.copy()
        is_single_reward = self._fit_reward(schema, to_array(reward).shape)
        for key, value in more.items():
            if schema.get(key, None) is not None or key == ("next",):
                raise SchemaError(f"the extra {show_key(key)} has the name of an entry that the environment returns")
            if value.shape[:1] != schema.shape:
                raise SchemaError(f"{show_key(key)} has shape {tuple(value.shape)}, expected first dim {self._lanes}")
            if not len(self.buffer.transform):  # a transform may leave it out
                self._refuse_missing(key, value)
            schema.set(key, value)
        queues = LaneQueues(schema)
        self._bind(queues, {key for key, _ in walk(extras)}, is_single_reward)
        return queues

    def _bind(self, queues: LaneQueues, extra_keys: set[Key], is_single_reward: bool) -> None:
        """Look up the columns that steps are copied to."""
        self._columns = {key: x[0, ...] for key, x in queues.columns.items()} if self._single else queues.columns
        self._extra_keys, self._is_single_reward = extra_keys, is_single_reward
        self._flags = tuple(self._columns[key][..., 0] for key in _GIVEN)
        if not is_single_reward:
            self._flags = self._columns[_REWARD], *self._flags[1:]
        self._terminated, self._truncated, self._done = (queues.columns[key][:, 0] for key in (*_GIVEN[1:], _DONE))
        after = {key[1:]: column for key, column in queues.columns.items() if key[0] == "next"}
        self._info_columns = [(after[path], path, value) for path, value in self._infos.items()]
        self._single_now = queues.now[0]
        if self._trajectory_key is not None:
            queues.columns[self._trajectory_key][...] = self._trajectories

    def _fit_reward(self, schema: TensorDict, shape: tuple[int, ...]) -> bool:
        """Give rewards in ``schema`` the shape of the first step's rewards; return whether each is a single number."""
        features, storage = shape if self._single else shape[1:], self.buffer.storage
        wanted = features or (1,)
        if schema[_REWARD].shape[1:] == wanted:
            return not features
        schema.set(_REWARD, torch.empty((self._lanes, *wanted), dtype=schema[_REWARD].dtype, device="meta"))
        with storage.lock:  # recorders of other lanes may take their first step
            self._reserve_again(storage, schema, features)
        return not features

    def _reserve_again(self, storage: PackedStorage, schema: TensorDict, features: tuple[int, ...]) -> None:
        """Reserve rows with the rewards of ``schema``, unless another recorder has done so."""
        layout = storage.layout
        if layout is not None and layout.leaves[layout.places[_REWARD]].shape == schema[_REWARD].shape[1:]:
            return
        if not storage.is_reserved:
            if len(self.buffer) or storage.shared_rows is not None:
                self._refuse_reward(schema[_REWARD], features)
            return
        step = self._time_step(schema)
        storage.release()
        storage.reserve(step)

    def _refuse_reward(self, expected: torch.Tensor, features: tuple[int, ...]) -> NoReturn:
        declared = tuple(self._schema[_REWARD].shape[1:])
        fault = f"{show_key(_REWARD)} came with shape {features}, the buffer's rows hold {declared}"
        example = show_extra(_REWARD, expected[0] if self._single else expected)
        raise SchemaError(f"{fault}: make the buffer with from_env(env, ..., {example})")

    def _fill_before(self, obs: Any, action: Any, extras: Mapping[str, Any]) -> None:
        columns = self._columns
        for paths, value in ((self._obs_paths, obs), (self._action_paths, action)):
            for key, path in paths:
                fill_(columns[key], part_of(value, path), key)
        if extras or self._extra_keys:
            given = dict(walk(extras))
            if given.keys() != self._extra_keys:
                now, first = (sorted(map(show_key, keys)) for keys in (given, self._extra_keys))
                raise SchemaError(f"this step has the extras {now}, the first step had {first}: pass the same extras")
            for key, value in given.items():
                fill_(columns[key], value, key)

    def _fill_after(self, result: Any, info: Mapping[str, Any], lanes: np.ndarray | None) -> np.ndarray:
        """Copy the results of a step to the queues; return a mask of the lanes whose episode has ended, ``[E]``."""
        obs, reward, terminated, truncated, _ = result
        for flag, value, name in zip(self._flags, (reward, terminated, truncated), _GIVEN, strict=True):
            fill_(flag, value, name)
        done = np.logical_or(self._terminated, self._truncated, out=self._done)
        for key, path in self._next_paths:
            fill_(self._columns[key], part_of(obs, path), key)
        same_step = self._mode == "SameStep" and np.count_nonzero(done)
        if same_step:
            fill_final_(self._columns, self._next_paths, info, done)
        for column, path, default in self._info_columns:
            fill_infos_(column, path, default, info, done if same_step else None, lanes)
        return done

    def _store(self, queues: LaneQueues, lanes: np.ndarray | None, done: np.ndarray) -> None:
        if self._lane is not None:
            if lanes is None:
                self._write(queues.now, self._lane)
        elif self._single and self._flat:
            if lanes is None:
                self._write(self._single_now)
        elif self._flat:
            queues.push(lanes)
            self._write_stretches(done | (queues.waiting >= self.stretch))
        elif lanes is None and not queues.pending:
            self._write(queues.now)
        elif lanes is not None and self._writes_lanes:
            if lanes.any():
                self._write(queues.now[torch.from_numpy(lanes)], lanes.nonzero()[0])
        else:
            queues.push(lanes)
            if queues.take_step():
                self._write(queues.step)
            if queues.steps > _FAR_AHEAD and not self._warned:
                self._warned = True
                reason = f"a lane is {_FAR_AHEAD} time steps behind another, and the others' transitions wait in memory"
                warnings.warn(f"{reason}: use same-step autoreset or a flat buffer", RuntimeWarning, stacklevel=3)

    def _write_stretches(self, lanes: np.ndarray) -> None:
        if not self._flat or self._queues is None or not self._queues.pending:
            return
        for lane in (lanes & (self._queues.waiting > 0)).nonzero()[0]:
            self.buffer.extend(self._queues.take_stretch(int(lane)))

    @property
    def _writes_lanes(self) -> bool:
        """Whether the buffer can write single lanes, so that no transition waits for those of other lanes."""
        return self.buffer.takes_lanes

    def _write(self, step: TensorDict, lanes: int | np.ndarray | None = None) -> None:
        step = step.clone() if len(self.buffer.transform) else step  # a transform may modify it
        if lanes is None:
            self.buffer.add(step)
        else:
            self.buffer.extend(step, lanes=lanes)
