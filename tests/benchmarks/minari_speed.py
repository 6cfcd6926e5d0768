"""How fast a Minari data set is loaded, against h5py alone (``python -m tests.benchmarks.minari_speed``).

Records a set of HalfCheetah's shapes, then reads it in turns: by ``ReplayBuffer.from_minari``, and by h5py, which
reads every array of every episode and drops it. The figures are ratios of medians: of the time on the clock, and of
the time on the processor, which other programs of a busy machine do not change.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import h5py
import minari
import numpy as np
from gymnasium.spaces import Box

from rlbuf_td import ReplayBuffer


def record(name: str, rows: int, episode: int) -> minari.MinariDataset:
    random = np.random.default_rng(0)
    spaces = {"observation_space": Box(-9, 9, (17,), np.float64), "action_space": Box(-1, 1, (6,), np.float32)}
    last = np.arange(episode) == episode - 1
    episodes = [
        minari.data_collector.EpisodeBuffer(
            observations=random.standard_normal((episode + 1, 17)),
            actions=random.random((episode, 6), np.float32),
            rewards=random.random(episode),
            terminations=np.zeros(episode, bool),
            truncations=last,
            infos={},
        )
        for _ in range(rows // episode)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minari.create_dataset_from_buffers(name, episodes, **spaces)


def read_all(path: Path) -> int:
    nbytes = 0

    def read(_: str, node: h5py.Group | h5py.Dataset) -> None:
        nonlocal nbytes
        if isinstance(node, h5py.Dataset):
            nbytes += node[()].nbytes

    with h5py.File(path, "r") as file:
        file.visititems(read)
    return nbytes


def now() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def main(arguments: Sequence[str] | None = None) -> float:
    """Print the ratios of the two speeds, and return that of processor time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--episode", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        dataset = record("bench/cheetah-v0", given.rows, given.episode)
        path = Path(dataset.storage.data_path) / "main_data.hdf5"
        seconds = []
        ReplayBuffer.from_minari(dataset, progress=False)  # load compiled loops, and the file into the page cache
        for _ in range(given.rounds):
            begun = now()
            nbytes = read_all(path)
            read = now()
            rows = len(ReplayBuffer.from_minari(dataset, progress=False))
            seconds.append([*(read - begun), *(now() - read)])
    alone, loaded = np.median(seconds, 0).reshape(2, 2)
    print(f"{rows:,} rows in episodes of {given.episode:,}, {nbytes / 2**20:,.0f} MiB")
    for clock, one, other in zip(("clock", "processor"), alone, loaded, strict=True):
        print(f"{clock}: h5py alone {one:.2f} s, from_minari {other:.2f} s: {one / other:.0%} of its speed")
    return float(alone[1] / loaded[1])


if __name__ == "__main__":
    main()
