"""Import and export of Minari data sets."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torchrl.data.replay_buffers import Storage

from rlbuf_td.buffers.flow import count_imported
from rlbuf_td.checkpoint.folder import progress_bar
from rlbuf_td.envs.minari_episodes import TRAJECTORY, episode_of, minari, open_dataset, transitions_of
from rlbuf_td.kernels.huge_pages import take_pages
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.indexing import coordinates, lanes_of, stored_rows
from rlbuf_td.storages.lane_heads import cells_by_age, lanes_apart
from rlbuf_td.storages.schema import refuse_rounding, show_key, walk
from rlbuf_td.writers.common import steps_by_age

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

Buffer = TypeVar("Buffer", bound="ReplayBuffer")
_WRITTEN_AT_ONCE = 1 << 26  # bytes of episodes per write, because Minari opens its file for each write


def import_minari(
    cls: type[Buffer],
    dataset: Any,
    capacity: int | None,
    *,
    infos: bool,
    reward_dtype: torch.dtype | None,
    progress: bool | None,
    **kwargs: Any,
) -> Buffer:
    """Return a new buffer with the transitions of a data set, see :meth:`ReplayBuffer.from_minari`."""
    if reward_dtype is not None and not isinstance(reward_dtype, torch.dtype):
        raise TypeError(f"reward_dtype must be a dtype of torch, such as torch.float32, got {reward_dtype!r}")
    dataset = open_dataset(dataset)
    steps = int(dataset.total_steps)
    if capacity is not None and capacity < steps:
        remedy = "raise it, or choose episodes with dataset.filter_episodes(...)"
        raise ValueError(f"{dataset.id} has {steps:,} transitions, more than the capacity of {capacity:,}: {remedy}")
    read = partial(transitions_of, infos=infos, reward_dtype=reward_dtype)
    episodes = map(read, filter(len, dataset.iterate_episodes()))
    first = next(episodes, None)
    if first is None:
        raise ValueError(f"{dataset.id} has no transitions")
    rb = cls.from_schema(first[0], capacity or steps, **kwargs)
    flow, rb.flow = rb.flow, None  # no write waits for a batch
    nbytes = steps * rb.storage.row_bytes
    with ThreadPoolExecutor(1) as pool, progress_bar(f"loading {dataset.id}", nbytes, progress) as report:
        if rb.storage.scratch_dir is None:  # another thread touches the pages first: page faults in writes cost more
            pool.submit(take_pages, rb.storage.all_rows().first(steps).matrix)
        for rows in chain([first], episodes):
            _fit_reward_(rows, first["next", "reward"].dtype)
            rb.extend(rows)
            report(len(rows) * rb.storage.row_bytes)
    count_imported(rb, flow)
    return rb


def _fit_reward_(rows: Any, dtype: torch.dtype) -> None:
    """Promote the rewards of an episode to ``dtype``; raise a SchemaError if type promotion does not allow this."""
    reward = rows["next", "reward"]
    if torch.promote_types(reward.dtype, dtype) is not dtype:
        episode = int(rows[TRAJECTORY][0])
        raise SchemaError(
            f"episode {episode} has {reward.dtype} rewards, earlier ones {dtype}: pass reward_dtype=torch.float64"
        )
    refuse_rounding(("next", "reward"), reward, dtype, "pass reward_dtype=torch.float64")
    rows["next", "reward"] = reward.to(dtype)


def export_minari(
    rb: ReplayBuffer, dataset_id: str, env: Any, spaces: tuple[Any, Any], progress: bool | None, kwargs: dict[str, Any]
) -> Any:
    """Write the rows as a new data set, see :meth:`ReplayBuffer.to_minari`."""
    if not isinstance(dataset_id, str) or not re.fullmatch(r".+-v\d+", dataset_id):
        raise ValueError(f"a data set needs a name with a version, such as 'namespace/name-v0', got {dataset_id!r}")
    about = {"env": env, "observation_space": spaces[0], "action_space": spaces[1], "jpeg_encoding": False} | kwargs
    library, dataset = minari(), None
    folder = library.storage.get_dataset_path(dataset_id)
    is_new = not folder.exists()
    with rb._locked():
        lanes = _lanes_by_age(rb)
        try:
            with progress_bar(f"writing {dataset_id}", rb.storage.nbytes, progress) as report:
                for some, nbytes in _together(_episodes(rb.storage, lanes, spaces)):
                    episodes = [library.data_collector.EpisodeBuffer(**episode) for episode in some]
                    if dataset is None:
                        dataset = library.create_dataset_from_buffers(dataset_id, episodes, **about)
                    else:
                        dataset.update_dataset_from_buffer(episodes)
                    report(nbytes)
        except BaseException:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise
    return dataset


def spaces_of(env: Any, observation_space: Any, action_space: Any) -> tuple[Any, Any]:
    if observation_space is not None and action_space is not None:
        return observation_space, action_space
    if env is None:
        raise ValueError("pass the Gymnasium environment as env, or both observation_space and action_space")
    import gymnasium

    env = env if isinstance(env, gymnasium.Env) else gymnasium.make(env)
    return observation_space or env.observation_space, action_space or env.action_space


def _lanes_by_age(rb: ReplayBuffer) -> list[torch.Tensor]:
    """Return the flat indices of each lane's rows, oldest first."""
    storage: Any = rb.storage
    if lanes_apart(storage) and storage.in_time_order:
        rows, count = torch.from_numpy(cells_by_age(storage)), storage.heads.read(storage)[1]
        return [lane for lane in rows.split(count.tolist()) if len(lane)]
    steps, lanes = steps_by_age(rb.writer, storage, None), lanes_of(storage).numel()
    return [steps * lanes + lane for lane in range(lanes)]


def _episodes(
    storage: Storage, lanes: list[torch.Tensor], spaces: tuple[Any, Any]
) -> Iterator[tuple[dict[str, Any], int]]:
    for flat in lanes:
        for cells in flat.tensor_split(_first_rows(storage, flat)):
            rows = storage.get(coordinates(cells, storage)).cpu()
            yield episode_of(rows, spaces), sum(value.nbytes for _, value in walk(rows))


def _first_rows(storage: Storage, flat: torch.Tensor) -> torch.Tensor:
    """Return the positions in ``flat`` (rows of one environment, oldest first) where episodes begin, except 0."""
    columns: Any = stored_rows(storage)
    numbers = columns.get(TRAJECTORY, None)
    if numbers is None and columns.get(("next", "done"), None) is None:
        raise SchemaError(f"the rows have neither {show_key(TRAJECTORY)} nor {show_key(('next', 'done'))}")
    if numbers is None:
        is_last = columns["next", "done"].flatten().cpu()[flat[:-1]]
    else:
        numbers = numbers.flatten().cpu()[flat]
        is_last = numbers[1:] != numbers[:-1]
    return is_last.nonzero()[:, 0] + 1


def _together(episodes: Iterator[tuple[dict[str, Any], int]]) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Group episodes into lists of about ``_WRITTEN_AT_ONCE`` bytes; yield each list and its size in bytes."""
    waiting: list[dict[str, Any]] = []
    total = 0
    for episode, nbytes in episodes:
        waiting.append(episode)
        total += nbytes
        if total >= _WRITTEN_AT_ONCE:
            yield waiting, total
            waiting, total = [], 0
    if waiting:
        yield waiting, total
