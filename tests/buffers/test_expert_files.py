"""Damaged and hostile motion files: each raises one error that names the file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from rollout_data import load_expert_trajectories
from storage import TrajectoryDictBuffer
from storage.errors import CorruptFileError


def load(folder: Path, change: Callable[[Any], Any]) -> TrajectoryDictBuffer:
    with h5py.File(folder / "a.h5", "w") as file:
        file.attrs["num_episodes"] = 1
        file["ep_0/observation"] = np.arange(8.0).reshape(4, 2)
        change(file)
    (folder / "list.txt").write_text("a.h5\n")
    return load_expert_trajectories(folder / "list.txt", folder, 2, "cpu")


def declare(file: Any, shape: tuple[int, ...], **options: Any) -> None:
    file["ep_0"].create_dataset("x", shape, dtype="f4", **options)


def link_to_itself(file: Any) -> None:
    file["ep_0/again"] = file["ep_0"]


@pytest.mark.parametrize(
    "change",
    [
        lambda file: declare(file, (1 << 50, 256)),
        lambda file: declare(file, (1 << 50, 256), chunks=(64, 256), compression="gzip"),
        lambda file: file["ep_0"].create_dataset("x", (1 << 40,), dtype="S100"),
        link_to_itself,
        lambda file: file.attrs.create("num_episodes", float("nan")),
        lambda file: file.attrs.create("num_episodes", float("inf")),
        lambda file: file.attrs.create("num_episodes", np.array([1, 2])),
        lambda file: file["ep_0"].create_dataset("x", data=np.array(b"\xff\xfe")),
        lambda file: file["ep_0"].create_dataset("x", (0,), dtype=h5py.string_dtype()),
        lambda file: file["ep_0"].create_dataset("x", data=h5py.Empty("f4")),
    ],
)
def test_a_hostile_motion_raises_one_clear_error(
    tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    with pytest.raises(CorruptFileError, match=r"^'.*a\.h5'"):
        load(tmp_path, change)


def test_unwritten_and_highly_compressed_zeros_are_read(tmp_path: Path) -> None:
    def write(file: Any) -> None:
        declare(file, (4, 3))  # never written
        zeros = np.zeros((4, 1 << 20), np.float32)
        file["ep_0"].create_dataset("packed", data=zeros, chunks=(1, 1 << 20), compression="gzip")

    full = load(tmp_path, write).get_full_buffer()
    assert torch.equal(full["x"], torch.zeros(4, 3)) and full["packed"].shape == (4, 1 << 20)
    assert not full["packed"].any()


def test_a_motion_list_that_is_not_text_raises(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptFileError, match=r"^'.*list\.txt' is not a UTF-8 text: "):
        load_expert_trajectories(tmp_path / "list.txt", tmp_path, 2, "cpu")


def test_one_value_for_a_whole_motion_is_its_id(tmp_path: Path) -> None:
    loaded = load(tmp_path, lambda file: file["ep_0"].create_dataset("motion_id", data=7))
    assert loaded.motion_ids == [7]


def test_hdf5_motions_need_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow", "PIL"):
        monkeypatch.setitem(sys.modules, package, None)
    assert load(tmp_path, lambda file: None).lengths.tolist() == [4]
