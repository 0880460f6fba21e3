"""A damaged index and deleted files are reported by name, or have no effect.

Wrong entries are never used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import CorruptFileError, DataFileError, SchemaError
from tests.trajectory_replay.recorded import drawn, equal, trajectory
from tests.watch import watching

INDEX_NAME = "trajectory_index.json"


def saved(folder: Path, number: int = 2) -> Path:
    buffer = TrajectoryReplayBuffer(seed=77)
    for item in range(number):
        buffer.add(trajectory(item, 2, 2), weights_version=item)
    buffer.save_checkpoint(folder)
    return folder


def known_of(folder: Path) -> tuple[Any, ...]:
    """Return everything that an index stores."""
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(folder, verify=False)
    descriptions = [buffer.about(name) for name in buffer.trajectory_ids]
    return (
        descriptions,
        buffer.rng.get_state().tolist(),
        buffer.add({"rewards": torch.zeros(1, 1, 1)}),
    )


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(1, 3))]
)
def test_each_flipped_bit_of_an_index_is_noticed_or_without_effect(
    tmp_path: Path, first: int
) -> None:
    """Every third byte is flipped in turn, starting with number `first`."""
    folder = saved(tmp_path / "a")
    path, expected = folder / INDEX_NAME, known_of(folder)
    content = path.read_bytes()
    state = content.index(b'"rng": "') + 8, content.index(b'"', content.index(b'"rng": "') + 8)
    places = [
        place for place in range(len(content)) if place % 8 == 0 or not state[0] <= place < state[1]
    ]
    places = places[first::3]
    num_noticed = 0
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            assert known_of(folder) == expected, (
                f"byte {place} of {bytes(content[place - 20 : place + 20])!r}"
            )
        except CorruptFileError as error:
            assert str(path) in str(error) or "trajectory_" in str(error)
            num_noticed += 1
    assert num_noticed > 0.9 * len(places)


def test_a_changed_number_in_the_index_raises_with_advice(tmp_path: Path) -> None:
    path = saved(tmp_path / "a") / INDEX_NAME
    text = path.read_text()
    assert '"weights_version": 1' in text
    path.write_text(text.replace('"weights_version": 1', '"weights_version": 9'))
    expected = rf"^'{path}' is damaged or was edited: expected checksum [0-9a-f]{{8}}, got "
    with pytest.raises(CorruptFileError, match=expected + r"[0-9a-f]{8}\. .*'crc32'"):
        TrajectoryReplayBuffer().load_checkpoint(path.parent)


def test_an_index_without_a_checksum_or_with_another_layout_is_read(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path / "a") / INDEX_NAME
    expected = known_of(path.parent)
    index = json.loads(path.read_text())
    # As long as one of 300,000 trajectories is
    path.write_text(json.dumps(index, indent=4) + " " * (65 << 20))
    assert known_of(path.parent) == expected
    del index["crc32"]
    path.write_text(json.dumps(index))
    assert known_of(path.parent) == expected


def test_an_index_of_a_million_brackets_raises_one_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "a") / INDEX_NAME
    path.write_text("[" * 1_000_000)
    with pytest.raises(CorruptFileError, match=rf"^'{path}' is not valid JSON: "):
        TrajectoryReplayBuffer().load_checkpoint(path.parent)


@pytest.mark.parametrize("file_format", ["h5", "pt"])
@pytest.mark.parametrize("ask", ["sample", "get", "save_checkpoint"])
def test_a_file_that_vanished_is_named_with_its_trajectory(
    tmp_path: Path, file_format: str, ask: str
) -> None:
    with TrajectoryReplayBuffer(trajectory_format=file_format) as buffer:
        for number in range(2):
            buffer.add(trajectory(number, 2, 2))
        buffer.save_checkpoint(tmp_path / "a")
    options = {"auto_save": True, "auto_save_path": tmp_path / "auto", "enable_cache": False}
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.load_checkpoint(tmp_path / "a")
        path, state = tmp_path / "auto" / f"trajectory_1_w1.{file_format}", buffer.rng.get_state()
        path.rename(tmp_path / "kept")
        calls = {
            "sample": lambda: buffer.sample(100),
            "get": lambda: buffer.get(1),
            "save_checkpoint": lambda: buffer.save_checkpoint(tmp_path / "b"),
        }
        text = rf"^the file '{path}' of trajectory 1 is missing\. Restore it, "
        with pytest.raises(DataFileError, match=text) as caught:
            calls[ask]()
        assert isinstance(caught.value, FileNotFoundError) and caught.value.__cause__ is not None
        assert torch.equal(buffer.rng.get_state(), state) and not (tmp_path / "b").exists()
        (tmp_path / "kept").rename(path)
        drawn(buffer, 100)
        assert equal(buffer.get(1), trajectory(1, 2, 2))


def test_a_vanished_target_folder_is_not_reported_as_a_missing_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def lose_target_and_link(source: Path, target: Path) -> None:
        shutil.rmtree(target.parent)
        link(source, target)

    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "auto") as buffer:
        buffer.add(trajectory(0, 2, 2))
        monkeypatch.setattr(os, "link", lose_target_and_link)
        with pytest.raises(FileNotFoundError, match=r"trajectory_0_w0\.h5") as caught:
            buffer.save_checkpoint(tmp_path / "a")
    assert not isinstance(caught.value, DataFileError)


def test_a_file_that_vanished_between_listing_and_reading_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")

    def lose(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "trajectory_0" in str(arguments[0]) and folder.exists():
            shutil.rmtree(folder)

    with (
        watching(lose),
        pytest.raises(DataFileError, match=r"trajectory_0_w0\.h5' of trajectory 0 is missing"),
    ):
        TrajectoryReplayBuffer().load_checkpoint(folder)


@pytest.mark.parametrize("key", ["num_samples", "weights_version"])
def test_an_infinite_number_in_an_index_raises_one_error(tmp_path: Path, key: str) -> None:
    path = saved(tmp_path / "a") / INDEX_NAME
    index = json.loads(path.read_text())
    del index["crc32"]
    index["trajectory_index"]["1"][key] = float("inf")
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptFileError, match=rf"^'{path}' is damaged: OverflowError"):
        TrajectoryReplayBuffer().load_checkpoint(path.parent)


def test_a_too_deeply_nested_leaf_raises() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(SchemaError, match=r"'deep' of the trajectory cannot be saved as JSON"):
        buffer.add({**trajectory(0), "deep": deep})
    assert len(buffer) == 0


@pytest.mark.parametrize("name", ["metadata.json", "trajector_index.json"])
def test_a_pipe_in_place_of_a_file_raises_without_waiting(tmp_path: Path, name: str) -> None:
    """The pipe is in a folder of another system.

    Another process loads it, so that waiting would end.
    """
    folder = saved(tmp_path / "a")
    index = json.loads((folder / INDEX_NAME).read_text())
    for key in ("crc32", "format"):
        del index[key]
    (folder / INDEX_NAME).write_text(json.dumps(index))
    if name != "metadata.json":
        (folder / INDEX_NAME).rename(folder.parent / "elsewhere")
        folder = folder.rename(tmp_path / "rank_0").parent
    pipe = next(folder.rglob("metadata.json")).with_name(name)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    code = "import sys; from rollout_data import TrajectoryReplayBuffer as B; B().load_checkpoint(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=150
    )
    assert (
        f"CorruptFileError: {str(pipe)!r} is a folder, a pipe or a device, not a file."
        in ran.stderr
    )
