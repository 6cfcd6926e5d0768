"""Small faults, and whether the tests notice them
(``python tests/benchmarks/breaks.py``).

Each fault is put into a copy of the repository, where the tests named for it run until
one fails. This one must pass in an intact copy. The exit status is 1 if a fault is not
found, or if the text that it replaces is not in the package exactly once.

A fault in ``kernels/`` takes a minute or two, because its copy compiles the loops that
its tests use.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_UNSHRUNK = "--hypothesis-profile", "the first failure"
LONGEST = 900  # seconds of the tests of a fault
COPIED = "rlbuf_td", "tests", "notebooks", "README.md", "pyproject.toml", "docs"


class Break(NamedTuple):
    """A fault: a text of a file in ``rlbuf_td/``, what replaces it, and the arguments
    of pytest that find it."""

    name: str
    file: str
    text: str
    replacement: str
    tests: str


BREAKS = [
    # -- storages
    Break(
        "rows past the end of the ring get the wrong data",
        "kernels/batch/write_cpu.py",
        "slots[e] = slot + 1 if slot + 1 < steps else 0",
        "slots[e] = slot + 1 if slot + 1 < steps else min(1, steps - 1)",
        "tests/storages/test_packed.py tests/test_lockstep.py",
    ),
    Break(
        "the torch form takes a stale stamp",
        "storages/ring.py",
        "return flat.masked_fill(stale, -1), int(count)",
        "return flat, int(count)",
        "tests/test_replaced_rows.py",
    ),
    Break(
        "the compiled form takes a stale stamp",
        "kernels/batch/cpu.py",
        "                row[i] = -1\n                stale += 1\n",
        "                stale += 1\n",
        "tests/test_replaced_rows.py",
    ),
    Break(
        "listeners are told of the first new row alone",
        "storages/write_plan.py",
        "in self.others:\n            listener.mark_update(index)\n",
        "in self.others:\n            listener.mark_update(index[:1])\n",
        "tests/writers/test_ring.py",
    ),
    Break(
        "a kernel draws from neighbouring segments one after another",
        "kernels/sum_tree/triton.py",
        "segment = (begin + draw * step) % batch",
        "segment = (begin + draw) % batch",
        "tests/kernels/test_triton.py -k cumulative",
    ),
    Break(
        "a kernel sums the rewards of other lanes",
        "kernels/wrappers/triton.py",
        "row = _cell_after(slot, lane, step, steps, lanes)",
        "row = (cell + step) % (steps * lanes)",
        "tests/kernels/test_triton.py -k n_step",
    ),
    Break(
        "a kernel ends an episode one row early",
        "kernels/episodes/triton.py",
        "rows_to_end = closing + ago + position + 1",
        "rows_to_end = closing + ago + position",
        "tests/kernels/test_triton.py -k noted",
    ),
    Break(
        "windows of a kernel begin before their episode",
        "kernels/wrappers/triton.py",
        "before = tl.minimum(back, before)\n        after",
        "before = before\n        after",
        "tests/kernels/test_triton.py -k windows",
    ),
    Break(
        "a kernel takes the goal of the last row",
        "kernels/wrappers/triton.py",
        "chosen = _cell_after(slot, lane, there, steps, lanes)",
        "chosen = _cell_after(slot, lane, ahead, steps, lanes)",
        "tests/kernels/test_triton.py -k goals",
    ),
    Break(
        "a kernel updates the priorities of rows that are gone",
        "kernels/sum_tree/triton.py",
        "is_stale = is_row & is_gone",
        "is_stale = is_row & (cell < 0)",
        "tests/kernels/test_triton.py -k updates",
    ),
    Break(
        "an episode goes on before the oldest row",
        "kernels/episodes/cpu.py",
        "return min(back, rows_before(numbers, lane, slot)) if back else back",
        "return back",
        "tests/test_lockstep.py",
    ),
    Break(
        "the break after a process was killed is lost",
        "storages/packed.py",
        "                        self.episodes.end()\n            file.finish()",
        "                        pass\n            file.finish()",
        "tests/storages/test_kill.py -k reopened",
    ),
    Break(
        "rows of one lane in one call share a place",
        "kernels/batch/write_cpu.py",
        "slots[e] = slot + 1 if slot + 1 < steps else 0",
        "slots[e] = slot",
        "tests/storages/test_lanes.py",
    ),
    Break(
        "n-step transitions of shared rows have the next observation of their first step",
        "storages/rows/dedup.py",
        'self.read_(last, [leaf if key[0] == "next" else None for key, leaf in named])',
        'self.read_(cells, [leaf if key[0] == "next" else None for key, leaf in named])',
        "tests/test_composition.py -k 'observations and n-step'",
    ),
    Break(
        "the oldest entry of a lane is taken for that of the second row",
        "kernels/rows/entries_cpu.py",
        "oldest = (written - kept) % steps * stored.lanes + lane",
        "oldest = (written - kept + 1) % steps * stored.lanes + lane",
        "tests/storages/test_dedup.py -k 'frames or stack or chunks'",
    ),
    Break(
        "the lock admits two processes",
        "storages/lock.py",
        "fcntl.lockf(self._file.descriptor, fcntl.LOCK_EX)",
        "fcntl.lockf(self._file.descriptor, fcntl.LOCK_SH)",
        "tests/storages/test_sharing.py",
    ),
    Break(
        "a write that was interrupted is not given up",
        "storages/write_plan.py",
        "                ring.finish()\n        except BaseException:\n"
        "            if ring.dirty:\n                storage.recover()\n            raise",
        "                ring.finish()\n        except BaseException:\n            raise",
        "tests/storages/test_kill.py",
    ),
    Break(
        "a killed write leaves the priorities of the rows that it was about to replace",
        "samplers/priorities.py",
        "        magnitude[~is_old] = -1.0\n",
        "",
        "tests/storages/test_kill.py",
    ),
    # -- samplers
    Break(
        "a uniform draw counts holes as rows",
        "samplers/uniform.py",
        "flat.random_(0, rows, generator=generator)",
        "flat.random_(0, storage.ring.longest * storage.ring.lanes, generator=generator)",
        "tests/storages/test_lanes.py",
    ),
    Break(
        "new rows get half the largest magnitude",
        "kernels/batch/write_cpu.py",
        "fill(tree, start, head, _entry(record), alpha, record.eps)",
        "fill(tree, start, head, _entry(record) / 2, alpha, record.eps)",
        "tests/samplers/test_prioritized.py -k new_rows",
    ),
    Break(
        "new rows of a reservoir get no priority",
        "samplers/prioritized.py",
        "        self.priorities.enter(index, storage)\n",
        "        pass\n",
        "tests/samplers/test_prioritized.py -k new_rows",
    ),
    Break(
        "importance weights are not divided by the largest of the buffer",
        "kernels/sum_tree/cpu.py",
        "smallest = arrays.minima[root] if law.norm == BY_BUFFER else total / rows",
        "smallest = total / rows",
        "tests/samplers/test_prioritized.py",
    ),
    Break(
        "the torch form never draws from the last stratum",
        "kernels/strata.py",
        "segment = (first + offset) % batch",
        "segment = (first + offset) % max(batch - 1, 1)",
        "tests/kernels/test_draws.py",
    ),
    Break(
        "the torch form ranks ties from the newest row on",
        "kernels/rank_order/__init__.py",
        "self.magnitude.sort(descending=True, stable=True).indices",
        "len(self.magnitude) - 1 - self.magnitude.flip(0).sort(descending=True, stable=True).indices",
        "tests/samplers/test_prioritized.py -k ties",
    ),
    Break(
        "compiled n-step returns have one power of gamma less",
        "kernels/wrappers/cpu.py",
        "        discount *= gamma\n        total += discount * _reward_at(rewards, cell)",
        "        total += discount * _reward_at(rewards, cell)\n        discount *= gamma",
        "tests/samplers/test_n_step.py",
    ),
    Break(
        "hindsight takes the goal before the step",
        "samplers/hindsight.py",
        'achieved = ("next", *wrapper.achieved_goal_key)',
        "achieved = wrapper.achieved_goal_key",
        "tests/samplers/test_hindsight.py",
    ),
    Break(
        "the burn-in mask is shifted by one step",
        "kernels/wrappers/cpu.py",
        "store(burn_in_mask + row, position < windows.burn_in, np.bool_)",
        "store(burn_in_mask + row, position <= windows.burn_in, np.bool_)",
        "tests/test_composition.py -k sequence",
    ),
    Break(
        "TD errors of the burn-in count",
        "kernels/batch/cpu.py",
        "            and not load(updates.burn_in_mask + i, np.uint8)\n",
        "",
        "tests/test_composition.py -k sequence",
    ),
    Break(
        "chunks begin one row late",
        "samplers/sequence.py",
        "self._reach(storage, part)[0] % (self.stride or 1) == 0]",
        "self._reach(storage, part)[0] % (self.stride or 1) == 1 % (self.stride or 1)]",
        "tests/samplers/test_sequence.py -k large_rings",
    ),
    Break(
        "a piece of an episode may miss the row that was drawn",
        "samplers/episode.py",
        "least = (back + 1 - most).clamp(min=0)",
        "least = (back - most).clamp(min=0)",
        "tests/samplers/test_episode.py",
    ),
    Break(
        "minibatches share a row",
        "samplers/minibatch.py",
        "position = stop\n",
        "position = max(start + 1, stop - (stop < count))\n",
        "tests/samplers/test_uniform.py",
    ),
    Break(
        "the oldest row of the window is never drawn",
        "samplers/recency.py",
        "span = self.span(steps)",
        "span = max(self.span(steps) - 1, 1)",
        "tests/samplers/test_uniform.py -k law",
    ),
    # -- writers
    Break(
        "a row of a queue is given twice",
        "writers/queue.py",
        "numbers[_TAKEN] = self._rows_written - self.waiting + count",
        "numbers[_TAKEN] = self._rows_written - self.waiting + count - 1",
        "tests/buffers/test_experience_queue.py -k once",
    ),
    Break(
        "the last place of a reservoir is never replaced",
        "writers/reservoir.py",
        "min(int(slot * steps), steps - 1)",
        "int(slot * (steps - 1))",
        "tests/writers/test_reservoir.py",
    ),
    Break(
        "a rollout does not bootstrap where it is truncated",
        "writers/estimator.py",
        "breaks = ends & ~terminated",
        "breaks = ends & terminated",
        "tests/writers/test_rollout.py",
    ),
    # -- functional
    Break(
        "V-trace goes on over steps that are done and not terminated",
        "functional/advantage.py",
        '_threshold("c_thresh", c_thresh, ratio))).masked_fill(\n        done, 0',
        '_threshold("c_thresh", c_thresh, ratio))).masked_fill(\n        terminated, 0',
        "tests/functional/test_functional.py -k torchrls",
    ),
    Break(
        "compiled GAE goes on over steps that are done and not terminated",
        "kernels/scan/cpu.py",
        "later = zero if done[i, t, f] else decay * advantage[i, t + 1, f]",
        "later = zero if terminated[i, t, f] else decay * advantage[i, t + 1, f]",
        "tests/functional/test_functional.py",
    ),
    # -- buffers
    Break(
        "a failed write stays counted",
        "buffers/replay.py",
        "            yield\n            flow.count_inserts(inserted - flow.inserted)",
        "            flow.count_inserts(rows)\n            yield",
        "tests/test_refusals.py -k samples_per_insert",
    ),
    Break(
        "a mixture always rounds the shares down",
        "buffers/mixture.py",
        "        if not all(map(float.is_integer, bounds)):\n",
        "        if all(map(float.is_integer, bounds)):\n",
        "tests/buffers/test_mixture.py",
    ),
    Break(
        "a mixture updates rows of other members",
        "buffers/mixture.py",
        "index=torch.where(is_own[:, None] if index.ndim > 1 else is_own, index, -1)",
        "index=index.clone()",
        "tests/test_lockstep.py -k mixtures_agree",
    ),
    Break(
        "write_back changes rows that were replaced",
        "buffers/replay.py",
        "flat = storage.ring.skip_stale(flat, stamp)[0]",
        "flat = flat.clone()",
        "tests/storages/test_editing.py -k still_there",
    ),
    # -- environments
    Break(
        "a step that is truncated is not done",
        "envs/transition.py",
        'outcome["done"] = outcome["terminated"] | outcome["truncated"]',
        'outcome["done"] = outcome["terminated"].clone()',
        "tests/envs/test_gymnasium_recorder.py",
    ),
    # -- checkpoints
    Break(
        "a dump lacks the state of the generator",
        "checkpoint/buffer.py",
        "    if generator is not None:\n        state",
        "    if False:\n        state",
        "tests/test_goes_on.py -k dump",
    ),
    Break(
        "a damaged file is loaded",
        "checkpoint/files.py",
        "if chunk_name(data) != name:",
        'if chunk_name(data) == "":',
        "tests/checkpoint/test_damage.py -k random_damage",
    ),
    # -- changes that are no writes
    Break(
        "weights of a new alpha count as computed before they are",
        "samplers/proportional.py",
        "            settings[WEIGHED] = nan\n",
        "            settings[WEIGHED] = alpha\n",
        "tests/test_interrupted_changes.py",
    ),
    Break(
        "Ctrl-C takes effect while a load replaces the parts of a buffer",
        "checkpoint/buffer.py",
        "@defer_sigint\ndef restore(",
        "def restore(",
        "tests/test_interrupted_changes.py",
    ),
    Break(
        "a load is not told to the other buffers over a storage",
        "storages/packed.py",
        "        self.tell_replaced(are_loaded=True, but=but)\n",
        "",
        "tests/test_replaced_rows.py",
    ),
    Break(
        "the estimates of a part of a rollout are taken for those of the whole",
        "storages/ring.py",
        "return self.numbers[ESTIMATED] == self.numbers[PUBLICATION]",
        "return self.numbers[ESTIMATED] > 0",
        "tests/writers/test_rollout.py -k 'part or share'",
    ),
    # -- processes
    Break(
        "priorities of shared rows in a file are not shared",
        "storages/packed.py",
        "            self.shared = True\n",
        "            self.shared = self.scratch_dir is None\n",
        "tests/storages/test_sharing.py -k 'file and fork'",
    ),
    Break(
        "a dump keeps a chunk that has changed on the disk",
        "checkpoint/files.py",
        "is_sound = np.array_equal(np.fromfile(file, np.uint8), data)",
        "is_sound = True",
        "tests/checkpoint/test_damage.py -k damaged_on_the_disk",
    ),
    Break(
        "flow control counts rows that a shard has refused",
        "distributed/links.py",
        "self._give_back(refusal.epoch, inserted=refusal.rows)",
        "pass",
        "tests/distributed/test_shards.py -k flow_control_counts",
    ),
    # -- two ways in to one thing
    Break(
        "a report replaces stored entries within a wrapper",
        "samplers/row_sampler.py",
        "        refuse_replacing(sampler, storage, info)",
        "        pass",
        "tests/test_siblings.py",
    ),
    Break(
        "a plan is used after the rows have moved",
        "buffers/replay.py",
        "                or plan.epoch != self._storage.epoch\n",
        "",
        "tests/test_replaced_rows.py -k move",
    ),
    # -- waiting
    Break(
        "the rows of a batch that waits can be removed before it is drawn",
        "buffers/replay.py",
        """        with self._storage.lock:
            if permission is not None:
                permission.ask()
