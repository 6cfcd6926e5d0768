"""Compare the speed of this package with that of other libraries
(``python -m tests.benchmarks.bench``).

Before each timed call, a learner trains an MLP for one step. As in training, this step
evicts the buffer's data from the processor's caches. ``figures.py`` publishes the
results.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    vec_generalized_advantage_estimate,
)

from rlbuf_td import (
    PackedStorage,
    ReplayBuffer,
    RolloutBuffer,
    functional,
)
from rlbuf_td.cli import whole_number
from tests.benchmarks.contenders import available, image_rows, small_rows
from tests.benchmarks.timing import (
    OURS,
    REPLAY,
    WORDS,
    Calls,
    Timing,
    head,
    measure,
    microseconds,
    one_thread,
    row,
)

LEAF_ROWS = 100_000
GAMMA, LMBDA, EPOCHS = 0.99, 0.95, 4
LEAVES = {"leaves-12": 4, "leaves-3": 1}  # number of parts of each observation
SHAPES = ((8, 2048), (4096, 32), (1, 128))


# -- replay


def run(
    rows: Sequence[int], images: int, batch: int, rounds: int, operations: Sequence[str]
) -> Iterator[Timing]:
    operations = [operation for operation in operations if operation in REPLAY]
    for count, kind, make_rows in [(n, "small", small_rows) for n in rows] + [
        (images, "image", image_rows)
    ]:
        if not count or not operations:
            continue
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if (2 * len(available()) + 1) * count * (make_rows(1).bytes() + 24) > free:
            print(
                f"skipped: {count:,} {kind} rows need more memory than is free",
                file=sys.stderr,
            )
            continue
        found = {
            contender.name: contender(count, batch, make_rows).operations()
            for contender in available()
        }
        for operation in operations:
            calls = {
                name: each[operation]
                for name, each in found.items()
                if operation in each
            }
            yield measure(operation, count, kind, calls, rounds, batch)
        del found, calls
        gc.collect()


# -- Dicts of many leaves, GAE and PPO


def dict_rows(count: int, parts: int) -> TensorDict:
    """Return ``count`` nested observations, each with 3 x ``parts`` leaves and 336
    bytes."""
    camera = torch.randint(256, (count, 48), dtype=torch.uint8)
    joints, counts = torch.randn(count, 40), torch.randint(9, (count, 16))

    def split(x: torch.Tensor) -> TensorDict:
        return TensorDict(
            {f"part{i}": part for i, part in enumerate(x.chunk(parts, -1))}, [count]
        )

    return TensorDict(
        {
            "camera": split(camera),
            "body": {"joints": split(joints), "counts": split(counts)},
        },
        [count],
    )


def leaves(parts: int, batch: int) -> Calls:
    ours = ReplayBuffer(storage=PackedStorage(LEAF_ROWS), batch_size=batch)
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(LEAF_ROWS), batch_size=batch
    )
    data = dict_rows(LEAF_ROWS, parts)
    for buffer in (ours, theirs):
        buffer.extend(data)
    return {"rlbuf_td": ours.sample, "TorchRL": theirs.sample}


def rollout_of(lanes: int, steps: int, p: float = 0.005) -> TensorDict:
    """Return a random rollout ``[E, T]`` with HalfCheetah's shapes; about half of the
    episode ends are truncations."""
    rows = small_rows(lanes * steps)
    after, shape = rows["next"], (lanes * steps, 1)
    done, is_termination = torch.rand(shape) < p, torch.rand(shape) < 0.5
    after.update(
        {
            "done": done,
            "terminated": done & is_termination,
            "truncated": done & ~is_termination,
        }
    )
    rows["state_value"], after["state_value"] = torch.randn(shape), torch.randn(shape)
    rows["action_log_prob"] = torch.randn(lanes * steps)
    return rows.reshape(lanes, steps)


def gae(lanes: int, steps: int) -> dict[str, Calls]:
    """Return, for each GAE function of TorchRL, two functions to time: TorchRL's and
    this package's."""
    data = rollout_of(lanes, steps)
    after = data["next"]
    values = (
        data["state_value"],
        after["state_value"],
        after["reward"],
        after["done"],
        after["terminated"],
    )
    forms = {
        "gae": generalized_advantage_estimate,
        "gae-vectorized": vec_generalized_advantage_estimate,
    }
    ours = partial(functional.generalized_advantage_estimate, GAMMA, LMBDA, *values)
    return {
        name: {"rlbuf_td": ours, "TorchRL": partial(form, GAMMA, LMBDA, *values)}
        for name, form in forms.items()
    }


