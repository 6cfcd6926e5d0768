"""What writers refuse."""

from __future__ import annotations

from rlbuf_td import SchemaError
from tests.refusals.makers import (
    OUT_OF_ORDER,
    Table,
    attached,
    filled,
    fresh,
    loads,
    n_step,
    reservoir,
    rows_of_reservoir,
    steps,
    td,
    tensor,
    zeros,
)

REFUSALS: Table = {
    ("RingWriter", lambda: attached(td.RingWriter(track_generations=True))): [
        *((lambda writer, data=data: writer.extend(data), ValueError, "at least one transition, got none")
          for data in (steps(0), zeros(0))),
        (lambda writer: writer.extend(steps(4).exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda writer: writer.add(steps().exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda writer: writer.write_at(tensor([1, 0]), steps(2).exclude("action")), SchemaError, "key 'action' is"),
        (lambda writer: fresh(writer=writer), ValueError, "writes to the storage of another buffer: use one writer"),
        (lambda writer: fresh().set_writer(writer), ValueError, "writes to the storage of another buffer: use one"),
    ],
    ("ReservoirWriter", lambda: attached(td.ReservoirWriter())): [
        (lambda writer: writer.extend(steps(0)), ValueError, "at least one transition, got none"),
        (lambda writer: writer.extend(steps(4).exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda writer: writer.add(steps().exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda writer: writer.load_state_dict({"following": 1.5}), ValueError, "not that of a ReservoirWriter"),
    ],
    ("ReservoirWriter, a full reservoir", reservoir): [
        (lambda rb: rb.extend(steps(50).exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda rb: rb.last(2), TypeError, "keeps no order of age"),
        (lambda rb: rb.set_sampler(n_step()), ValueError, "use a RingWriter"),
        (lambda rb: fresh(storage=rb.storage, sampler=n_step()).sample(), ValueError, OUT_OF_ORDER),
        (lambda rb: filled(n_step()).set_storage(rb.storage), ValueError, OUT_OF_ORDER),
        (lambda rb: td.ReplayBuffer.from_torchrl(rb, sampler=n_step()), ValueError, "needs rows in time order"),
        (lambda rb: td.ReplayBuffer.from_torchrl(rb, copy=False, sampler=n_step()), ValueError, "needs rows in time"),
    ],
    ("ReservoirWriter, loaded", lambda: filled(n_step())): [
        (loads(reservoir, rows_only=True), td.CheckpointError, OUT_OF_ORDER),
    ],
    ("ReservoirWriter, loaded into another capacity", lambda: fresh(storage=td.PackedStorage(40))): [
        (loads(rows_of_reservoir), td.CheckpointError, "its rows have no order of age"),
    ],
    ("ReservoirWriter, loaded into a larger one", lambda: reservoir(40)): [
        (loads(reservoir), td.CheckpointError, "have no order of age.*same capacity"),
    ],
}  # fmt: skip
