"""Import and export of Minari data sets: whole buffers, and below them single
episodes."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td.envs.specs import OBSERVATION, tensors_of
from rlbuf_td.envs.transition import make_transition
from rlbuf_td.kernels.host_memory import take_pages
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import coordinates
from rlbuf_td.storages.schema import SchemaError, refuse_rounding, show_key, walk

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

Buffer = TypeVar("Buffer", bound="ReplayBuffer")
INFO, _REWARD = "info", ("next", "reward")
# bytes of episodes per write, because Minari opens its file for each write
_WRITTEN_AT_ONCE = 1 << 26


def import_minari(
    cls: type[Buffer],
    dataset: Any,
    capacity: int | None,
    *,
    infos: bool,
    reward_dtype: torch.dtype | None,
    **kwargs: Any,
) -> Buffer:
    """Return a new buffer with the transitions of a data set, see
    :meth:`ReplayBuffer.from_minari`."""
    if reward_dtype is not None and not isinstance(reward_dtype, torch.dtype):
        raise TypeError(
            f"reward_dtype must be a dtype of torch, such as torch.float32, got {reward_dtype!r}"
        )
    dataset = open_dataset(dataset)
    steps = int(dataset.total_steps)
    if capacity is not None and capacity < steps:
        remedy = "raise it, or choose episodes with dataset.filter_episodes(...)"
        raise ValueError(
            f"{dataset.id} has {steps:,} transitions, more than the capacity of {capacity:,}: {remedy}"
        )
    read = partial(transitions_of, infos=infos, reward_dtype=reward_dtype)
    episodes = map(read, filter(len, dataset.iterate_episodes()))
    first = next(episodes, None)
    if first is None:
        raise ValueError(f"{dataset.id} has no transitions")
    rb = cls.from_schema(cast("TensorDict", first[0]), capacity or steps, **kwargs)
    flow, rb.flow = rb.flow, None  # no write waits for a batch
    with ThreadPoolExecutor(1) as pool:
        # another thread touches the pages first: page faults in writes cost more
        if rb.storage.scratch_dir is None:
            pool.submit(take_pages, rb.storage.all_rows().first(steps).matrix)
        for rows in chain([first], episodes):
            rb.extend(rows)
    rb.flow = flow  # it counts them as written
    return rb


def export_minari(
    storage: PackedStorage,
    dataset_id: str,
    env: object,
    spaces: tuple[object, object],
    kwargs: dict[str, object],
) -> Any:
    """Write the rows as a new data set, see :meth:`ReplayBuffer.to_minari`; the caller
    holds the buffer's locks."""
    if not isinstance(dataset_id, str) or not re.fullmatch(r".+-v\d+", dataset_id):
        raise ValueError(
            f"a data set needs a name with a version, such as 'namespace/name-v0', got {dataset_id!r}"
        )
    about = {
        "env": env,
        "observation_space": spaces[0],
        "action_space": spaces[1],
        "jpeg_encoding": False,
    } | kwargs
    library, dataset = minari(), None
    folder = library.storage.get_dataset_path(dataset_id)
    is_new = not folder.exists()
    cells = _episodes(storage)
    at_once = max(1, _WRITTEN_AT_ONCE * len(cells) // max(1, storage.nbytes))
    try:
        for start in range(0, len(cells), at_once):
            rows = (
                storage.read(coordinates(each, storage)).cpu()
                for each in cells[start : start + at_once]
            )
            episodes = [
                library.data_collector.EpisodeBuffer(**episode_of(each, spaces))
                for each in rows
            ]
            if dataset is None:
                dataset = library.create_dataset_from_buffers(
                    dataset_id, episodes, **about
                )
            else:
                dataset.update_dataset_from_buffer(episodes)
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return dataset


def spaces_of(
    env: Any, observation_space: object, action_space: object
) -> tuple[Any, Any]:
    if observation_space is not None and action_space is not None:
        return observation_space, action_space
    if env is None:
        raise ValueError(
            "pass the Gymnasium environment as env, or both observation_space and action_space"
        )
    import gymnasium

    env = env if isinstance(env, gymnasium.Env) else gymnasium.make(env)
    return observation_space or env.observation_space, action_space or env.action_space


def _episodes(storage: PackedStorage) -> tuple[torch.Tensor, ...]:
    """Return the flat indices of each episode's rows, lane after lane, oldest first."""
    if not len(storage):
        raise RuntimeError("the buffer is empty: extend it first")
    cells = storage.ring.cells_by_age()
    is_last = storage.episodes_now().spans(cells.to(storage.device)).ahead.cpu() == 0
    return cells.tensor_split(is_last[:-1].nonzero()[:, 0] + 1)


def open_dataset(dataset: object) -> Any:
    if isinstance(dataset, str):
        try:
            return minari().load_dataset(dataset)
        except FileNotFoundError:
            remedy = f"run `minari download {dataset}`, or name one that minari.list_local_datasets() lists"
            raise FileNotFoundError(
                f"this machine has no Minari data set {dataset!r}: {remedy}"
            ) from None
    if not hasattr(dataset, "iterate_episodes"):
        raise TypeError(
            f"dataset must be the name of a Minari data set or a MinariDataset, got {dataset!r}"
        )
    return dataset


def minari() -> Any:
    try:
        import minari
    except ImportError:
        remedy = "pip install 'rlbuf_td[minari]'"
        if sys.version_info < (3, 11):  # for which the extra names no Minari
            remedy = "take Python 3.11 or later, because Minari 0.5.4 needs it"
        raise ImportError(f"this needs Minari: {remedy}") from None
    return minari


def transitions_of(
    episode: Any, *, infos: bool, reward_dtype: torch.dtype | None
) -> TensorDict:
    """Return the ``n`` transitions of an episode, which has ``n + 1`` observations."""
    steps = len(episode)
    before, after = (
        _part(episode.observations, rows)
        for rows in (slice(0, steps), slice(1, steps + 1))
    )
    reward = tensors_of(episode.rewards, "rewards")
    if reward_dtype is not None:
        refuse_rounding(
            _REWARD, reward, reward_dtype, "pass reward_dtype=torch.float64"
        )
        reward = reward.to(reward_dtype)
    flags = episode.terminations, episode.truncations
    extras: dict[str, Any] = {
        "collector": {"traj_ids": torch.full((steps,), int(episode.id), device="cpu")}
    }
    if infos and episode.infos:
        extras |= _infos(tensors_of(episode.infos, INFO), steps)
    # else make_transition would convert it to float32
    is_float = reward.is_floating_point()
    rows = make_transition(
        before,
        episode.actions,
        reward if is_float else reward.double(),
        after,
        *flags,
        **extras,
    )
    return rows if is_float else rows.set(_REWARD, reward.unsqueeze(-1))


def _part(values: Any, rows: slice) -> Any:
    if isinstance(values, Mapping):
        return {key: _part(value, rows) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_part(value, rows) for value in values)
    return values[rows]


def _infos(infos: dict[str, object], steps: int) -> dict[str, Any]:
    """Return the entries of rows for an episode's infos: one per step or, with that of
    the reset, one more."""
    if all(len(value) == steps for _, value in walk(infos)):
        return {"next": {INFO: infos}}
    return {
        INFO: _part(infos, slice(0, steps)),
        "next": {INFO: _part(infos, slice(1, steps + 1))},
    }


def episode_of(rows: TensorDictBase, spaces: tuple[Any, Any]) -> dict[str, Any]:
    """Convert an episode's transitions ``[n]``, oldest first, to the arguments of
    Minari's ``EpisodeBuffer``."""
    observation_space, action_space = spaces
    is_dict = type(observation_space).__name__ == "Dict"
    before, after = (
        part if is_dict else part.get(OBSERVATION, None)
        for part in (rows, rows.get("next"))
    )
    result = {
        "observations": _values(observation_space, before, after, (OBSERVATION,)),
        "actions": _values(action_space, rows.get("action", None), None, ("action",)),
    }
    after = rows.get("next")
    for name, key in (
        ("rewards", "reward"),
        ("terminations", "terminated"),
        ("truncations", "truncated"),
    ):
        if key not in after.keys():
            raise SchemaError(
                f"the rows have no {show_key(('next', key))}, which a Minari episode holds"
            )
        column = after[key]
        result[name] = (column[:, 0] if column.shape[1:] == (1,) else column).numpy()
    infos, first = after.get(INFO, None), rows.get(INFO, None)
    is_observed = not isinstance(infos, TensorDictBase) or (
        is_dict and INFO in observation_space.spaces
    )
    first = first if isinstance(first, TensorDictBase) else None
    return result | {"infos": {} if is_observed else _info_values(first, infos)}


def _values(space: Any, before: Any, after: Any, path: tuple[str, ...]) -> Any:
    """Return arrays nested as in ``space``: all values of ``before``, then the last
    value of ``after`` if given."""
    if before is None:
        raise SchemaError(
            f"the rows have no {show_key(path)}, which is in the given space: pass the rows' own spaces"
        )
    kind = type(space).__name__
    if kind in ("Dict", "Tuple"):
        parts = (
            dict(space.spaces)
            if kind == "Dict"
            else {str(place): part for place, part in enumerate(space.spaces)}
        )
        found = {
            key: _values(
                part,
                before.get(key, None),
                None if after is None else after.get(key, None),
                (*path, key),
            )
            for key, part in parts.items()
        }
        return found if kind == "Dict" else tuple(found.values())
    # None: a space of values that are no arrays
    expected = getattr(space, "shape", None)
    if expected is not None and before.shape[1:] != expected:
        shapes = f"{[*before.shape[1:]]} in the rows, {[*expected]} in the given space"
        raise SchemaError(
            f"the shape of {show_key(path)} is {shapes}: pass the rows' own spaces"
        )
    if after is None:
        return before.numpy()
    # as bytes, NaN equals itself
    both = (x.contiguous().view(torch.uint8) for x in (before[1:], after[:-1]))
    if before.dtype is not after.dtype or not torch.equal(*both):
        raise ValueError(
            f"a next {show_key(path)} differs from that of the row that follows it in its trajectory, and a Minari "
            "episode holds one value for both: give each trajectory its own number under ('collector', 'traj_ids')"
        )
    return torch.cat((before, after[-1:])).numpy()


def _info_values(before: Any, after: Any) -> dict[str, Any]:
    """Return the infos that the steps returned, ``after``, behind that of the reset:
    the first one of ``before``."""
    result: dict[str, Any] = {}
    for key, value in after.items():
        first = None if before is None else before.get(key, None)
        if isinstance(value, TensorDictBase):
            result[key] = _info_values(first, value)
        else:
            result[key] = (
                value.numpy()
                if first is None
                else torch.cat((first[:1], value)).numpy()
            )
    return result
