"""Whole episodes, for decision transformers, returns to go and recurrent world models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import ref

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, SamplerWithoutReplacement, Storage

from rlbuf_td.functional import reward2go
from rlbuf_td.kernels.episodes.n_step import sums_ahead
from rlbuf_td.samplers.common import EMPTY, permutation, refuse_disorder, setting, uniform_numbers
from rlbuf_td.samplers.wrapper import Drawn, SamplerWrapper, column_of, draw_from, rows_at
from rlbuf_td.storages.checks import fraction, one_of, whole
from rlbuf_td.storages.indexing import device_of, flat_rows, revision_of
from rlbuf_td.storages.lane_heads import written_rows
from rlbuf_td.storages.notebooks import SEQUENCES
from rlbuf_td.storages.schema import show_key
from rlbuf_td.storages.tensordict_fast import leaf_of
from rlbuf_td.storages.torchrl_parts import columns_of
from rlbuf_td.storages.trajectory_index import DONE_KEY, TRAJ_KEY, as_tuple
from rlbuf_td.storages.write_clock import SAMPLED_AT

_ROUNDS = 20  # the largest number of repeated draws; then the remaining rows are drawn from all probabilities
_ALL = 1 << 62  # more steps than any trajectory has


class _Pieces(NamedTuple):
    """The drawn episodes, ``[B]`` each; a piece is the episode, or the part of it that is in the batch."""

    first: Tensor  # flat index of the first row of the episode
    length: Tensor  # steps of the episode
    start: Tensor  # the first step of the piece
    rows: Tensor  # steps of the piece


class _Places(NamedTuple):
    """The rows of a batch, ``[S]`` each."""

    episode: Tensor  # position of the piece in the batch
    step: Tensor  # position of the row in its piece
    real: Tensor  # False for padding


class EpisodeSampler(SamplerWrapper):
    """Draws whole episodes, from their first step to their last one. The batch size is the number of episodes.

    Episodes are complete: those that the ring has partly overwritten are never drawn, and by default neither are those
    that have not ended yet. Each batch has four additional entries, one number per row:

    - ``"mask"``, bool: False for padding, which copies the last row of the episode.
    - ``"episode"``, int64: the position of the row's episode in the batch, 0 to B - 1.
    - ``"episode_step"``, int64: the number of the row in its episode, from 0.
    - ``"episode_length"``, int64: the number of steps of the row's episode.

    With ``layout="padded"``, a batch of B episodes has the shape ``[B, L]``, where L is ``max_length``, or the length
    of the longest episode in the batch; padding follows the last step. With ``layout="concatenated"``, the episodes
    follow one another without padding, and the shape is ``[S]``, where S is the sum of their lengths.

    If ``gamma`` is given, ``"reward_to_go"`` holds the discounted sum of the rewards from each row to the end of its
    episode, also of the rewards after the last row of the batch; it is 0 for padding. Without ``gamma``, compute it
    from whole episodes: ``rlbuf_td.functional.reward2go(batch["next", "reward"], batch["next", "done"], gamma,
    mask=batch["mask"])``.

    Args:
        sampler: draws the rows whose episodes are returned, with ``by="row"``; default :class:`UniformSampler`. May be
            wrapped in a :class:`HindsightSampler` (the goal of the drawn row becomes the goal of its episode) or an
            :class:`NStepSampler`.
        max_length: the largest number of steps per episode. Of a longer episode, a batch holds ``max_length``
            consecutive steps that contain the drawn row (with ``by="episode"``, a uniformly drawn row of the episode);
            all such windows are equally likely. ``None``: episodes of any length are returned whole.
        by: ``"row"`` draws a row, and returns its episode: by default, an episode is drawn in proportion to its
            length, as for decision transformers, and with a :class:`ProportionalSampler` in proportion to the sum of
            the probabilities of its rows. ``"episode"`` draws all complete episodes with equal probability.
        finished_only: whether to draw only episodes that have ended. If False, the newest, unfinished episodes may be
            drawn, too.
        layout: ``"padded"`` or ``"concatenated"``, see above.
        gamma: the discount factor of ``"reward_to_go"``, 0 to 1; may be set at any time. ``None`` adds no such entry.
        reward_key: the key of the rewards.
        init_key: the key of a flag that marks first steps. If stored, it is True at the first row of each episode in a
            batch, also if ``max_length`` has cut the episode.
        time_dim_name: the name of the second dim of a padded batch; ``None``: no name.
        done_key, traj_key: the keys of the done flag and the trajectory id, as for :class:`TrajectoryIndex`. An episode
            ends with a done flag or before another id.

    ``batch["priority_weight"]`` is that of the drawn row, for all rows of its episode. ``update_tensordict_priority``
    sets the priority of each row from its own TD error, and ignores padding. TorchRL's buffers update only the first
    row of each padded episode: use ``layout="concatenated"`` there.

    Options that count rows, such as ``samples_per_insert`` and mixtures of buffers, do not fit batches of unlike
    lengths: with this sampler, ``samples_per_insert`` counts episodes, and mixtures refuse it.

    Raises:
        ValueError: an argument is out of range; ``by="episode"`` with a sampler that is not uniform; ``gamma`` with a
            wrapper inside, which changes rewards.
        TypeError: the wrapped sampler is a :class:`FreshRowsSampler`, whose rows belong to unfinished episodes, a
            :class:`MinibatchSampler`, a :class:`QueueSampler`, or TorchRL's ``PrioritizedSampler``.
        KeyError: (at the first draw) neither done flags nor trajectory ids are stored; with ``gamma``, no rewards.
        SchemaError: (at the first write) the rows have an entry with the name of an additional entry.
        RuntimeError: (when sampling) no complete episode is stored, or none that the wrapped sampler can draw.

    Warns:
        RuntimeWarning: (at the first draw, on the CPU) rows of several trajectories alternate.

    Cost: O(rows of the batch). After a write, the first draw with ``by="episode"`` lists K episodes in O(K + N / 64).
    With ``by="row"``, rows are drawn again until their episodes are complete; O(N) if hardly any are. On other devices
    than the CPU, draws wait for the device, and the first ``by="episode"`` after a write reads all rows.
    Source: Chen et al., Decision Transformer, 2021. TorchRL's ``SliceSampler`` draws slices of one fixed length.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> sampler = EpisodeSampler(by="episode", gamma=1.0)
        >>> rb = ReplayBuffer(storage=PackedStorage(10), sampler=sampler, batch_size=32)
        >>> done = torch.tensor([False, False, True, False, True, False])
        >>> next = TensorDict({"reward": torch.ones(6), "done": done}, [6])
        >>> _ = rb.extend(TensorDict({"x": torch.arange(6), "next": next}, [6]))
        >>> batch = rb.sample()
        >>> batch.shape, batch["x"].unique(dim=0).tolist()
        (torch.Size([32, 3]), [[0, 1, 2], [3, 4, 4]])
        >>> shorter = batch[batch["episode_length"][:, 0] == 2][0]
        >>> shorter["mask"].tolist(), shorter["reward_to_go"].tolist()
        ([True, True, False], [2.0, 1.0, 0.0])
    """

    _level = 3
    report_keys = frozenset({"mask", "episode", "episode_step", "episode_length"})
    _shown = ("max_length", "by", "finished_only", "layout", "gamma")
    default: ClassVar[type[Sampler]]  # set in __init__.py, because samplers do not import each other
    max_length: int | None = setting(lambda name, x: None if x is None else whole(1)(name, x), is_fixed=True)
    by: Literal["episode", "row"] = setting(one_of("episode", "row"), is_fixed=True)
    layout: Literal["padded", "concatenated"] = setting(one_of("padded", "concatenated"), is_fixed=True)
    gamma: float | None = setting(lambda name, x: None if x is None else fraction(name, x), is_fixed=True)

    def __init__(
        self,
        sampler: Sampler | None = None,
        max_length: int | None = None,
        by: Literal["episode", "row"] = "row",
        finished_only: bool = True,
        *,
        layout: Literal["padded", "concatenated"] = "padded",
        gamma: float | None = None,
        reward_key: NestedKey = ("next", "reward"),
        init_key: NestedKey = "is_init",
        time_dim_name: str | None = "time",
        done_key: NestedKey = DONE_KEY,
        traj_key: NestedKey | None = TRAJ_KEY,
    ) -> None:
        super().__init__(self.default() if sampler is None else sampler, done_key, traj_key)
        self._refuse_inner()
        self.max_length, self.by, self.layout, self.gamma = max_length, by, layout, gamma
        if by == "episode" and not isinstance(self.innermost, self.default):
            remedy = "use by='row', which follows the sampler's law, or leave the sampler out"
            raise ValueError(f"by='episode' is not the law of a {type(self.innermost).__name__}: {remedy}{SEQUENCES}")
        if gamma is not None and self._inner is not None:
            reason = f"a {type(sampler).__name__} may change the rewards, whose sums gamma asks for"
            raise ValueError(f"{reason}: leave gamma out, and call rlbuf_td.functional.reward2go{SEQUENCES}")
        if by == "episode" and getattr(self.innermost, "max_age", None) is not None:
            raise ValueError(f"by='episode' draws old episodes, too: leave max_age out, or use by='row'{SEQUENCES}")
        self.reward_key, self.init_key = as_tuple(reward_key), as_tuple(init_key)
        self.finished_only, self.time_dim_name, self.gives_windows = (
            bool(finished_only),
            time_dim_name,
            layout == "padded",
        )
        self._listed: tuple[Any, tuple[Tensor, Tensor] | None] = (None, None)  # the storage's state, its episodes
        if gamma is not None:
            self.report_keys |= {"reward_to_go"}

    def _refuse_inner(self) -> None:
        inner, kind = self.innermost, type(self.innermost).__name__
        for wrapper in self._wrappers():
            if wrapper.adds_fresh_rows:
                fresh = type(wrapper).__name__
                raise TypeError(f"EpisodeSampler cannot wrap a {fresh}, whose rows belong to unfinished episodes")
        if getattr(inner, "draws_once", False) or isinstance(inner, SamplerWithoutReplacement):
            raise TypeError(f"EpisodeSampler cannot wrap a {kind}, which draws each row once: episodes may repeat")
        if isinstance(inner, PrioritizedSampler) and not hasattr(inner, "law"):
            raise TypeError(f"EpisodeSampler cannot wrap TorchRL's {kind}: use a ProportionalSampler")

    @property
    def steps_needed(self) -> int:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        return _ALL

    def draw_batch(self, storage: Storage, batch_size: int) -> Drawn:
        """Draw episodes, and return their rows as a flat batch."""
        if not len(storage):
            raise RuntimeError(EMPTY)
        refuse_disorder(self, storage)
        anchors, info = self._anchors(storage, batch_size)
        if not self.has_checked_order:
            self._warn_if_interleaved(storage)
        return self.batch_of(storage, anchors, info)

    def batch_of(self, storage: Storage, flat: Tensor, info: dict[Any, Any]) -> Drawn:
        """Return the episodes of the rows at flat indices ``flat``, complete or not, as a flat batch."""
        pieces = self._pieces(storage, flat)
        places = self._places(pieces)
        episode, lanes, size = places.episode, self._trajectories(storage).boundaries().lanes, _rows_of(storage)
        step = pieces.start[episode] + places.step
        rows = (pieces.first[episode] + step * lanes) % size
        read = self._reader(storage, flat)
        batch = rows_at(storage, rows) if read is None else read(rows, episode)
        is_first = places.real.clone()
        is_first[1:] &= episode[1:] != episode[:-1]
        flags = leaf_of(batch, self.init_key)
        if flags is not None:
            flags |= is_first.view(-1, *[1] * (flags.ndim - 1))
        info = {key: value[episode] for key, value in info.items()}
        info |= {"mask": places.real, "episode": episode, "episode_step": step}
        info["episode_length"] = pieces.length[episode]
        if self.gamma is not None and len(rows):
            info["reward_to_go"] = self._to_go(storage, pieces, places, batch)
        return rows, info, batch

    # -- the law

    def _anchors(self, storage: Storage, count: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw a row of each episode; return the flat rows, ``[B]``, and the info dict of the sampler."""
        if self.by == "row":
            return self._rows_of_whole(storage, count)
        first, length = self._episodes(storage)
        if not len(first):
            raise RuntimeError(self._no_episode())
        which, where = uniform_numbers(2 * count, self._rng, first.device).view(2, -1)
        chosen = (which * len(first)).long().clamp(max=len(first) - 1)
        rows = length[chosen]
        step = (where * rows).long().minimum(rows - 1)
        lanes = self._trajectories(storage).boundaries().lanes
        return (first[chosen] + step * lanes) % _rows_of(storage), {}

    def _rows_of_whole(self, storage: Storage, count: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw rows of complete episodes with the wrapped sampler, whose law holds among these rows."""
        flat, info = self._draw(storage, count)
        first, weight = flat[:1], info.pop("priority_weight", None)
        was_wrong = torch.zeros_like(flat, dtype=torch.bool)
        for attempt in range(_ROUNDS):
            is_wrong = ~self._is_drawable(storage, flat)
            wrong = is_wrong.nonzero()[:, 0]
            if not len(wrong):
                break
            was_wrong |= is_wrong
            others, other_info = self._drawn_again(storage, len(flat), exactly=attempt == _ROUNDS - 1)
            # A stratified draw fills a position from one segment, where perhaps no row fits: shuffle the positions.
            order = permutation(len(flat), self._rng, flat.device)[: len(wrong)] % len(others)
            flat = flat.index_copy(0, wrong, others[order])
            info = {key: value.index_copy(0, wrong, other_info[key][order]) for key, value in info.items()}
        return flat, info if weight is None else info | {
            "priority_weight": self._weights(flat, was_wrong, first, weight)
        }

    def _drawn_again(self, storage: Storage, count: int, exactly: bool) -> tuple[Tensor, dict[Any, Any]]:
        """Draw ``count`` rows; ``exactly``: of complete episodes, from the probabilities of all their rows, O(N)."""
        if not exactly:
            return draw_from(self.innermost, storage, count)
        every = written_rows(storage)
        every = every[self._is_drawable(storage, every)]
        if not len(every):
            raise RuntimeError(self._no_episode())
        kind, probability = type(self.innermost).__name__, getattr(self.innermost, "probability", None)
        if probability is None or self.innermost.report_keys - {"priority_weight", SAMPLED_AT}:
            lacks = f"hardly any row that the {kind} draws is of one, and it has no probability(index, *, storage)"
            raise RuntimeError(f"cannot find rows of complete episodes: {lacks}{SEQUENCES}")
        mass = probability(every, storage=storage).to(every.device).cumsum(0)
        if not bool(mass[-1] > 0):
            raise RuntimeError(f"no row of a complete episode has a positive probability{SEQUENCES}")
        uniform = uniform_numbers(count, self._rng, every.device) * mass[-1]
        return every[torch.searchsorted(mass, uniform, right=True).clamp(max=len(every) - 1)], {}

    def _weights(self, flat: Tensor, was_wrong: Tensor, first: Tensor, weight: Tensor) -> Tensor:
        """Return the importance weights of rows; ``weight`` is that of the rows drawn at first, ``first[0]``, ..."""
        others = was_wrong.nonzero()[:, 0]
        if len(others):
            beside = weight[:1].repeat(len(others))
            self.innermost.law.weigh_beside_(flat[others], first, beside)
            weight = weight.index_copy(0, others, beside)
            if self.innermost.weight_norm == "batch":
                weight = weight / weight.max()
        return weight

    def _is_drawable(self, storage: Storage, flat: Tensor) -> Tensor:
        """Return whether each row belongs to an episode that may be drawn, ``[B]`` bool."""
        trajectories = self._trajectories(storage)
        back, _, ended = trajectories.boundaries().reach(flat)
        found = trajectories.is_whole(flat, back)
        return found & ended if self.finished_only else found

    def _episodes(self, storage: Storage) -> tuple[Tensor, Tensor]:
        """Return the first flat row and the length of each episode that may be drawn, cached until rows change."""
        state = ref(storage), len(storage), revision_of(storage)
        if self._listed[1] is None or self._listed[0] != state:
            self._listed = state, self._trajectories(storage).whole(only_finished=self.finished_only)
        return self._listed[1]  # type: ignore[return-value]

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether a complete episode is stored, and the wrapped sampler can draw rows."""
        return (
            bool(len(storage))
            and self.sampler.can_sample(storage, batch_size)
            and bool(len(self._episodes(storage)[0]))
        )

    def _no_episode(self) -> str:
        remedy = "write more steps" if not self.finished_only else "write until one ends, or use finished_only=False"
        return f"the buffer holds no complete episode: {remedy}{SEQUENCES}"

    # -- the batch

    def _pieces(self, storage: Storage, anchors: Tensor) -> _Pieces:
        """Return the episodes of the rows ``anchors``, cut to windows of ``max_length`` steps that contain the rows."""
        boundaries = self._trajectories(storage).boundaries()
        back, ahead, _ = boundaries.reach(anchors)
        length, first = back + ahead + 1, (anchors - back * boundaries.lanes) % _rows_of(storage)
        if self.max_length is None:
            return _Pieces(first, length, torch.zeros_like(back), length)
        most = self.max_length
        least = (back + 1 - most).clamp(min=0)
        choices = back.minimum((length - most).clamp(min=0)) - least + 1
        pick = (uniform_numbers(len(anchors), self._rng, anchors.device) * choices).long().minimum(choices - 1)
        return _Pieces(first, length, least + pick, length.clamp(max=most))

    def _places(self, pieces: _Pieces) -> _Places:
        """Return the rows of a batch of pieces: ``[B * L]`` if padded, else ``[S]``."""
        rows, device = pieces.rows, pieces.rows.device
        episode = torch.arange(len(rows), device=device)
        if self.gives_windows:
            longest = self.max_length or (int(rows.max()) if len(rows) else 0)
            step = torch.arange(longest, device=device)
            real = step < rows[:, None]
            return _Places(
                episode.repeat_interleave(longest), step.minimum(rows[:, None] - 1).flatten(), real.flatten()
            )
        episode = episode.repeat_interleave(rows)
        step = torch.arange(len(episode), device=device) - (rows.cumsum(0) - rows)[episode]
        return _Places(episode, step, torch.ones_like(step, dtype=torch.bool))

    def _to_go(self, storage: Storage, pieces: _Pieces, places: _Places, batch: TensorDictBase) -> Tensor:
        """Return the discounted sum of the rewards from each row of a batch to the end of its episode, ``[S, ...]``."""
        column, gamma, device = column_of(storage, self.reward_key), float(self.gamma or 0.0), places.step.device
        if column is None or column.is_meta:
            raise KeyError(f"returns to go need {show_key(self.reward_key)}, which is not stored")
        if not column.is_floating_point():
            raise TypeError(f"rewards to sum must be floating point numbers, got {column.dtype}")
        reward, real = leaf_of(batch, self.reward_key), places.real.view(-1, *[1] * (column.ndim - 1))
        done = torch.ones_like(places.real)
        done[:-1] = (places.episode[1:] != places.episode[:-1]) | ~places.real[1:]
        found = reward2go(torch.where(real, reward, 0), done.view_as(real).expand_as(reward), gamma, time_dim=0)
        left = pieces.length - pieces.start - pieces.rows
        if self.max_length is not None and bool((left > 0).any()):
            cut, boundaries = (left > 0).nonzero()[:, 0], self._trajectories(storage).boundaries()
            after = pieces.start[cut] + pieces.rows[cut]
            rows = (pieces.first[cut] + after * boundaries.lanes) % _rows_of(storage)
            tail = torch.zeros((len(pieces.rows), *reward.shape[1:]), dtype=reward.dtype, device=device)
            tail[cut] = sums_ahead(boundaries, rows, column, int(left.max()), gamma)[0]
            power = torch.pow(gamma, (pieces.rows[places.episode] - places.step).double()).to(reward.dtype)
            found = found + power.view_as(real) * tail[places.episode]
        return torch.where(real, found, 0)

    def lay_out(self, batch: TensorDictBase, info: dict[Any, Any]) -> tuple[TensorDictBase, dict[Any, Any]]:
        """Return a flat batch and its info dict in the shape ``[B, L]``."""
        count = _count(info)
        return self._set_sample_names(batch.reshape(count, len(batch) // max(count, 1))), _by_episode(info, count)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        index, info = super().sample(storage, batch_size)
        if not self.gives_windows:
            return index, info
        count = _count(info)
        return _by_episode({"index": index}, count)["index"], _by_episode(info, count)

    def _set_sample_names(self, batch: Any) -> Any:
        if self.gives_windows and batch.ndim > 1:  # TorchRL calls this method, too
            batch.names = [*batch.names[:-1], self.time_dim_name]
        return batch

    def _revised_keys(self) -> Iterator[NestedKey]:
        yield from super()._revised_keys()
        yield self.init_key

    # -- priorities

    def anchored(self, batch: TensorDictBase, index: Tensor, td_error: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of a batch, -1 for padding, and their TD errors."""
        mask = batch.get("mask", None)
        if mask is None:
            raise KeyError(f"a batch of episodes needs its 'mask' to set priorities{SEQUENCES}")
        mask = mask.reshape(-1)
        return torch.where(mask.view(-1, *[1] * (index.ndim - 1)), index, -1), torch.where(mask, td_error, 0)

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set the priority of each row; a row that repeats the row before it is padding, and is skipped."""
        if self._is_prioritized and storage is not None and isinstance(priority, Tensor) and priority.numel() > 1:
            flat = flat_rows(index, storage, device_of(storage))
            if flat.numel() == priority.numel():
                flat, priority = flat.clone(), priority.reshape(-1)
                flat[1:][flat[1:] == flat[:-1].clone()] = -1
                index, priority = flat, torch.where(flat >= 0, priority, 0)
        super().update_priority(index, priority, storage=storage)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_listed": (None, None)}


def _rows_of(storage: Storage) -> int:
    """Return the number of rows of a full storage."""
    return columns_of(storage).batch_size[: storage.ndim].numel()


def _count(info: dict[Any, Any]) -> int:
    """Return the number of episodes of a flat batch."""
    episode = info["episode"]
    return int(episode[-1]) + 1 if len(episode) else 0


def _by_episode(info: dict[Any, Any], count: int) -> dict[Any, Any]:
    """Return entries ``[B * L, ...]`` as ``[B, L, ...]``."""

    def shaped(value: Any) -> Any:
        if isinstance(value, tuple):  # coordinates, one tensor per dim
            return tuple(map(shaped, value))
        return value.reshape(count, len(value) // max(count, 1), *value.shape[1:])

    return {key: shaped(value) for key, value in info.items()}
