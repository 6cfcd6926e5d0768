"""Buffers for an environment: rows allocated from what it says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from rlbuf_td.envs.specs import schema_of, transition_schema
from rlbuf_td.samplers.common import OwnSignature
from rlbuf_td.storages import PackedStorage

if TYPE_CHECKING:
    from typing_extensions import Self


class FromEnvironment:
    """The constructors that a buffer class has beside its own."""

    __signature__ = OwnSignature()

    if TYPE_CHECKING:

        def __init__(self, **kwargs: Any) -> None: ...

    @classmethod
    def from_env(cls, env: Any, capacity: int, *, extras: Any = None, **kwargs: Any) -> Self:
        """Return a buffer whose rows are allocated for the transitions of an environment.

        Every write is checked against them. The first one may bring more keys, which are then part of every row: a
        policy's outputs, a collector's ``("collector", "traj_ids")``. RAM is taken from the system as rows are
        written.

        Args:
            env: a TorchRL environment, or a Gymnasium one, single or vectorised.
            capacity: in transitions, rounded up to whole time steps. (Of a :class:`RolloutBuffer`: in time steps.)
            extras: entries that are known now to come with every transition, see
                :func:`~rlbuf_td.envs.specs.schema_of`. Rows that several processes are to share need all of them.
            **kwargs: as for :meth:`from_schema`.

        Raises:
            SchemaError: the environment gives what has no fixed size in bytes.
            TypeError: it is no environment.

        Example:
            >>> import gymnasium
            >>> from rlbuf_td import ReplayBuffer
            >>> rb = ReplayBuffer.from_env(gymnasium.make_vec("CartPole-v1", num_envs=3), 300, batch_size=8)
            >>> rb.storage.max_size, len(rb)
            (300, 0)
        """
        return cls.from_schema(schema_of(env, extras=extras), capacity, **kwargs)

    @classmethod
    def from_spaces(
        cls,
        observation_space: Any,
        action_space: Any,
        capacity: int,
        *,
        num_envs: int | None = None,
        extras: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Return a buffer as :meth:`from_env` does, for transitions between observations of a space.

        Args:
            observation_space: of one environment: a Gymnasium space, or a TorchRL spec.
            action_space: of one environment: a Gymnasium space, or a TorchRL spec.
            capacity: see :meth:`from_env`.
            num_envs: E, for rows ``[T, E]``; ``None`` for ``[T]``.
            extras: see :meth:`from_env`; ``{"next": {"reward": numpy.zeros(1)}}`` keeps rewards float64.
            **kwargs: as for :meth:`from_schema`.

        Raises:
            SchemaError: a space has values of no fixed size in bytes.
            TypeError: a space is none.

        Example:
            >>> from gymnasium.spaces import Box, Dict, Discrete
            >>> from rlbuf_td import ReplayBuffer
            >>> space = Dict({"camera": Box(0, 255, (8, 8, 3), "uint8"), "body": Dict({"speed": Box(-1, 1, (2,))})})
            >>> rb = ReplayBuffer.from_spaces(space, Discrete(4), 100, num_envs=2)
            >>> rb.storage.layout.row_bytes, tuple(rb.storage.lanes)
            (416, (2,))
        """
        return cls.from_schema(
            transition_schema(observation_space, action_space, num_envs, extras=extras), capacity, **kwargs
        )

    @classmethod
    def from_schema(
        cls,
        schema: TensorDictBase,
        capacity: int,
        *,
        flat: bool = False,
        device: torch.device | str = "cpu",
        storing_device: torch.device | str | None = None,
        scratch_dir: Any = None,
        shared: bool = False,
        offload: bool = False,
        share_next: Any = False,
        frames: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Return a buffer whose rows are allocated for transitions like an example.

        Args:
            schema: a time step, ``[]`` or ``[*lanes]``: an example, or what :func:`~rlbuf_td.envs.specs.schema_of`
            gives.
            capacity: see :meth:`from_env`.
            flat: rows ``[T]``, although there are lanes: each transition is a row of its own.
            device: where batches are wanted, and, unless ``storing_device`` says otherwise, where the rows live.
            storing_device: where the rows live (the two are named as those of TorchRL's collectors): with ``"cpu"``
                and ``device="cuda"`` batches come as :class:`ReplayBuffer` says of its ``device``.
            scratch_dir: see :class:`PackedStorage`; also ``shared``, ``offload``, ``share_next`` and ``frames``.
            shared: see ``scratch_dir``.
            offload: see ``scratch_dir``.
            share_next: see ``scratch_dir``.
            frames: see ``scratch_dir``.
            **kwargs: as for this class: ``sampler``, ``batch_size``, ``transform`` ...

        Raises:
            SchemaError: the schema has an entry that cannot be packed.

        Example:
            >>> from tensordict import TensorDict
            >>> from rlbuf_td import ReplayBuffer
            >>> transition = TensorDict({"observation": torch.zeros(3), "next": {"reward": torch.zeros(1)}})
            >>> ReplayBuffer.from_schema(transition, 100).storage.is_reserved
            True
        """
        if flat:
            schema = schema.flatten()[0] if schema.ndim else schema
        if storing_device is not None:
            device, kwargs["device"] = storing_device, device
        where: dict[str, Any] = {"device": device, "scratch_dir": scratch_dir, "shared": shared}
        how = where | {"offload": offload, "share_next": share_next, "frames": frames}
        storage = PackedStorage(capacity, ndim=1 + schema.ndim, **how)
        storage.reserve(schema)
        return cls(storage=storage, **kwargs)
