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
        "storages/packed.py",
        "return flat.masked_fill(stale, -1), int(count)",
        "return flat, int(count)",
        "tests/storages/test_staleness.py",
    ),
    Break(
        "the compiled form takes a stale stamp",
        "kernels/batch/cpu.py",
        "                row[i] = -1\n                stale += 1\n",
        "                stale += 1\n",
        "tests/storages/test_staleness.py",
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
        "left = closing + ago + position + 1",
        "left = closing + ago + position",
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
        "            if self.ring.dirty:\n                storage.recover()\n            raise",
        "            raise",
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
        "store(burn_in_mask + row, j < burn_in, np.bool_)",
        "store(burn_in_mask + row, j <= burn_in, np.bool_)",
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
        "tests/samplers/test_sequence.py -k every_window",
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
        "tests/samplers/test_minibatch.py",
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
        "numbers[_TAKEN] = self._write_count - self.waiting + count",
        "numbers[_TAKEN] = self._write_count - self.waiting + count - 1",
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
        "tests/functional/test_functional.py -k vtrace",
    ),
    Break(
        "compiled GAE goes on over steps that are done and not terminated",
        "kernels/scan/cpu.py",
        "later = zero if done[i, t, f] else decay * advantage[i, t + 1, f]",
        "later = zero if terminated[i, t, f] else decay * advantage[i, t + 1, f]",
        "tests/kernels/test_scan.py",
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
        "tests/buffers/test_mixture.py",
    ),
    Break(
        "write_back changes rows that were replaced",
        "buffers/replay.py",
        "flat = storage.skip_stale(flat, stamp)[0]",
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
        "tests/writers/test_first_read.py -k 'part or share'",
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
        "self._give_back(refusal.epoch, refusal.rows)",
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
        "            if ring.dirty:\n                storage.recover()\n            raise",
        "            raise",
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
        "tests/storages/test_staleness.py",
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
        without = run(copy, [found.failed])
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
