"""What can be seen in the values of a column, whatever their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rlbuf_td.diagnostics.doctor.record import Key, Record
from rlbuf_td.diagnostics.doctor.report import NAMED, Finding, Row
from rlbuf_td.storages.schema import show_key

Bounds = Mapping[Key, tuple[torch.Tensor, torch.Tensor]]
# In fewer rows a column may well be constant.
_MANY = 1_000
_SIDE = 8  # of the smallest image
_SAMPLED = 256


class _Tally:
    """Counts rows, and keeps the first few."""

    def __init__(self, record: Record) -> None:
        self.record, self.count, self.rows = record, 0, list[Row]()

    def add(self, block: slice, where: torch.Tensor) -> None:
        """Count the flagged rows of ``[B, E]``."""
        number = int(where.sum())
        self.count += number
        if number and len(self.rows) < NAMED:
            flat = where.flatten().nonzero()[: NAMED - len(self.rows), 0] + block.start * self.record.lanes
            self.rows += map(self.record.name, flat.tolist())


def value_findings(record: Record, bounds: Bounds) -> Iterator[Finding]:
    """Yield what is wrong with values: one pass over the rows."""
    finite = {key: _Tally(record) for key in record.columns if _is_float(record, key) and _is_given(record, key)}
    outside = {key: _Tally(record) for key in _bounded(record, bounds)}
    varies = {key: torch.zeros(1, dtype=torch.bool) for key in record.columns if _may_be_constant(record, key)}
    for block in record.blocks():
        for key, tally in finite.items():
            tally.add(block, ~record.columns[key][block].isfinite().flatten(2).all(2))
        for key, tally in outside.items():
            low, high = bounds[key if key[0] != "next" else key[1:]]
            values = record.columns[key][block]
            low, high = (bound.reshape(values.shape[2:]).to(values.device) for bound in (low, high))
            tally.add(block, (((values < low) | (values > high)) & values.isfinite()).flatten(2).any(2))
        for key, columns in varies.items():
            if not columns.all():
                values = record.columns[key][block].flatten(2)
                varies[key] = columns | (values != record.columns[key][:1, :1].flatten(2)).flatten(0, 1).any(0).cpu()
    rows = record.steps * record.lanes
    for key, tally in finite.items():
        if tally.count:
            yield _not_finite(key, tally, rows)
    for key, tally in outside.items():
        if tally.count:
            yield _out_of_bounds(key, tally, rows)
    if rows >= _MANY:
        for key, columns in varies.items():
            if not columns.all() and not _is_one_hot(record, key):
                yield _constant(record, key, columns, rows)
    for key in record.columns:
        if _is_image(record, key):
            yield _float_image(record, key, rows)


def _is_float(record: Record, key: Key) -> bool:
    return record.columns[key].is_floating_point() or record.columns[key].is_complex()


def _is_given(record: Record, key: Key) -> bool:
    """Return whether a key is what an environment gives or takes: an observation, a reward, an action."""
    root = key[1:] if key[0] == "next" else key
    return key[-1] in ("reward", "action") or root in record.observed or "observation" in key


def _not_finite(key: Key, tally: _Tally, rows: int) -> Finding:
    return Finding(
        "not-finite",
        key,
        tuple(tally.rows),
        tally.count,
        rows,
        f"{show_key(key)} is NaN or infinite there. One such row in a batch makes the loss NaN, and then the network.",
        "look at what the environment returned in these steps (a diverging simulation, a division by zero); leave such "
        "transitions out, or end the trajectory there.",
    )


def _bounded(record: Record, bounds: Bounds) -> list[Key]:
    return [
        key
        for root in bounds
        for key in (root, ("next", *root))
        if key in record.columns and record.columns[key][0, 0].numel() == bounds[root][0].numel()
    ]


def _out_of_bounds(key: Key, tally: _Tally, rows: int) -> Finding:
    return Finding(
        "out-of-bounds",
        key,
        tuple(tally.rows),
        tally.count,
        rows,
        f"{show_key(key)} lies outside the bounds of its space there.",
        "store what the environment returned, before any scaling; or mend the bounds, if it returns such values.",
    )


def _may_be_constant(record: Record, key: Key) -> bool:
    """Return whether a key is looked at for constant columns: float vectors that are observed, and actions."""
    column = record.columns[key]
    looked_at = key[-1] == "action" or (key in record.observed and key[0] != "next")
    return looked_at and _is_float(record, key) and column.ndim < 4 and column[0, 0].numel() > 0


def _is_one_hot(record: Record, key: Key) -> bool:
    """Return whether a column holds but zeros and ones, of which some may be rare."""
    sample = record.columns[key][:: max(1, record.steps // _SAMPLED)]
    return bool(((sample == 0) | (sample == 1)).all())


def _constant(record: Record, key: Key, varies: torch.Tensor, rows: int) -> Finding:
    still = (~varies).nonzero()[:, 0].tolist()
    which = "all of it" if len(still) == len(varies) else f"column{'s' * (len(still) > 1)} {_some(still)}"
    value = record.columns[key][0, 0].flatten()[still[0]].item()
    return Finding(
        "constant",
        key,
        (),
        rows,
        rows,
        f"{show_key(key)} has the same value ({value:g}) in every row: {which}.",
        "if a sensor or a wrapper should have filled it, look there; else leave it out, which saves memory and spares "
        "a normalisation the division by a deviation of 0.",
    )


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:NAMED])) + (f" ... ({len(numbers)})" if len(numbers) > NAMED else "")


def _is_image(record: Record, key: Key) -> bool:
    """Return whether a float column looks like images: two sides, and values in [0, 1] or whole ones up to 255."""
    column = record.columns[key]
    shape = [size for size in column.shape[2:] if size >= _SIDE]
    if not column.is_floating_point() or column.ndim < 5 or len(shape) < 2:
        return False
    sample = column[:: max(1, record.steps // _SAMPLED)][:, :8].float()
    low, high = sample.amin(), sample.amax()
    whole = bool((sample == sample.round()).all())
    return bool(low >= 0) and (bool(high <= 1) or (whole and bool(high <= 255)))


def _float_image(record: Record, key: Key, rows: int) -> Finding:
    size = record.columns[key].dtype.itemsize
    return Finding(
        "float-image",
        key,
        (),
        rows,
        rows,
        f"{show_key(key)} holds images as {str(record.columns[key].dtype).removeprefix('torch.')}: {size} times the "
        "memory that they need, and as much more to gather for each batch.",
        "store them as uint8, as the environment gives them, and convert the batch: "
        "rb.append_transform(ToTensorImage(...)), or batch[key].float() / 255.",
    )
