"""Windows of picture sets of other systems: only needed pictures are decoded, and each is the right
one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter, WindowDataset, WindowLoader
from storage.errors import DataFileError

image = pytest.importorskip("PIL.Image")
LENGTHS = (70, 41, 55)
SHAPE = (80, 72, 3)  # 17 KiB: of a size that is read by chunks


def picture(episode: int, frame: int) -> np.ndarray:
    """Return a picture that is different for each frame.

    Every pixel is a function of its position.
    """
    rows, columns, channels = np.indices(SHAPE)
    return ((rows + 2 * columns + 5 * channels + 3 * frame + 101 * episode) % 251).astype(np.uint8)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "own"
    with RolloutWriter(path, 1, durable=False, metadata={"frame_rate_hz": 10}) as writer:
        for episode, length in enumerate(LENGTHS):
            for frame in range(length):
                writer.add(
                    observation={
                        "camera": picture(episode, frame)[None],
                        "state": np.full((1, 2), frame, np.float32),
                    },
                    action=np.full((1, 1), 1000 * episode + frame, np.float32),
                    terminated=[frame == length - 1],
                    truncated=[False],
                )
    return path


@pytest.fixture(scope="module")
def lerobot(recording: Path) -> Path:
    pytest.importorskip("pyarrow")
    path = recording.parent / "lerobot"
    rollout_data.convert(recording, path, to="lerobot")
    return path


@pytest.fixture(scope="module")
def robomimic(recording: Path) -> Path:
    path = recording.parent / "robomimic.hdf5"
    rollout_data.convert(recording, path, to="robomimic")
    return path


def with_chunks_of(source: Path, path: Path, chunk_rows: int) -> Path:
    """Copy a file of robomimic, with compressed pictures and some frames per chunk."""
    path.write_bytes(source.read_bytes())
    with h5py.File(path, "r+") as file:
        for demo in file["data"].values():
            for group in (demo["obs"], demo["next_obs"]):
                pixels = group["camera"][...]
                del group["camera"]
                group.create_dataset(
                    "camera", data=pixels, chunks=(chunk_rows, *SHAPE), compression="gzip"
                )
    return path


def check_batch(batch: dict[str, Any]) -> None:
    """Compare the pictures of windows with the recorded ones, which are identified by the
    actions.
    """
    number = batch["action"][..., 0].long()
    is_valid = batch["mask"]
    for window in range(len(number)):
        for step in range(number.shape[1]):
            if is_valid[window, step]:
                episode, frame = divmod(int(number[window, step]), 1000)
                assert np.array_equal(
                    camera_of(batch)[window, step].numpy(), picture(episode, frame)
                )


def camera_of(batch: dict[str, Any]) -> torch.Tensor:
    (name,) = (name for name in batch["observation"] if name.endswith("camera"))
    return batch["observation"][name]


def test_random_windows_of_a_lerobot_set_decode_only_their_own_pictures(lerobot: Path) -> None:
    dataset = WindowDataset(lerobot, 2)
    windows = [3, 68, 75, 120, 160]
    with mock.patch.object(image, "open", wraps=image.open) as decode:
        check_batch(dataset.batch(windows))
    assert decode.call_count == 2 * len(windows)
    with mock.patch.object(image, "open", wraps=image.open) as decode:
        check_batch(dataset.batch(windows))
    assert decode.call_count == 0  # they are kept


def test_the_first_batch_of_a_lerobot_set_does_not_import_pandas(
    lerobot: Path, tmp_path: Path
) -> None:
    """Importing pandas takes longer than reading the first batch.

    A substitute module notices the import.
    """
    (tmp_path / "pandas.py").write_text("raise SystemExit('pandas was imported')")
    code = f"from rollout_data import WindowDataset; WindowDataset({str(lerobot)!r}, 2).batch([0])"
    paths = [str(tmp_path), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("chunk_cache_bytes", [0, 4 * 80 * 72 * 3, 1 << 29])
def test_pictures_do_not_depend_on_chunk_cache_bytes(
    lerobot: Path, robomimic: Path, chunk_cache_bytes: int
) -> None:
    for path in (lerobot, robomimic):
        dataset = WindowDataset(path, 3, padding="zero", chunk_cache_bytes=chunk_cache_bytes)
        num_windows = 0
        for batch in WindowLoader(dataset, 16, seed=3):
            check_batch(batch)
            num_windows += len(batch["action"])
        assert num_windows == sum(LENGTHS)


@pytest.mark.parametrize("chunk_rows", [1, 3, 32, 41])
def test_pictures_in_chunks_of_an_hdf5_file_are_at_their_frames(
    robomimic: Path, tmp_path: Path, chunk_rows: int
) -> None:
    path = with_chunks_of(robomimic, tmp_path / "x.hdf5", chunk_rows)
    for batch in WindowLoader(WindowDataset(path, 4, stride=3), 8, seed=1):
        check_batch(batch)


@pytest.mark.parametrize("num_steps", [1, 7, 50])
def test_playback_of_picture_sets_decodes_each_picture_once(
    lerobot: Path, robomimic: Path, num_steps: int
) -> None:
    for path in (lerobot, robomimic):
        num_decoded = sum(LENGTHS) if path == lerobot else 0
        dataset = RolloutDataset(path, 2, device="cpu", num_transitions_per_env=num_steps)
        num_frames = 0
        with mock.patch.object(image, "open", wraps=image.open) as decode:
            for batch in dataset:
                numbers = batch.action[batch.valid][:, 0].long().tolist()
                # The camera, flattened, then the state
                joined = batch.observation[batch.valid].numpy()
                for number, actual in zip(numbers, joined, strict=True):
                    assert np.array_equal(
                        actual[:-2].reshape(SHAPE), picture(*divmod(number, 1000))
                    )
                num_frames += len(numbers)
        assert num_frames == sum(LENGTHS)
        # Opening decodes one, to learn its size
        assert num_decoded <= decode.call_count <= num_decoded + 1


def test_a_damaged_picture_loses_only_its_own_windows(lerobot: Path, tmp_path: Path) -> None:
    """One picture is replaced by other bytes, in a file with the same rows."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "damaged"
    shutil.copytree(lerobot, folder)
    file = min((folder / "data").rglob("*.parquet"))  # with the first episode
    table = parquet.read_table(file)
    name = next(name for name in table.column_names if name.endswith("camera"))
    rows = table[name].to_pylist()
    rows[10] = {**rows[10], "bytes": b"no picture"}
    place = table.column_names.index(name)
    damaged = table.set_column(
        place, table.field(name), pyarrow.array(rows, table.field(name).type)
    )
    parquet.write_table(damaged, file)
    dataset = WindowDataset(folder, 2)
    check_batch(dataset.batch([8, 11]))
    with pytest.raises(DataFileError, match="frame 10 of episode"):
        dataset.batch([8, 9])
    skipping = WindowDataset(folder, 2, on_error="skip")
    check_batch(skipping.batch(range(5, 15)))
    assert skipping.num_lost_windows == 2
