"""Saved buffers, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data.replay_buffers import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.__main__ import main
from rlbuf_td.diagnostics.doctor import check
from tests.diagnostics.doctor.faults import FAULTS
from tests.diagnostics.doctor.world import walk

KINDS: dict[str, Any] = {
    "packed": lambda size, ndim: ReplayBuffer(storage=PackedStorage(size, ndim=ndim), dim_extend=0),
    "lazy": lambda size, ndim: TensorDictReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), dim_extend=0),
    "memmap": lambda size, ndim: TensorDictReplayBuffer(storage=LazyMemmapStorage(size, ndim=ndim), dim_extend=0),
}


def saved(folder: Path, kind: str = "packed", fault: str | None = None, *, lanes: int = 1, steps: int = 300) -> Path:
    rows = walk(400, lanes)
    if fault is not None:
        rows = FAULTS[fault][0](rows)
    rows = rows if lanes > 1 else rows[:, 0]
    rb = KINDS[kind](steps * lanes, rows.ndim)
    for part in rows.split(70):
        rb.extend(part)
    folder.mkdir(exist_ok=True)
    rb.dumps(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lanes", "steps"), [(1, 500), (2, 300)])
def test_a_saved_buffer_is_read_whatever_wrote_it(tmp_path: Path, kind: str, lanes: int, steps: int) -> None:
    report = check(saved(tmp_path, kind, lanes=lanes, steps=steps))
    assert report.codes == []
    assert report.rows == lanes * min(steps, 400)
    late = check(str(saved(tmp_path / "late", kind, "done late", lanes=lanes, steps=steps)))
    assert late.codes == ["done-shifted"]


def test_what_holds_no_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is not a folder: pass the folder that rb\.dumps"):
        check(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="holds no saved buffer"):
        check(tmp_path)
    (tmp_path / "storage_metadata.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read the rows in"):
        check(tmp_path)


def test_the_command_returns_1_for_findings_and_2_for_what_it_cannot_read(tmp_path, capsys):
    path = str(saved(tmp_path))
    assert main(["doctor", path]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 300 rows read: nothing found")
    assert main(["doctor", path, "--env", "Pendulum-v1"]) == 1  # |cos| and |sin| are at most 1, these walks go further
    assert "out-of-bounds: ('next', 'observation')" in capsys.readouterr().out
    assert main(["doctor", path, "--env", "NoSuchPole-v1"]) == 2
    assert main(["doctor", path, "--ignore", "speed"]) == 2
    assert "there is no finding speed" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "cannot examine" in capsys.readouterr().err
    late = str(saved(tmp_path / "late", fault="done late"))
    assert main(["doctor", late]) == 1
    out = capsys.readouterr().out
    assert "300 rows read: 1 finding\n\ndone-shifted\n    " in out
    assert "Remedy: " in out
    assert main(["doctor", late, "--ignore", "done-shifted"]) == 0


class Attack:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_pickles_in_a_folder_of_torchrl_are_never_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path, "memmap")
    rows = TensorDict({"x": torch.zeros(300)}, [300])
    rows.set("note", NonTensorData(Attack(tmp_path / "ran"), batch_size=[300])).memmap(folder / "storage")
    with pytest.raises(ValueError, match="pickle, which is never loaded"):
        check(folder)
    assert not (tmp_path / "ran").exists()


def test_an_incomplete_folder_of_torchrl_is_refused_and_no_file_is_changed(tmp_path: Path) -> None:
    folder = saved(tmp_path, "memmap")
    file = next((folder / "storage").glob("*.memmap"))
    file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(ValueError, match="has 5 bytes, expected"):
        check(folder)
    assert len(file.read_bytes()) == 5
