"""What TorchRL's storages take: the same meaning here, or a refusal that names the argument."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from torchrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)

from rlbuf_td import PackedStorage
from rlbuf_td.storages.allocate import ROWS_FILE
from tests.catalogue import SCHEMAS, transitions

NESTED = SCHEMAS["nested"]


def test_a_file_of_rows_is_replaced_and_deleted_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    first = PackedStorage(5, scratch_dir=folder)
    first.set(range(5), transitions(NESTED, 5))
    before = first[:].clone()
    with pytest.raises(FileExistsError, match="already holds rows"):
        PackedStorage(5, scratch_dir=folder, auto_cleanup=True).set(range(3), transitions(NESTED, 3))
    assert (folder / ROWS_FILE).exists()  # which is not that of the storage that was refused
    second = PackedStorage(5, scratch_dir=folder, existsok=True, auto_cleanup=True)
    second.set(range(3), transitions(NESTED, 3, seed=4))
    assert (first[:] == before).all()
    del second
    assert not folder.exists()


def test_rows_may_be_shared_from_the_start() -> None:
    assert PackedStorage(5, shared_init=True).shared_rows is not None


@pytest.mark.parametrize("theirs", [LazyTensorStorage, LazyMemmapStorage])
def test_every_argument_of_torchrls_storages_is_taken_and_its_default_too(theirs: Any) -> None:
    _, size, *known = inspect.signature(theirs.__init__).parameters.values()
    assert size.name == "max_size"
    storage = PackedStorage(5, **{parameter.name: parameter.default for parameter in known})
    storage.set(range(3), transitions(NESTED, 3))
    assert len(storage) == 3


def test_torchrls_buffer_saves_with_the_checkpointer_and_hooks_of_the_storage(tmp_path: Path) -> None:
    seen: list[str] = []

    class Own(TensorStorageCheckpointer):
        """One of the user's."""

    rb = TensorDictReplayBuffer(storage=PackedStorage(5), batch_size=2, checkpointer=Own())
    assert type(rb.storage.checkpointer) is Own

    def note(data: Any, path: Any = None) -> Any:
        seen.append("saved")
        return data

    rb.storage.register_save_hook(note)
    rb.extend(transitions(NESTED, 3))
    rb.dumps(tmp_path)
    assert seen == ["saved"]