""",
        """        if permission is not None:
            permission.ask()
        with self._storage.lock:
""",
        "tests/buffers/test_flow.py -k waited",
    ),
    Break(
        "a TensorDict is written from the addresses of a step",
        "storages/write_plan.py",
        "record = self.ring_record.copy()",
        "record = self.ring_record",
        "tests/buffers/test_add_step.py",
    ),
    Break(
        "rows of some environments go to the lanes of the first ones",
        "buffers/step_writer.py",
        "self._lane_ids[:count] = chosen",
        "self._lane_ids[:count] = np.arange(count)",
        "tests/envs/test_gymnasium_recorder.py",
    ),
    Break(
        "an interrupted write with torch is not given up",
        "storages/write_plan.py",
        "len(cells))\n            ring.finish()\n        except BaseException:\n"
        "            if ring.dirty:\n                storage.recover()\n            raise",
        "len(cells))\n            ring.finish()\n        except BaseException:\n            raise",
        "tests/storages/test_kill.py",
    ),
    Break(
        "all components of rewards have the first gamma",
        "writers/rollout.py",
        "            return numbers.clone()",
        "            return float(numbers.flatten()[0])",
        "tests/writers/test_rollout.py",
    ),
    Break(
        "advantages of all components are normalized together",
        "functional/summary.py",
        "    dims = [dim for dim in range(x.ndim) if dim not in excluded]",
        "    dims = [*range(x.ndim)]",
        "tests/writers/test_rollout.py",
    ),
    Break(
        "updates with and without stamps are taken for the same",
        "samplers/priorities.py",
        "        stamp = others.pop(0) if update.stamp is not None else 0",
        "        stamp = 0",
        "tests/test_replaced_rows.py",
    ),
    Break(
        "a step that resets keeps the first observation of the next episode",
        "envs/gymnasium_recorder.py",
        '        is_reset = has_ended and self._mode == "SameStep"',
        "        is_reset = False",
        "tests/envs/test_gymnasium_recorder.py",
    ),
    Break(
        "rewards too large for the rows are rounded",
        "envs/step_columns.py",
        "return max(numbers) <= self._exact and min(numbers) >= -self._exact",
        "return max(numbers) <= self._exact",
        "tests/envs tests/buffers/test_add_step.py",
    ),
    # -- corners of dumps and loads
    Break(
        "a dump that fails leaves its files",
        "checkpoint/files.py",
        "        try:\n            yield writer\n        finally:\n            writer.clean()",
        "        yield writer\n        writer.clean()",
        "tests/checkpoint/test_damage.py -k a_full_disk_leaves_only_the_previous_dump",
    ),
    Break(
        "a dump cannot be made after one was killed before its manifest was in place",
        "checkpoint/files.py",
        "        (self.path / _NEXT).unlink(missing_ok=True)\n",
        "",
        "tests/checkpoint/test_damage.py -k what_a_killed_dump_left_is_removed_by_the_next",
    ),
    Break(
        "older dumps of a mixture stay beside the newest",
        "checkpoint/files.py",
        "if match and match[1] == kind and other != folder:",
        "if match and match[1] != kind and other != folder:",
        "tests/buffers/test_mixture.py -k a_dump_that_is_not_finished_leaves_the_old_one_whole",
    ),
    Break(
        "loaded rows alone keep the priorities of the rows before",
        "checkpoint/buffer.py",
        "    empty_part(rb.sampler)\n    empty_part(rb.writer)",
        "    empty_part(rb.writer)",
        "tests/test_replaced_rows.py -k plans_and_updates_follow_rows_that_move",
    ),
    Break(
        "a load does not restore the counts of batches",
        "checkpoint/buffer.py",
        "    rb.returned.set([state.get(name) or 0 for name in _RETURNED])\n",
        "",
        "tests/checkpoint/test_dumps.py -k batch_size_and_the_counts",
    ),
    Break(
        "a load does not restore the batch size",
        "checkpoint/buffer.py",
        '    rb._batch_size = state["_batch_size"]\n',
        "",
        "tests/checkpoint/test_dumps.py -k batch_size_and_the_counts",
    ),
    Break(
        "episodes that a load interrupts stay open in the statistics of its buffer",
        "checkpoint/buffer.py",
        "        rb.episode_stats.forget_open()\n",
        "        pass\n",
        "tests/diagnostics/test_episode_stats.py -k with_ids_alone",
    ),
    Break(
        "a load replaces the generator that others share",
        "checkpoint/buffer.py",
        "elif current is not None and current.device == generator.device:",
        "elif current is None:",
        "tests/checkpoint/test_dumps.py -k generator_that_others",
    ),
    # -- corners of diagnostics and commands
    Break(
        "done alone counts as truncated in the statistics",
        "diagnostics/episode_stats.py",
        "terminated = done if truncated is None else done & ~truncated",
        "terminated = torch.zeros_like(done)",
        "tests/diagnostics/test_episode_stats.py -k flag_that_is_missing",
    ),
    Break(
        "statistics go on with trajectory 0 after a load",
        "diagnostics/episode_stats.py",
        "self._keys[self._keys >= 0] = _FREE",
        "self._keys[self._keys > 0] = _FREE",
        "tests/diagnostics/test_episode_stats.py -k with_ids_alone",
    ),
    Break(
        "an open episode is forgotten while it is written",
        "diagnostics/episode_stats.py",
        "        self._keys[stale] = _FREE\n",
        "        self._keys[:] = _FREE\n",
        "tests/diagnostics/test_episode_stats.py -k lanes_of_several_dims_and_padding_and_many_lanes_after",
    ),
    Break(
        "the doctor reads a full ring of TorchRL's from its first slot",
        "storages/indexing.py",
        "oldest = torchrl_parts.last_step(storage, steps) + 1",
        "oldest = 0",
        "tests/diagnostics/test_doctor.py -k a_healthy_buffer_gives_no_finding",
    ),
    Break(
        "the flags of one agent end trajectories for the doctor",
        "diagnostics/doctor/record.py",
        "return [key for key in keys if len(key) == shortest]",
        "return [key for key in keys if len(key) >= shortest]",
        "tests/diagnostics/test_doctor.py -k flags_of_agents",
    ),
    Break(
        "the doctor ignores trajectory ids in storages of TorchRL's",
        "diagnostics/doctor/record.py",
        "return cut if self.ids is None else cut | (self.ids != self.ids.roll(-1))",
        "return cut",
        "tests/diagnostics/test_doctor.py -k a_fault_gives_exactly_its_finding",
    ),
    Break(
        "infinite values are out of bounds, too",
        "diagnostics/doctor/bounds.py",
        "((values < self.low) | (values > self.high)) & values.isfinite()",
        "(values < self.low) | (values > self.high)",
        "tests/diagnostics/test_doctor.py -k out_of_bounds_too",
    ),
    Break(
        "ages of drawn rows are wrong where lanes differ in length",
        "diagnostics/health.py",
        "if isinstance(storage, PackedStorage) and are_ragged(storage):",
        "if False:",
        "tests/storages/test_lanes.py -k lane_has_got",
    ),
    Break(
        "a plan of memory rounds the steps of a lane down",
        "diagnostics/memory_plan.py",
        "steps = -(-capacity // lanes)",
        "steps = capacity // lanes",
        "tests/diagnostics/test_memory_plan.py -k rows_are_planned_byte_for_byte",
    ),
    Break(
        "an interrupted command reports success",
        "__main__.py",
        "return 130",
        "return 0",
        "tests/cli/test_main.py -k ctrl_c_ends_a_command_without_a_traceback",
    ),
    Break(
        "the doctor's command ignores --ignore",
        "diagnostics/doctor/__init__.py",
        "report = check(options.path, space=options.env, ignore=options.ignore)",
        "report = check(options.path, space=options.env)",
        "tests/diagnostics/test_doctor.py -k the_command_returns_1_for_findings_and_2_for_what_it_cannot",
    ),
    Break(
        "a load drops open episodes without ids from statistics",
        "diagnostics/episode_stats.py",
        "        self._keys[self._keys >= 0] = _FREE\n",
        "        self._keys[:] = _FREE\n",
        "tests/diagnostics/test_episode_stats.py -k with_ids_alone",
    ),
    # -- corners of recorders
    Break(
        "a masked reset after a step that failed begins no episode in the other lanes",
        "envs/gymnasium_recorder.py",
        "self._restart(np.ones_like(lanes) if are_lost else lanes)",
        "self._restart(lanes)",
        "tests/envs/test_gymnasium_recorder.py -k breaks_off_every_episode",
    ),
    Break(
        "the infos of the end are those of the next episode's beginning",
        "envs/recorder.py",
        'value = info_of(info, ("final_info", *path), lane) if ended[lane] else None',
        "value = None",
        "tests/envs/test_gymnasium_recorder.py -k lanes_hold_the_histories_and_infos_of_their_environments",
    ),
    Break(
        "an info that a lane lacks is stored as another lane has it",
        "envs/recorder.py",
        "if mask is not None and not mask[lane]:",
        "if mask is not None and not mask.any():",
        "tests/envs/test_gymnasium_recorder.py -k lanes_hold_the_histories_and_infos_of_their_environments",
    ),
    Break(
        "a recorder gives the last stored trajectory id again",
        "envs/recorder.py",
        "return int(ids[:steps].max()) + 1",
        "return int(ids[:steps].max())",
        "tests/envs/test_gymnasium_recorder.py -k loaded_rows_have",
    ),
    Break(
        "a recorder does not read the ids of loaded rows",
        "envs/recorder.py",
        "            self._numbers[_HAS_READ] = 0\n",
        "",
        "tests/envs/test_gymnasium_recorder.py -k loaded_rows_have",
    ),
    Break(
        "some environments may be reset alone after a step that failed",
        "envs/pettingzoo_recorder.py",
        "lost = [e for e in self._lost() if not mask[e]]",
        "lost = [e for e in self._lost() if not mask.any()]",
        "tests/envs/test_pettingzoo_recorder.py -k all_environments_are_reset",
    ),
    Break(
        "a game that a time limit ends is terminated if one agent is",
        "envs/pettingzoo_recorder.py",
        "are_terminated = is_done and all(terminated[agent] for agent in acting)",
        "are_terminated = is_done and any(terminated[agent] for agent in acting)",
        "tests/envs/test_pettingzoo_recorder.py -k rows_are_the_steps_of_the_environments_and_zeros_for",
    ),
    Break(
        "all environments of a list get one seed",
        "envs/pettingzoo_recorder.py",
        "return [seed + e for e in range(len(self.envs))]",
        "return [seed for e in range(len(self.envs))]",
        "tests/envs/test_pettingzoo_recorder.py -k own_seed",
    ),
    Break(
        "extras of agents that are absent are stored",
        "envs/pettingzoo_recorder.py",
        "                    self._rows[key][absent] = 0\n",
        "                    pass\n",
        "tests/envs/test_pettingzoo_recorder.py -k extras_are_stored_and_those_of_absent_agents_are_zeros",
    ),
    Break(
        "the last steps of dead agents are lost at a reset",
        "envs/aec_recorder.py",
        "            self._end_dead()\n",
        "            pass\n",
        "tests/envs/test_pettingzoo_recorder.py -k what_a_reset_interrupts_is_dropped_but_not_what_has_ended",
    ),
    Break(
        "an interrupted step joins two episodes",
        "envs/gymnasium_recorder.py",
        "        if has_ended or self._has_ended:\n            self._end(",
        "        self._obs = observation\n        if has_ended or self._has_ended:\n            self._end(",
        "tests/test_siblings.py -m slow -k interrupted_recorder",
    ),
    Break(
        "an interrupted turn is stored twice",
        "envs/aec_recorder.py",
        "            with self._stopped_if_interrupted():\n                seat.end",
        "            if True:\n                seat.end",
        "tests/test_siblings.py -k interrupted_recorder",
    ),
    Break(
        "a masked reset resets all lanes",
        "envs/gymnasium_recorder.py",
        "        self._ended &= ~lanes\n",
        "        self._ended[:] = False\n",
        "tests/envs/test_gymnasium_recorder.py -k leaves_the_other_episodes",
    ),
    # -- corners of buffers
    Break(
        "flow control counts loaded rows twice",
        "buffers/flow.py",
        "        self._numbers[_INSERTED] -= self._written\n",
        "",
        "tests/test_goes_on.py -k counted",
    ),
    Break(
        "a batch of before a load is taken back from the counts after it",
        "buffers/flow.py",
        "        if epoch == self.epoch:\n",
        "        if epoch <= self.epoch:\n",
        "tests/buffers/test_flow.py -k a_batch_that_fails_after_the_rows_were_removed_does_not_count_below",
    ),
    Break(
        "a queue whose waiting rows fit no batch blocks for ever",
        "buffers/experience_queue.py",
        "divisor = gcd(batch, write, self.waiting)",
        "divisor = gcd(batch, write)",
        "tests/buffers/test_flow.py -k block_forever",
    ),
    Break(
        "a lane's new handle goes on with the episode of the old one",
        "buffers/lane.py",
        "begins = self._process != os.getpid()",
        "begins = False",
        "tests/storages/test_lanes.py -k in_its_lane_alone",
    ),
    Break(
        "a mixture does not restore whether its shares are exact",
        "buffers/mixture.py",
        '        self.exact = bool(state["exact"])\n',
        "",
        "tests/buffers/test_mixture.py -k shares_are_exact",
    ),
    Break(
        "a mixture changes some members before it refuses an update",
        "buffers/mixture.py",
        "for member, update in updates if len(updates) > 1 else []:",
        "for member, update in updates[:1] if len(updates) > 1 else []:",
        "tests/test_lockstep.py -k 'programs and refuses'",
    ),
    Break(
        "a mixture loads some members before it finds that another is damaged",
        "checkpoint/buffer.py",
        "        if rows is not None:\n            _verify(rows)\n\n\ndef _verify",
        "\n\ndef _verify",
        "tests/buffers/test_mixture.py -k damaged_member",
    ),
    Break(
        "Ctrl-C loads some members of a mixture alone",
        "buffers/mixture.py",
        "            with self._members_locked(), defer_sigint:\n                self._restore_own(state)\n",
        "            with self._members_locked():\n                self._restore_own(state)\n",
        "tests/buffers/test_mixture.py -k interrupted_load",
    ),
    Break(
        "a share that is set makes the others even",
        "buffers/mixture.py",
        "other: old * (1 - share) / others if others else even",
        "other: even",
        "tests/buffers/test_mixture.py -k proportion_of_the_others",
    ),
    Break(
        "padding counts in the advantages of a minibatch",
        "buffers/rollout.py",
        'batch.get(key), estimator.mask_of(batch), info.get("mask")',
        "batch.get(key), estimator.mask_of(batch), None",
        "tests/buffers/test_rollout.py -k advantages_are_normalized_over_unpadded_rows",
    ),
    Break(
        "the summary of a rollout is that of the first one",
        "buffers/rollout.py",
        "if self._summary is None or self._summary[0] != revision:",
        "if self._summary is None:",
        "tests/buffers/test_rollout.py -k the_summary_is_a_flat_dict_of_floats_computed_once_a_rollout",
    ),
    Break(
        "a loop over minibatches that was left counts as one that goes on",
        "buffers/rollout.py",
        "            sampler.end_pass()",
        "            pass",
        "tests/buffers/test_rollout.py -k over_after_a_load",
    ),
    Break(
        "a first write that is refused sets the class of the rows",
        "buffers/replay.py",
        "                storage.row_class = before\n",
        "                pass\n",
        "tests/storages/test_row_classes.py -k other_classes_are_refused_and_change_nothing",
    ),
    Break(
        "the storage of a closed buffer stays open",
        "buffers/replay.py",
        "        parts.storage.detach(self)\n",
        "        pass\n",
        "tests/storages/test_memory.py -k the_rows_are_freed_at_the_end_of_a_with_block",
    ),
    Break(
        "a buffer that was shut down keeps the file of priorities",
        "buffers/replay.py",
        "            self.parts.prioritized.priorities.file = None",
        "            pass",
        "tests/storages/test_reopen.py -k updates_are_kept",
    ),
    Break(
        "flow control goes on counting when the storage is replaced",
        "buffers/replay.py",
        "                self.flow.restart(row_count(storage))",
        "                pass",
        "tests/buffers/test_flow.py -k rows_that_are_brought_count_as_written_and_as_sampled_often_enough",
    ),
    Break(
        "batches of removed rows that were drawn ahead are returned",
        "buffers/replay.py",
        "            if self._storage.ring.are_gone(ahead.written):\n",
        "            if False:\n",
        "tests/test_replaced_rows.py -k all_that_follows_the_rows_takes_other_rows_as_new",
    ),
    Break(
        "padding is written back",
        "buffers/replay.py",
        '                kept &= first_of_row(batch.get("mask"), dims, inner).to(kept.device)',
        "                pass",
        "tests/storages/test_editing.py -k what_a_sequence_repeats_is_not_written",
    ),
    Break(
        "a buffer with another storage is told of the rows of the old one",
        "buffers/replay.py",
        "            previous.detach(self)\n",
        "",
        "tests/test_clean_up.py -k told_of_its_rows",
    ),
    Break(
        "a closed buffer releases the rows of TorchRL's plain ones",
        "buffers/replay.py",
        "            isinstance(listener, TorchRLBuffer)\n",
        "            isinstance(listener, TensorDictReplayBuffer)\n",
        "tests/test_clean_up.py -k leaves_the_rows_to_others",
    ),
    Break(
        "rows that a new buffer finds count as not sampled yet",
        "buffers/flow.py",
        "        if not self._numbers[_EPOCH]:\n            self.restart(len(storage.ring))\n",
        "",
        "tests/buffers/test_flow.py -k rows_that_are_brought",
    ),
    Break(
        "a refused sampler keeps the generator",
        "buffers/replay.py",
        "                torchrl_parts.set_generator(sampler, rng)\n",
        "",
        "tests/test_clean_up.py -k is_refused_keeps",
    ),
    Break(
        "steps of a forked lane go on with the episode of another process",
        "buffers/lane.py",
        "        begins = self._process != os.getpid()\n",
        "        begins = not self._process\n",
        "tests/storages/test_lanes.py -k inherits_a_lane",
    ),
    # -- corners of samplers
    Break(
        "a truncated row that gets another goal is no longer done",
        "samplers/hindsight.py",
        "other = truncated if truncated is not None else done & ~terminated",
        "other = torch.zeros_like(done)",
        "tests/test_composition.py -k every_combination_is_what_brute_force_says",
    ),
    Break(
        "the goal of the next observation stays",
        "samplers/hindsight.py",
        "            goals.append(next_goal)\n",
        "            pass\n",
        "tests/samplers/test_hindsight.py -k goals_of_any_shape_dtype_and_depth",
    ),
    Break(
        "truncated flags end the sums of agents that are not done",
        "samplers/n_step.py",
        'return stored[:1] if (*group, "done") in stored else stored',
        "return stored",
        "tests/samplers/test_n_step.py -k past_truncated",
    ),
    Break(
        "every row of a window ends its slice",
        "samplers/sequence.py",
        '        end[:, :-1] &= ~info["mask"][:, 1:]\n',
        "",
        "tests/samplers/test_sequence.py -k batches_have_the_windows_of_flat_batches",
    ),
    Break(
        "TD errors of the burn-in count in TorchRL's updates",
        "samplers/sequence.py",
        "        learned[:, : self.burn_in].fill_(False)\n",
        "",
        "tests/samplers/test_sequence.py -k update_by_index",
    ),
    Break(
        "episodes are listed once for a full ring",
        "samplers/episode.py",
        "state = ref(storage), len(storage), storage.revision",
        "state = ref(storage), len(storage), 0",
        "tests/test_lockstep.py -k 'pisode and agree'",
    ),
    Break(
        "padding has the return to go of the last step",
        "samplers/episode.py",
        'info["reward_to_go"] = torch.where(is_real, to_go, 0)',
        'info["reward_to_go"] = to_go',
        "tests/test_lockstep.py -k 'pisode and agree'",
    ),
    Break(
        "a reopened row has the priority of the row that it replaced",
        "samplers/priority_file.py",
        "            & (self.following[cells] == _next(storage, cells))\n",
        "",
        "tests/storages/test_reopen.py -k rows_written_without_priorities_are_new",
    ),
    Break(
        "new rows of an emptied buffer have the largest magnitude of the old ones",
        "samplers/priorities.py",
        "        self.serves.release()\n        self.largest = -1.0\n",
        "        self.serves.release()\n",
        "tests/test_replaced_rows.py -k all_that_follows_the_rows_takes_other_rows_as_new",
    ),
    Break(
        "loaded priorities are not kept in the file of a reopened buffer",
        "samplers/priorities.py",
        "            self.rule.restore_(magnitude.to(self.device))\n            self.keep(slice(0, None))",
        "            self.rule.restore_(magnitude.to(self.device))",
        "tests/storages/test_reopen.py -k updates_are_kept",
    ),
    Break(
        "a copy of a shared sampler cannot grow",
        "samplers/priorities.py",
        '            "is_shared": is_spawning,\n',
        '            "is_shared": self.is_shared,\n',
        "tests/samplers/test_prioritized.py -k can_grow",
    ),
    Break(
        "the largest magnitude outlives all rows of a file",
        "samplers/priority_file.py",
        " and is_kept.any()\n",
        "\n",
        "tests/storages/test_reopen.py -k goes_with_the_rows",
    ),
    Break(
        "a loop over epochs does not go on after a load",
        "samplers/minibatch.py",
        '            self._resumes = bool(state_dict.get("in_pass", False))\n',
        "            self._resumes = False\n",
        "tests/buffers/test_rollout.py -k goes_on_after_a_load",
    ),
    # -- corners of writers
    Break(
        "rows that a killed process had taken are lost",
        "writers/queue.py",
        "            self.numbers[_TAKEN] = self.numbers[_BEFORE]\n",
        "            pass\n",
        "tests/buffers/test_experience_queue.py -k dies_before",
    ),
    Break(
        "a loaded queue gives its rows again",
        "writers/queue.py",
        '        self.numbers[_TAKEN] = self._rows_written - state_dict["waiting"]\n',
        "        pass\n",
        "tests/test_goes_on.py -k it_goes_on",
    ),
    Break(
        "of two steps of a write for one place of a reservoir, the first stays",
        "writers/reservoir.py",
        "newest = {slot: position for position, slot in choice.kept}",
        "newest = {slot: position for position, slot in reversed(choice.kept)}",
        "tests/test_lockstep.py -k 'programs and reservoir'",
    ),
    Break(
        "advantages go on where the trajectory id changes",
        "writers/estimator.py",
        "        ends[:-1] |= trajectory[1:] != trajectory[:-1]\n",
        "",
        "tests/test_lockstep.py -k 'rollout and agree'",
    ),
    Break(
        "an agent that goes on terminates with the others",
        "writers/estimator.py",
        "return flags[0] | agent_flags[0], agent_flags[1]",
        "return flags[0] | agent_flags[0], flags[1] | agent_flags[1]",
        "tests/test_lockstep.py -k 'agents and agree'",
    ),
    Break(
        "the estimate of an agent goes on into its absence",
        "writers/estimator.py",
        "            ends[:-1] |= absent[1:]\n",
        "",
        "tests/test_lockstep.py -k 'agents and agree'",
    ),
    Break(
        "the members of a mixture keep the weights that they have alone",
        "buffers/mixture.py",
        "factor = max((normalizer or 1.0) / largest, LEAST_RATIO)",
        "factor = 1.0",
        "tests/test_lockstep.py -k mixtures_agree",
    ),
    Break(
        "without terminated flags, a truncated step terminates",
        "writers/estimator.py",
        "terminated = done if truncated is None else done & ~truncated",
        "terminated = done",
        "tests/writers/test_rollout.py -k terminated_is_what_is_done_but_not_truncated_where_it_is_missing",
    ),
    Break(
        "the value network replaces values that are given",
        "writers/estimator.py",
        "value = added = torch.where(is_missing, values.to(value.dtype), value)",
        "value = added = values.to(value.dtype)",
        "tests/writers/test_rollout.py -k missing_in_some",
    ),
    Break(
        "edits of a reservoir do not count for flow control",
        "writers/reservoir.py",
        "        self._storage.ring.count_edits(choice.state[0] - filled * lanes)\n",
        "",
        "tests/buffers/test_flow.py -k another_buffer_writes",
    ),
    # -- corners of storages
    Break(
        "a lane that is taken ends the episodes of all lanes",
        "storages/packed.py",
        "                    self.episodes.end(lanes.lane)",
        "                    self.episodes.end()",
        "tests/storages/test_lanes.py -k in_its_lane_alone",
    ),
    Break(
        "stamps of before a load match loaded rows",
        "storages/ring.py",
        "self.after[TAIL], self.after[WRITTEN] = tail + up, written + up",
        "self.after[TAIL], self.after[WRITTEN] = tail, written",
        "tests/test_replaced_rows.py -k before_a_load",
    ),
    Break(
        "rows that a killed write had published are not announced",
        "storages/ring.py",
        "            new = self._newest()\n",
        "",
        "tests/storages/test_kill.py -k 'news or interrupted or reservoir or load'",
    ),
    Break(
        "a lane without rows after a killed write begins in the middle",
        "storages/ring.py",
        "            self.written + -self.written % self.steps\n        )[without]",
        "            self.written\n        )[without]",
        "tests/storages/test_reopen.py -k as_many_rows_as_fit",
    ),
    Break(
        "an edit of done flags does not move the ends of episodes",
        "storages/packed.py",
        "                if tells_ends:\n                    self._bump_mutation_revision()",
        "                if tells_ends:\n                    pass",
        "tests/storages/test_editing.py -k written_back_end",
    ),
    Break(
        "an emptied storage keeps the class of its rows",
        "storages/packed.py",
        "        if not self.is_class_fixed:\n            self.row_class = None\n",
        "",
        "tests/storages/test_row_classes.py -k other_classes_are_refused_and_change_nothing",
    ),
    Break(
        "an open trajectory goes on after a load",
        "storages/packed.py",
        "        if self.episodes is not None and self.episodes.id_key is not None:\n            self.episodes.end()",
        "        if self.episodes is not None and self.episodes.id_key is not None:\n            pass",
        "tests/storages/test_trajectories.py -k a_load_ends",
    ),
    Break(
        "a copy of a storage forgets how many rows were written",
        "storages/packed.py",
        "            self._ring.count_from(rows_written)\n",
        "",
        "tests/test_goes_on.py -k it_goes_on",
    ),
    Break(
        "a closed storage keeps its folder locked",
        "storages/packed.py",
        "                shared.close()\n",
        "                pass\n",
        "tests/storages/test_reopen.py -k a_closed_buffer_frees_its_folder",
    ),
    Break(
        "the entries of loaded rows are not linked",
        "storages/entries.py",
        "        self.numbers[1:] = 0\n        self.numbers[_DIRTY] = 1",
        "        self.numbers[1:] = 0\n        self.numbers[_DIRTY] = 0",
        "tests/test_lockstep.py -k programs_that_once_failed",
    ),
    Break(
        "a damaged dump leaves a file of rows",
        "storages/saved.py",
        "                (storage.scratch_dir / ROWS_FILE).unlink()\n",
        "                pass\n",
        "tests/checkpoint/test_damage.py -k leaves_no_rows",
    ),
    Break(
        "a damaged description of reopened rows is used",
        "storages/processes.py",
        "if self._head_file is not None and zlib.crc32(text) != self._described[1]:",
        "if self._head_file is None and zlib.crc32(text) != self._described[1]:",
        "tests/storages/test_reopen.py -k damaged_files_are_refused",
    ),
    Break(
        "a reopened storage refuses another pair of keys of episodes",
        "storages/episodes.py",
        "        self._numbers[_USED] = 0\n",
        "",
        "tests/storages/test_reopen.py -k the_next_process_may_find_episodes_by_other_keys",
    ),
    Break(
        "holes after a kill keep what was torn",
        "storages/packed.py",
        "            rows.flat[cells[~ring.is_live(cells)]] = 0\n",
        "            pass\n",
        "tests/storages/test_kill.py -k given_up",
    ),
    Break(
        "other keys of episodes keep the old numbers",
        "storages/packed.py",
        "                elif self.episodes is not None:\n                    self.episodes.forget()\n",
        "                elif False:\n                    pass\n",
        "tests/storages/test_trajectories.py -k named_after",
    ),
    Break(
        "a load ends trajectories without ids",
        "storages/packed.py",
        "self.episodes is not None and self.episodes.id_key is not None",
        "self.episodes is not None",
        "tests/storages/test_trajectories.py -k a_load_ends",
    ),
    Break(
        "empty() is no change for samplers that keep what they read",
        "storages/packed.py",
        "            self.row_class = None\n        self._ring.numbers[REVISION] += 1\n",
        "            self.row_class = None\n",
        "tests/test_replaced_rows.py -k plans_and_updates",
    ),
    Break(
        "rows that are allocated again begin with the first serial",
        "storages/packed.py",
        "            self._ring.written += before.written.max()\n",
        "",
        "tests/test_replaced_rows.py -k allocated_again",
    ),
    Break(
        "a storage deletes the file of its successor",
        "storages/memory.py",
        " or path.stat().st_ino != inode:",
        ":",
        "tests/test_clean_up.py -k cleaned_up",
    ),
    Break(
        "deleted buffers are kept by the writes of others",
        "storages/listeners.py",
        "        existing.changes += 1\n",
        "        pass\n",
        "tests/test_clean_up.py -k is_deleted",
    ),
    Break(
        "a shared class is forgotten with the rows",
        "storages/packed.py",
        "        if not self.is_class_fixed:\n            self.row_class = None\n",
        "        self.row_class = None\n",
        "tests/test_clean_up.py -k one_class",
    ),
    Break(
        "reserved rows refuse a dump with more entries",
        "storages/saved.py",
        "            and storage.is_reserved\n            and set",
        "            and False\n            and set",
        "tests/checkpoint/test_dumps.py -k reserved_rows_take",
    ),
    # -- corners of shards
    Break(
        "trajectories of two writers join in a shard",
        "distributed/shard.py",
        "        if writer != self._writer:\n",
        "        if self._writer is None:\n",
        "tests/distributed/test_shards.py -k n_step_returns_stop_where_another_writer_follows",
    ),
    Break(
        "TD errors of before a restart change the rows after it",
        "distributed/shard.py",
        "is_current = request.handles[:, INCARNATION] == self.incarnation",
        "is_current = request.handles[:, INCARNATION] > 0",
        "tests/distributed/test_shards.py -k gone_are_skipped",
    ),
    Break(
        "rows that waited for a shard are stored after a load",
        "distributed/shard.py",
        "        self._set(self._prepared)\n        self._prepared = None\n        self._staged = []\n",
        "        self._set(self._prepared)\n        self._prepared = None\n",
        "tests/distributed/test_shards.py -k wait_in_a_shard",
    ),
    Break(
        "TD errors for a lost shard are not counted",
        "distributed/client.py",
        "                self.stale += int(is_here.sum())\n",
        "",
        "tests/distributed/test_shards.py -k gone_are_skipped",
    ),
    Break(
        "rows that a restarted shard has lost are not counted",
        "distributed/links.py",
        "            self.lost_rows[shard] += max(0, last.rows + last.waiting - report.rows)\n",
        "            pass\n",
        "tests/distributed/test_shards.py -k a_lost_shard_costs_its_rows_and_one_retry",
    ),
    Break(
        "small weights of shards are not reported",
        "distributed/client.py",
        "                        self._weight_watch.see(weight)\n",
        "                        pass\n",
        "tests/distributed/test_shards.py -k small_weights",
    ),
    Break(
        "rows that wait in a shard outlive empty()",
        "distributed/shard.py",
        "        self._staged = []\n        self.buffer.empty()\n",
        "        self.buffer.empty()\n",
        "tests/distributed/test_shards.py -k wait_in_a_shard",
    ),
    # -- corners of functions
    Break(
        "V-trace uses the target of the next episode where a step is truncated",
        "functional/advantage.py",
        "    following = torch.where(done, bootstrap, following)\n",
        "",
        "tests/functional/test_functional.py -k torchrls",
    ),
    Break(
        "masked steps get the returns of later ones",
        "functional/returns.py",
        "        returns = returns.masked_fill(padding, 0)\n",
        "        pass\n",
        "tests/functional/test_functional.py -k returns_to_go",
    ),
    Break(
        "images are shifted by as many columns as rows",
        "functional/augmentation.py",
        "torch.arange(width, device=device) + shift[1]",
        "torch.arange(width, device=device) + shift[0]",
        "tests/functional/test_functional.py -k all_shifts_are_equally_likely",
    ),
    Break(
        "targets that are all alike are fully explained",
        "functional/summary.py",
        "return torch.where(variance == 0, torch.nan, 1 - unexplained / variance)",
        "return 1 - unexplained / variance.clamp_min(1e-8)",
        "tests/functional/test_functional.py -k explained_variance_of_perfect_constant_and_opposite",
    ),
    # -- corners of loops
    Break(
        "a break that is due is lost when the numbers of episodes are built again",
        "kernels/episodes/cpu.py",
        "        if load(follows, np.int64) >= 0:\n",
        "        if load(follows, np.int64) >= -1:\n",
        "tests/storages/test_trajectories.py -k a_load_ends",
    ),
    Break(
        "stamps of windows are taken for those of their anchors",
        "kernels/batch/cpu.py",
        "                stamp += (row[i] // lanes - stamp) % record.steps\n",
        "                stamp += 0\n",
        "tests/test_replaced_rows.py tests/samplers/test_sequence.py",
    ),
    Break(
        "padding counts in the statistics of episodes",
        "kernels/episodes/statistics.py",
        "        if key == PADDING:\n            continue\n",
        "",
        "tests/diagnostics/test_episode_stats.py -k lanes_of_several_dims_and_padding_and_many_lanes_after",
    ),
    Break(
        "edited trajectory ids do not move the ends of episodes",
        "storages/packed.py",
        "(*episodes.flags, episodes.id_key)",
        "episodes.flags",
        "tests/test_lockstep.py -k 'once_failed and edited'",
    ),
    Break(
        "a copy of a reopened storage counts as reopened",
        "storages/packed.py",
        '            "reopen": False,\n',
        "",
        "tests/test_clean_up.py -k copy_is_a_buffer_of_its_own",
    ),
    Break(
        "a child that lets go of a storage deletes the file of its parent",
        "storages/memory.py",
        "if os.getpid() != process or not path.exists()",
        "if not path.exists()",
        "tests/test_clean_up.py -k forked_process_leaves_the_file",
    ),
    Break(
        "rows that were only reserved when they were saved are fixed after a load",
        "storages/saved.py",
        'storage.is_reserved = content.get("reserved", False)',
        "storage.is_reserved = False",
        "tests/test_goes_on.py -k reserved_rows_take_more",
    ),
    Break(
        "add_step keeps the columns of the storage before",
        "buffers/replay.py",
        "        self._loop_steps = threading.local()\n        transforms",
        '        vars(self).setdefault("_loop_steps", threading.local())\n        transforms',
        "tests/test_siblings.py -k another_storage_is_written",
    ),
    Break(
        "stale updates of other processes are not counted",
        "buffers/replay.py",
        "for part in (self.flow, self.stale_updates, self.returned):",
        "for part in (self.flow, self.returned):",
        "tests/storages/test_sharing.py -k one_process_counts",
    ),
    Break(
        "a reward function that samples fills the memory of the batch",
        "buffers/plan.py",
        "epoch, self.epoch = self.epoch, _IN_USE",
        "epoch = self.epoch",
        "tests/test_siblings.py -k whatever_its_reward_function",
    ),
    Break(
        "loaded statistics count in the memory of the saved state",
        "diagnostics/episode_stats.py",
        "state_dict[name].numpy().copy() for name",
        "state_dict[name].numpy() for name",
        "tests/test_goes_on.py -k loaded_state_stays",
    ),
    Break(
        "a masked reset after a load keeps the numbers of the other lanes",
        "envs/gymnasium_recorder.py",
        "are_lost = self._obs is None or self.is_interrupted",
        "are_lost = self._obs is None",
        "tests/envs/test_gymnasium_recorder.py -k masked_reset_after_a_loss",
    ),
    Break(
        "a dump after a kill cannot be opened",
        "checkpoint/buffer.py",
        "has_gap = storage.ndim == 1 and storage.ring.holes > 0  # after a kill",
        "has_gap = False",
        "tests/test_lockstep.py -k 'once_failed and dump'",
    ),
]


class Copies:
    """Copies of the repository; those for faults outside ``kernels/`` are used again,
    with their compiled loops."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder, self._kept = folder, SimpleQueue[Path]()
        for number in range(jobs):
            self._kept.put(folder / f"copy {number}")

    @contextmanager
    def broken(self, each: Break) -> Iterator[Path]:
        """Yield a copy with the fault in it."""
        if each.file.startswith("kernels/"):
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                copy = made(Path(folder) / "copy")
                put(each, copy)
                yield copy
            return
        copy = self._kept.get()
        file = made(copy) / "rlbuf_td" / each.file
        before = file.with_suffix(".before")
        shutil.copy2(file, before)
        try:
            put(each, copy)
            yield copy
        finally:
            os.replace(before, file)
            self._kept.put(copy)

    @contextmanager
    def intact(self) -> Iterator[Path]:
        copy = self._kept.get()
        try:
            yield made(copy)
        finally:
            self._kept.put(copy)