def ppo(lanes: int, steps: int, batch: int) -> Calls:
    """Return, for each library, a function that writes a rollout, computes advantages
    and draws PPO's minibatches."""
    data = rollout_of(lanes, steps)
    ours = RolloutBuffer(
        steps, lanes, batch_size=batch, epochs=EPOCHS, gamma=GAMMA, lmbda=LMBDA
    )
    advantages = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=None)
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(lanes * steps),
        sampler=SamplerWithoutReplacement(),
        batch_size=batch,
    )

    def our_step() -> None:
        ours.extend(data.copy())
        for _ in ours:
            pass

    def their_step() -> None:
        rows = data.copy()
        with torch.no_grad():
            advantages(rows)
        theirs.extend(rows.reshape(-1))
        for _ in range(EPOCHS):
            for _ in theirs:
                pass

    return {"rlbuf_td": our_step, "TorchRL": their_step}


def run_others(batch: int, rounds: int, operations: Sequence[str]) -> Iterator[Timing]:
    """Time the chosen operations other than replay."""
    for operation, parts in LEAVES.items():
        if operation in operations:
            yield measure(
                operation, LEAF_ROWS, "Dict", leaves(parts, batch), rounds, batch
            )
    for lanes, steps in SHAPES:
        for operation, calls in gae(lanes, steps).items():
            if operation in operations:
                yield measure(
                    operation,
                    lanes * steps,
                    f"[{lanes}, {steps}]",
                    calls,
                    rounds,
                    batch,
                )
    if "ppo" in operations:
        lanes, steps = SHAPES[0]
        yield measure(
            "ppo",
            lanes * steps,
            f"[{lanes}, {steps}]",
            ppo(lanes, steps, batch),
            rounds,
            batch,
        )


def run_all(
    rows: Sequence[int], images: int, batch: int, rounds: int, operations: Sequence[str]
) -> Iterator[Timing]:
    """Time the chosen operations, replay first."""
    yield from run(rows, images, batch, rounds, operations)
    yield from run_others(batch, rounds, operations)


# -- what is printed


def tables(timings: Sequence[Timing]) -> Iterator[str]:
    """Yield a table per kind of rows, with the time of this package and the ratios."""
    sections: dict[str, list[Timing]] = {}
    for timing in timings:
        sections.setdefault(timing.data, []).append(timing)
    for section, measured in sections.items():
        names = {name: None for timing in measured for name in timing.blocks}
        others = [name for name in names if name != OURS]
        yield ""
        yield from head(section, f"{OURS}, µs", *others)
        for timing in measured:
            ratios = (
                f"{timing.ratio(name):.3g}" if name in timing.blocks else ""
                for name in others
            )
            words = timing.words.replace("*", r"\*")
            yield row(words, microseconds(timing.blocks[OURS]), *ratios)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = partial(parser.add_argument, type=whole_number(1))
    rows = "numbers of stored rows; 1e7 needs 18 GB"
    add("--rows", nargs="+", default=[10**6], help=rows)
    add("--images", type=whole_number(0), default=5_000, help="0 for no image rows")
    add("--batch", default=256, help="rows per batch")
    add("--rounds", default=15, help="timed blocks of 16 calls")
    add("--only", type=str, nargs="+", choices=[*WORDS], default=[*WORDS])
    options = parser.parse_args(arguments)
    if min(options.rows) < options.batch or 0 < options.images < options.batch:
        parser.error(f"--rows and --images: at least a batch of {options.batch} rows")
    sizes = options.rows, options.images, options.batch, options.rounds
    with one_thread():
        timings = [*run_all(*sizes, options.only)]
    print(*tables(timings), sep="\n")
    print(f"\nbatch {options.batch}, one thread, medians of {options.rounds} blocks")


if __name__ == "__main__":
    main()
