"""Whole episodes, for decision transformers, returns to go and recurrent world
models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, cast
from weakref import ref

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.functional import reward2go
from rlbuf_td.samplers.common import EMPTY, setting, uniform_numbers
from rlbuf_td.samplers.row_sampler import RowSampler
from rlbuf_td.samplers.wrapper import RevisedBatch, SamplerWrapper, summable
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.checks import fraction, one_of, optional, whole
from rlbuf_td.storages.episodes import DONE_KEY, TRAJ_KEY
from rlbuf_td.storages.indexing import Info
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.tensordict_fast import leaf_of

_ALL = 1 << 62  # more steps than any trajectory has


class _Pieces(NamedTuple):
    """The drawn episodes, ``[B]`` each; a piece is the episode, or the part of it that
    is in the batch."""

    first: Tensor  # flat index of the first row of the episode
    length: Tensor  # steps of the episode
    start: Tensor  # the first step of the piece
    rows: Tensor  # steps of the piece


class EpisodeSampler(SamplerWrapper):
    """Draws whole episodes, from their first step to their last one. The batch size is
    the number of episodes.

    Episodes are complete: those that the ring has partly overwritten are never drawn,
    and by default neither are those that have not ended yet. Each batch has four
    additional entries, one number per row:

    - ``"mask"``, bool: False for padding, which copies the last row of the episode.
    - ``"episode"``, int64: the position of the row's episode in the batch, 0 to B - 1.
    - ``"episode_step"``, int64: the number of the row in its episode, from 0.
    - ``"episode_length"``, int64: the number of steps of the row's episode.

    With ``layout="padded"``, a batch of B episodes has the shape ``[B, L]``, where L is
    ``max_length``, or the length of the longest episode in the batch; padding follows
    the last step. With ``layout="concatenated"``, the episodes follow one another
    without padding, and the shape is ``[S]``, where S is the sum of their lengths.

    If ``gamma`` is given, ``"reward_to_go"`` holds the discounted sum of the rewards
    from each row to the end of its episode, also of the rewards after the last row of
    the batch; it is 0 for padding. Without ``gamma``, compute it from whole episodes:
    ``rlbuf_td.functional.reward2go(batch["next", "reward"], batch["next", "done"], gamma, mask=batch["mask"])``.

    Args:
        sampler: a :class:`UniformSampler` (the default), which may be wrapped in a
            :class:`HindsightSampler` (an episode gets one goal) or an
            :class:`NStepSampler`.
        max_length: the largest number of steps per episode. Of a longer episode, a
            batch holds ``max_length`` consecutive steps that contain a uniformly drawn
            row of the episode; all such windows are equally likely. ``None``: episodes
            of any length are returned whole.
        by: ``"row"`` draws an episode in proportion to its length, as for decision
            transformers. ``"episode"`` draws all complete episodes with equal
            probability.
        finished_only: whether to draw only episodes that have ended. If False, the
            newest, unfinished episodes may be drawn, too. May be set at any time.
        layout: ``"padded"`` or ``"concatenated"``, see above.
        gamma: the discount factor of ``"reward_to_go"``, 0 to 1. ``None`` adds no such
            entry.
        reward_key: the key of the rewards.
        init_key: the key of a flag that marks first steps. If stored, it is True at the
            first row of each episode in a batch, also if ``max_length`` has cut the
            episode.
        time_dim_name: the name of the second dim of a padded batch; ``None``: no name.
        done_key, traj_key: the keys of the done flag and the trajectory id, as for
            :class:`TrajectoryIndex`. An episode ends with a done flag or before another
            id.

    Options that count rows, such as ``samples_per_insert`` and mixtures of buffers, do
    not fit batches of unlike
    lengths: with this sampler, ``samples_per_insert`` counts episodes, and mixtures
    refuse it.

    Raises:
        ValueError: an argument is out of range; ``gamma`` with a wrapper inside, which
            changes rewards.
        TypeError: the innermost sampler draws by another law than a
            :class:`UniformSampler` without options.
        KeyError: (at the first draw) neither done flags nor trajectory ids are stored;
            with ``gamma``, no rewards.
        SchemaError: (at the first write) the rows have an entry with the name of an
            additional entry.
        RuntimeError: (when sampling) no complete episode is stored.

    Warns:
        RuntimeWarning: (at the first draw, on the CPU) rows of several trajectories
            alternate.

    Cost: O(rows of the batch); with ``gamma``, O(rows of the drawn episodes). After a
    write, the first draw lists K episodes in O(K). On other devices than the CPU, draws
    wait for the device, and the first draw after a write reads all rows.
    Source: Chen et al., Decision Transformer, 2021. TorchRL's ``SliceSampler`` draws
    slices of one fixed length.

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
    state_keys = ("finished_only",)
    # set in __init__.py, because samplers do not import each other
    default: ClassVar[type[RowSampler]]
    max_length: int | None = setting(optional(whole(1)), is_fixed=True)
    by: Literal["episode", "row"] = setting(one_of("episode", "row"), is_fixed=True)
    layout: Literal["padded", "concatenated"] = setting(
        one_of("padded", "concatenated"), is_fixed=True
    )
    gamma: float | None = setting(optional(fraction), is_fixed=True)
    finished_only: bool = setting(lambda _, value: bool(value))

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
        super().__init__(
            self.default() if sampler is None else sampler, done_key, traj_key
        )
        self._refuse_other_laws()
        self.max_length = max_length
        self.by = by
        self.layout = layout
        self.gamma = gamma
        if gamma is not None and self._inner is not None:
            reason = f"a {type(sampler).__name__} may change the rewards, whose sums gamma asks for"
            raise ValueError(
                f"{reason}: leave gamma out, and call rlbuf_td.functional.reward2go"
            )
        self.reward_key, self.init_key = as_tuple(reward_key), as_tuple(init_key)
        self.finished_only, self.time_dim_name = finished_only, time_dim_name
        self.gives_windows = layout == "padded"
        if gamma is not None:
            self.report_keys |= {"reward_to_go"}

    def _refuse_other_laws(self) -> None:
        """Raise a TypeError if the wrapped sampler draws by another law than
        uniformly."""
        sampler_inside = self.innermost
        is_uniform = getattr(type(sampler_inside), "draw", None) is self.default.draw
        options = (
            {
                "unique": sampler_inside.unique,
                "max_age": sampler_inside.max_age is not None,
            }
            if is_uniform
            else {}
        )
        wrong = [name for name, is_set in options.items() if is_set]
        if wrong or not is_uniform:
            kind = type(sampler_inside).__name__ + (
                f" with {wrong[0]}" if wrong else ""
            )
            remedy = "wrap a UniformSampler, or use a SequenceSampler, which draws windows by any law"
            raise TypeError(
                f"EpisodeSampler draws episodes uniformly or by length, not by a {kind}: {remedy}"
            )

    def settings_changed(self) -> None:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        # the storage's state, its episodes
        self._listed: tuple[Any, tuple[Tensor, Tensor] | None] = (None, None)

    @property
    def steps_needed(self) -> int:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        return _ALL

    def draw_batch(self, storage: PackedStorage, batch_size: int) -> RevisedBatch:
        """Draw episodes, and return their rows as a flat batch."""
        if not len(storage):
            raise RuntimeError(EMPTY)
        anchors = self._anchors(storage, batch_size)
        if not self.has_checked_order:
            self.warn_if_interleaved(storage)
        return self.batch_of(storage, anchors, {})

    def batch_of(
        self, storage: PackedStorage, flat: Tensor, info: Info
    ) -> RevisedBatch:
        """Return the episodes of the rows at flat indices ``flat``, complete or not, as
        a flat batch."""
        pieces = self._pieces(storage, flat)
        episode, step, real = self._layout_of(pieces.rows)
        step = pieces.start[episode] + step
        rows = storage.ring.cells_after(pieces.first[episode], step)
        batch = self.read(storage, flat, rows, episode)
        is_first = real.clone()
        is_first[1:] &= episode[1:] != episode[:-1]
        flags = leaf_of(batch, self.init_key)
        if flags is not None:
            flags |= is_first.view(-1, *[1] * (flags.ndim - 1))
        info = {key: value[episode] for key, value in info.items()}
        info |= {
            "mask": real,
            "episode": episode,
            "episode_step": step,
            "episode_length": pieces.length[episode],
        }
        if self.gamma is not None and len(rows):
            before = (pieces.length.cumsum(0) - pieces.length)[episode]
            to_go = self._to_go(storage, pieces)[before + step]
            is_real = real.view(-1, *[1] * (to_go.ndim - 1))
            info["reward_to_go"] = torch.where(is_real, to_go, 0)
        return rows, info, batch

    def _why_none(self, storage: PackedStorage) -> str:
        """Say why there is no episode to draw, and what to do."""
        if len(self.episodes_of(storage).whole(only_finished=False)[0]):
            remedy = "write until one ends, or use finished_only=False"
            return f"the buffer holds no complete episode: {remedy}"
        # more rows of an endless episode do not bring its first ones back
        return (
            "the buffer holds no complete episode: the first rows of all stored episodes are gone. Episodes that are "
            f"longer than the {torchrl_parts.capacity_in_steps(storage)} steps of a lane need a larger storage, or a "
            "SequenceSampler, which draws windows; otherwise write until the next episode ends"
        )

    # -- the law

    def _anchors(self, storage: PackedStorage, count: int) -> Tensor:
        """Draw a row of each episode; return the flat rows, ``[B]``."""
        first, length = self._episodes(storage)
        if not len(first):
            raise RuntimeError(self._why_none(storage))
        which, where = uniform_numbers(2 * count, self._rng, first.device).view(2, -1)
        if self.by == "row":
            end = length.cumsum(0)
            chosen = torch.searchsorted(
                end, (which * end[-1]).long(), right=True
            ).clamp(max=len(first) - 1)
        else:
            chosen = (which * len(first)).long().clamp(max=len(first) - 1)
        rows = length[chosen]
        return storage.ring.cells_after(
            first[chosen], (where * rows).long().minimum(rows - 1)
        )

    def _episodes(self, storage: PackedStorage) -> tuple[Tensor, Tensor]:
        """Return the first flat row and the length of each episode that may be drawn,
        cached until rows change."""
        state = ref(storage), len(storage), storage.revision
        if self._listed[1] is None or self._listed[0] != state:
            self._listed = (
                state,
                self.episodes_of(storage).whole(only_finished=self.finished_only),
            )
        return self._listed[1]  # pyrefly: ignore [bad-return]

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether a complete episode is stored."""
        return bool(len(storage)) and bool(
            len(self._episodes(cast("PackedStorage", storage))[0])
        )

    # -- the batch

    def _pieces(self, storage: PackedStorage, anchors: Tensor) -> _Pieces:
        """Return the episodes of the rows ``anchors``, cut to windows of ``max_length``
        steps that contain the rows."""
        back, ahead, _ = self.episodes_of(storage).spans(anchors)
        length = back + ahead + 1
        first = storage.ring.cells_after(anchors, -back)
        if self.max_length is None:
            return _Pieces(first, length, torch.zeros_like(back), length)
        most = self.max_length
        least = (back + 1 - most).clamp(min=0)
        choices = back.minimum((length - most).clamp(min=0)) - least + 1
        pick = (
            (uniform_numbers(len(anchors), self._rng, anchors.device) * choices)
            .long()
            .minimum(choices - 1)
        )
        return _Pieces(first, length, least + pick, length.clamp(max=most))

    def _layout_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lay out pieces of ``rows``, ``[B]``, rows: ``[B * L]`` if padded, else
        ``[S]``.

        Returns:
            For each row of the batch, its piece, its place in the piece, and whether it
            is no padding.
        """
        if not self.gives_windows:
            episode, step = _one_after_another(rows)
            return episode, step, torch.ones_like(step, dtype=torch.bool)
        longest = self.max_length or (int(rows.max()) if len(rows) else 0)
        episode = torch.arange(len(rows), device=rows.device).repeat_interleave(longest)
        step = torch.arange(longest, device=rows.device)
        return (
            episode,
            step.minimum(rows[:, None] - 1).flatten(),
            (step < rows[:, None]).flatten(),
        )

    def _to_go(self, storage: PackedStorage, pieces: _Pieces) -> Tensor:
        """Return the discounted sum of the rewards from each step of the drawn episodes
        to its end."""
        shape = summable(storage, self.reward_key, "returns to go").shape
        episode, step = _one_after_another(pieces.length)
        reward = storage.all_rows().column_at(
            self.reward_key, storage.ring.cells_after(pieces.first[episode], step)
        )
        is_last = (
            (step == pieces.length[episode] - 1)
            .view(-1, *[1] * len(shape))
            .expand_as(reward)
        )
        return reward2go(reward, is_last, self.gamma or 0.0, time_dim=0)

    def rows_per_window(self, info: Info) -> int:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        episode = info["episode"]
        return len(episode) // (int(episode[-1]) + 1) if len(episode) else 1

    def _revised_keys(self) -> Iterator[NestedKey]:
        yield from super()._revised_keys()
        yield self.init_key

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_listed": (None, None)}


def _one_after_another(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the episode and the number of each step, ``[S]`` each, of episodes with
    ``steps`` steps, ``[B]``."""
    episode = torch.arange(len(steps), device=steps.device).repeat_interleave(steps)
    return episode, torch.arange(len(episode), device=steps.device) - (
        steps.cumsum(0) - steps
    )[episode]