def made(copy: Path) -> Path:
    """Make a copy of the repository, without its compiled code, if there is none
    yet."""
    if not copy.exists():
        copy.mkdir(parents=True)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name,
                    copy / name,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                shutil.copy2(ROOT / name, copy / name)
        take_loops(copy)
    return copy


def take_loops(copy: Path) -> None:
    """Copy the compiled loops, which numba keeps beside the sources, in case that
    kernels do not change."""
    for found in (ROOT / "rlbuf_td/kernels").rglob("*.nb[ci]"):
        place = copy / found.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(found, place)


def put(each: Break, copy: Path) -> None:
    file = copy / "rlbuf_td" / each.file
    file.write_text(file.read_text().replace(each.text, each.replacement))


def fault_of(each: Break) -> str:
    """Say why a fault cannot be made; "" if it can."""
    file = ROOT / "rlbuf_td" / each.file
    count = file.read_text().count(each.text) if file.exists() else 0
    return (
        ""
        if count == 1
        else f"its text is {count} times in {each.file}, expected once: {each.text!r}"
    )


class Result(NamedTuple):
    status: int  # of pytest; -1: the tests took too long
    failed: str  # the first test that failed
    seconds: float
    output: str


def run(copy: Path, tests: Sequence[str]) -> Result:
    """Run tests in a copy until one of them fails."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--color=no",
        *_UNSHRUNK,
        *tests,
    ]
    variables = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=variables,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return Result(-1, "", LONGEST, f"no end within {LONGEST} s")
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return Result(
        done.returncode,
        failed[1] if failed else "",
        time.perf_counter() - begin,
        done.stdout + done.stderr,
    )


def attempt(each: Break, copies: Copies) -> tuple[bool, str, float]:
    """Return whether a fault is found, by which test or why not, and how many seconds
    it took."""
    with copies.broken(each) as copy:
        found = run(copy, shlex.split(each.tests))
    if found.status != 1:
        return (
            False,
            f"NOT FOUND (pytest's status: {found.status})\n{found.output[-2_000:]}",
            found.seconds,
        )
    with copies.intact() as copy:
        without = run(copy, ["-m", "", found.failed])  # it may be marked slow
    if without.status:
        return (
            False,
            f"FAILS WITHOUT THE FAULT: {found.failed}\n{without.output[-2_000:]}",
            found.seconds,
        )
    return True, found.failed, found.seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORDS",
        help="only faults with these words in a name",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the faults and the tests named for them",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="number of faults that are tried at the same time",
    )
    given = parser.parse_args(arguments)
    chosen = [
        each
        for each in BREAKS
        if not given.only or any(words in each.name for words in given.only)
    ]
    if given.list:
        for number, each in enumerate(chosen, 1):
            print(f"{number:2} {each.name}\n   {each.file}; {each.tests}")
        return 0
    faults = [f"{each.name}: {fault}" for each in chosen if (fault := fault_of(each))]
    if faults:
        print("\n".join(faults))
        return 1
    found = 0
    with (
        tempfile.TemporaryDirectory(prefix="rlbuf_td_breaks_") as folder,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        results = pool.map(
            partial(attempt, copies=Copies(Path(folder), given.jobs)), chosen
        )
        for each, (is_found, by, seconds) in zip(chosen, results, strict=True):
            found += is_found
            print(f"{each.name} | {by} | {seconds:.0f} s", flush=True)
    print(f"{found} of {len(chosen)} found")
    return int(found < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
