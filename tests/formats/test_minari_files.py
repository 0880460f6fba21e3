"""The reader of Minari datasets: T steps and T + 1 observations in HDF5, Arrow and Parquet files."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

import rollout_data
from rollout_data import WindowDataset
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, UnsafeFileError
from tests.formats.cases import ROOT
from tests.formats.hdf5_files import (
    LENGTHS,
    actions,
    edited,
    halves,
    jpeg,
    replace,
    rewards,
    values,
)

CAMERA = {"type": "Box", "dtype": "uint8", "shape": [32, 48, 3], "low": 0, "high": 255}
LOW = {
    "type": "Box",
    "dtype": "float64",
    "shape": [3],
    "low": [float("-inf")] * 3,
    "high": [float("inf")] * 3,
}
DICT = {"type": "Dict", "subspaces": {"camera": CAMERA, "low": LOW}}
BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
END = {2: (True, False), 9: (False, True), 10: (False, False)}


def describe(folder: Path, kind: str, **changes: Any) -> None:
    spaces = {"observation_space": json.dumps(DICT), "action_space": json.dumps(BOX)}
    about = {
        "total_episodes": 3,
        "total_steps": 8,
        "data_format": kind,
        "env_spec": json.dumps({"id": "Lift-v1"}),
    }
    metadata = {
        name: value for name, value in {**about, **spaces, **changes}.items() if value is not None
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text(json.dumps(metadata))


def in_groups(root: Path, is_jpeg: bool = False, **changes: Any) -> Path:
    describe(root / "data", "hdf5", **{"jpeg_encoding": is_jpeg, **changes})
    with h5py.File(root / "data" / "main_data.hdf5", "w") as file:
        for number, length in LENGTHS.items():
            item = file.create_group(f"episode_{number}")
            item.attrs.update(
                {"id": number, "seed": 100 + number, "total_steps": length, "options/goal": 3}
            )
            item["actions"], item["rewards"] = actions(number, length), rewards(number, length)
            for name, is_end in zip(("terminations", "truncations"), END[number], strict=True):
                item[name] = (np.arange(length) == length - 1) & is_end
            item["observations/low"] = values(number, length + 1)
            item["infos/force"] = values(number, length + 1, 1)[:, 0]
            pictures = np.stack([halves(number, frame) for frame in range(length + 1)])
            if not is_jpeg:
                item["observations/camera"] = pictures
                continue
            data = [np.frombuffer(jpeg(picture), "u1") for picture in pictures]
            if len({len(row) for row in data}) == 1:
                item["observations/camera"] = np.stack(data)
            else:
                rows = item.create_dataset(
                    "observations/camera", (length + 1,), h5py.vlen_dtype(np.uint8)
                )
                for frame, row in enumerate(data):
                    rows[frame] = row
    return root


def in_tables(
    root: Path, kind: str, is_jpeg: bool = False, num_parts: int = 1, **changes: Any
) -> Path:
    """Write a table per episode, in `num_parts` files of two batches."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    describe(root / "data", kind, **{"jpeg_encoding": is_jpeg, **changes})
    for number, length in LENGTHS.items():
        folder = root / "data" / str(number)
        folder.mkdir()
        (folder / "metadata.json").write_text(
            json.dumps({"id": number, "total_steps": length, "seed": 100 + number})
        )

        def flat(array: np.ndarray) -> Any:
            rows = np.ascontiguousarray(array).reshape(len(array), -1)
            return pyarrow.FixedSizeListArray.from_arrays(
                pyarrow.array(rows.ravel()), rows.shape[1]
            )

        def padded(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array, array[-1:]])

        pictures = np.stack([halves(number, frame) for frame in range(length + 1)])
        camera = (
            pyarrow.array([jpeg(picture) for picture in pictures]) if is_jpeg else flat(pictures)
        )
        low = flat(values(number, length + 1))
        infos = pyarrow.StructArray.from_arrays(
            [pyarrow.array(values(number, length + 1, 1)[:, 0])], ["force"]
        )
        columns = {
            "observations": pyarrow.StructArray.from_arrays([camera, low], ["camera", "low"]),
            "actions": flat(padded(actions(number, length))),
            "rewards": padded(rewards(number, length)),
            "terminations": padded((np.arange(length) == length - 1) & END[number][0]),
            "truncations": padded((np.arange(length) == length - 1) & END[number][1]),
            "infos": infos,
        }
        table = pyarrow.table(columns)
        for part, rows in enumerate(np.array_split(np.arange(length + 1), num_parts)):
            path, piece = (
                folder / f"part-{part}.{kind}",
                table.slice(rows[0], len(rows)) if len(rows) else table[:0],
            )
            if kind == "parquet":
                parquet.write_table(piece, path, row_group_size=2)
            else:
                with (
                    pyarrow.OSFile(str(path), "wb") as out,
                    pyarrow.ipc.new_file(out, table.schema) as writer,
                ):
                    writer.write_table(piece, max_chunksize=2)
    return root


def check_all(
    recording: rollout_data.Recording, is_jpeg: bool = False, names: Mapping[int, str] | None = None
) -> None:
    assert (recording.format, recording.problems) == ("minari", [])
    assert [episode.id for episode in recording] == [
        (names or {}).get(number, f"episode_{number}") for number in LENGTHS
    ]
    for (number, length), episode in zip(LENGTHS.items(), recording, strict=True):
        assert len(episode) == length
        np.testing.assert_array_equal(episode.action, actions(number, length))
        np.testing.assert_array_equal(episode.reward, rewards(number, length))
        np.testing.assert_array_equal(episode.observation["low"], values(number, length))
        np.testing.assert_array_equal(
            episode.final_observation["low"], values(number, 1, first=length)[0]
        )
        pictures = np.stack([halves(number, frame) for frame in range(length + 1)])
        actual = episode.observation["camera"], episode.final_observation["camera"]
        for got, expected in zip(actual, (pictures[:-1], pictures[-1]), strict=True):
            assert got.dtype == np.uint8 and got.shape == expected.shape
            assert np.abs(got.astype(int) - expected).mean() <= (4 if is_jpeg else 0)
        assert (episode.terminated, episode.truncated) == END[number]
        assert episode.metadata["seed"] == 100 + number
        np.testing.assert_array_equal(episode["infos/force"], values(number, length, 1)[:, 0])
        assert episode.metadata["final/infos/force"] == values(number, 1, 1, first=length)[0, 0]
    assert recording.metadata["lossy"] == (["observation/camera"] if is_jpeg else [])
    assert recording.metadata["env_name"] == "Lift-v1"


@pytest.mark.parametrize("is_jpeg", [False, True])
def test_groups_have_steps_and_final_observations(tmp_path: Path, is_jpeg: bool) -> None:
    recording = rollout_data.open(in_groups(tmp_path / "lab" / "x-v0", is_jpeg))
    check_all(recording, is_jpeg)
    assert recording[0].metadata["options/goal"] == 3


@pytest.mark.parametrize("is_jpeg", [False, True])
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_tables_and_groups_of_the_same_data_are_read_alike(
    tmp_path: Path, kind: str, is_jpeg: bool
) -> None:
    names = {number: str(number) for number in LENGTHS}
    check_all(rollout_data.open(in_tables(tmp_path / "one", kind, is_jpeg)), is_jpeg, names)
    check_all(
        rollout_data.open(in_tables(tmp_path / "two", kind, is_jpeg, num_parts=2) / "data"),
        is_jpeg,
        names,
    )


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_random_windows_of_tables_decode_only_their_own_pictures(tmp_path: Path, kind: str) -> None:
    image = pytest.importorskip("PIL.Image")
    path = in_tables(tmp_path / "one", kind, True, num_parts=2)
    dataset = WindowDataset(path, 1)
    windows = [0, 3, 6]
    with mock.patch.object(image, "open", wraps=image.open) as decode:
        batch = dataset.batch(windows)
    assert decode.call_count == len(windows)
    recording = rollout_data.open(path)
    frames = np.concatenate([episode.observation["camera"] for episode in recording])
    np.testing.assert_array_equal(batch["observation"]["camera"][:, 0], frames[windows])
    with mock.patch.object(image, "open", wraps=image.open) as decode:
        dataset.batch(windows)
    assert decode.call_count == 0


def test_encoded_pictures_are_jpeg_by_default_and_raw_pictures_are_recognized_by_their_axes(
    tmp_path: Path,
) -> None:
    check_all(rollout_data.open(in_groups(tmp_path / "raw", jpeg_encoding=None)))
    check_all(rollout_data.open(in_groups(tmp_path / "jpeg", True, jpeg_encoding=None)), True)


def test_a_dataset_without_spaces_is_read(tmp_path: Path) -> None:
    check_all(
        rollout_data.open(
            in_groups(tmp_path / "x", True, observation_space=None, action_space=None)
        ),
        True,
    )


def test_metadata_of_older_datasets_are_attributes_of_the_file(tmp_path: Path) -> None:
    root = in_groups(tmp_path / "x")
    (root / "data" / "metadata.json").unlink()
    metadata = {
        "total_episodes": 3,
        "author": "lab",
        "env_spec": json.dumps({"id": "Lift-v1"}),
        "lossy": "no list",
    }
    edited(root / "data" / "main_data.hdf5", lambda file: file.attrs.update(metadata))
    for path in (root, root / "data", root / "data" / "main_data.hdf5"):
        recording = rollout_data.open(path)
        assert recording.metadata["author"] == "lab" and len(recording) == 3
        assert (recording.metadata["env_name"], recording.metadata["lossy"]) == ("Lift-v1", [])
        np.testing.assert_array_equal(recording[2].observation["low"], values(10, 4))


@pytest.mark.parametrize("kind", ["hdf5", "parquet"])
def test_shades_of_grey_have_the_shape_of_their_space(tmp_path: Path, kind: str) -> None:
    space = {"type": "Box", "dtype": "uint8", "shape": [32, 48], "low": 0, "high": 255}
    about = {"jpeg_encoding": True, "observation_space": json.dumps(space)}
    shade = np.frombuffer(jpeg(halves(2, 0)[..., 0]), "u1")
    if kind == "hdf5":
        root = in_groups(tmp_path / "x", **about)
        path = root / "data" / "main_data.hdf5"
        for number, length in LENGTHS.items():
            rows = np.tile(shade, (length + 1, 1))
            edited(
                path,
                lambda file, at=f"episode_{number}/observations", rows=rows: replace(
                    file, at, rows
                ),
            )
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        root = in_tables(tmp_path / "x", kind, **about)
        for path in root.glob("data/*/*.parquet"):
            table = parquet.read_table(path)
            pictures = pyarrow.array([shade.tobytes()] * len(table))
            parquet.write_table(table.set_column(0, "observations", pictures), path)
    episode = rollout_data.open(root)[0]
    assert episode.observation.shape == (3, 32, 48) and episode.final_observation.shape == (32, 48)
    assert np.abs(episode.observation[0].astype(int) - halves(2, 0)[..., 0]).mean() <= 4


@pytest.mark.parametrize(
    ("kind", "what"),
    [("hdf5", "data"), ("hdf5", "data/main_data.hdf5"), ("parquet", "data"), ("arrow", "data")],
)
def test_links_out_of_the_dataset_are_refused(tmp_path: Path, kind: str, what: str) -> None:
    root = in_groups(tmp_path / "x") if kind == "hdf5" else in_tables(tmp_path / "x", kind)
    (root / what).rename(tmp_path / "out")
    (root / what).symlink_to(tmp_path / "out")
    with pytest.raises(UnsafeFileError):
        rollout_data.open(root)


def test_short_rows_of_bytes_are_not_pictures_if_the_space_declares_numbers(tmp_path: Path) -> None:
    space = {"type": "Box", "dtype": "uint8", "shape": [5], "low": 0, "high": 255}
    root = in_groups(tmp_path / "x", jpeg_encoding=True, observation_space=json.dumps(space))
    row = np.array([0xFF, 0xD8, 0xFF, 0, 1], "u1")

    def change(file: h5py.File) -> None:
        for number, length in LENGTHS.items():
            replace(file, f"episode_{number}/observations", np.tile(row, (length + 1, 1)))

    edited(root / "data" / "main_data.hdf5", change)
    np.testing.assert_array_equal(rollout_data.open(root)[0].observation, np.tile(row, (3, 1)))


def test_observations_may_be_tuples_and_texts(tmp_path: Path) -> None:
    root = in_groups(tmp_path / "x", observation_space=None)

    def change(file: h5py.File) -> None:
        for number, length in LENGTHS.items():
            del file[f"episode_{number}/observations"]
            file[f"episode_{number}/observations/_index_0"] = values(number, length + 1)
            file[f"episode_{number}/observations/_index_1"] = [
                f"å{frame}" for frame in range(length + 1)
            ]

    edited(root / "data" / "main_data.hdf5", change)
    episode = rollout_data.open(root)[2]
    np.testing.assert_array_equal(episode.observation["_index_0"], values(10, 4))
    assert episode["observation/_index_1"] == ["å0", "å1", "å2", "å3"]
    assert episode.final_observation["_index_1"] == "å4"


@pytest.mark.parametrize("name", ["total_episodes", "total_steps"])
@pytest.mark.parametrize("kind", ["hdf5", "parquet"])
def test_wrong_totals_are_refused_unless_the_index_is_rebuilt(
    tmp_path: Path, kind: str, name: str
) -> None:
    root = (
        in_groups(tmp_path / "x", **{name: 11})
        if kind == "hdf5"
        else in_tables(tmp_path / "x", kind, **{name: 11})
    )
    with pytest.raises(CorruptFileError, match=f"'{name}' in its metadata is 11"):
        rollout_data.open(root)
    recording = rollout_data.open(root, on_bad_index="rebuild")
    assert len(recording) == 3 and len(recording.problems) == 1


#: What is wrong with episode 9 of the file -> what its problem says.
GROUP_DAMAGE: dict[str, tuple[Any, str]] = {
    "T observations": (
        lambda one: replace(one, "observations/low", np.zeros((1, 3))),
        "1 rows of 'observations/low', expected 2 rows",
    ),
    "other steps": (lambda one: one.attrs.update(total_steps=2), "1 rows .* 'total_steps' is 2"),
    "no ends": (
        lambda one: replace(one, "terminations", np.zeros(3, bool)),
        "a flag for each of 1 steps",
    ),
    "a link": (
        lambda one: one.update(more=h5py.ExternalLink("other.hdf5", "x")),
        "the link 'more', which is not followed",
    ),
}


@pytest.mark.parametrize("what", GROUP_DAMAGE)
def test_a_damaged_group_leaves_out_its_episode_only(tmp_path: Path, what: str) -> None:
    change, message = GROUP_DAMAGE[what]
    root = in_groups(tmp_path / "x")
    edited(root / "data" / "main_data.hdf5", lambda file: change(file["episode_9"]))
    recording = rollout_data.open(root)
    assert [episode.id for episode in recording] == ["episode_2", "episode_10"]
    with pytest.raises(DataFileError, match=message):
        raise recording.problems[0]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("what", ["cut", "other steps", "no metadata", "a link", "empty"])
def test_a_damaged_table_leaves_out_its_episode_only(tmp_path: Path, kind: str, what: str) -> None:
    root = in_tables(tmp_path / "x", kind)
    folder = root / "data" / "9"
    path = folder / f"part-0.{kind}"
    if what == "cut":
        os.truncate(path, path.stat().st_size - 9)
    elif what == "other steps":
        (folder / "metadata.json").write_text('{"id": 9, "total_steps": 4}')
    elif what == "no metadata":
        (folder / "metadata.json").unlink()
    elif what == "a link":
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    else:
        path.write_bytes(b"")
    recording = rollout_data.open(root)
    assert [episode.id for episode in recording] == ["2", "10"]
    assert isinstance(
        recording.problems[0], UnsafeFileError if what == "a link" else CorruptFileError
    )


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_flipped_bytes_of_a_table_are_errors_or_other_numbers(tmp_path: Path, kind: str) -> None:
    root = in_tables(tmp_path / "x", kind)
    path = root / "data" / "10" / f"part-0.{kind}"
    intact = path.read_bytes()
    for at in range(0, len(intact), max(1, len(intact) // 25)):
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 0xFF]) + intact[at + 1 :])
        try:
            for episode in rollout_data.open(root):
                _ = episode.observation, episode.action, episode.final_observation
        except RolloutDataError:
            pass


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_tables_are_read_and_bombs_are_refused(tmp_path: Path, codec: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    root = in_tables(tmp_path / "x", "arrow")
    for path in root.glob("data/*/*.arrow"):
        table = pyarrow.ipc.open_file(path).read_all()
        options = pyarrow.ipc.IpcWriteOptions(compression=codec)
        with (
            pyarrow.OSFile(str(path), "wb") as out,
            pyarrow.ipc.new_file(out, table.schema, options=options) as writer,
        ):
            writer.write_table(table)
    check_all(rollout_data.open(root), names={number: str(number) for number in LENGTHS})
    path = root / "data" / "9" / "part-0.arrow"
    # Of the pictures
    intact, claim = (
        path.read_bytes(),
        struct.pack("<q", (LENGTHS[9] + 1) * 32 * 48 * 3),
    )
    assert claim in intact
    for lie in (1 << 28, 1 << 50, (1 << 63) - 1):
        path.write_bytes(intact.replace(claim, struct.pack("<q", lie)))
        recording = rollout_data.open(root)
        assert [episode.id for episode in recording] == ["2", "10"]
        assert "bytes, expected at most 268435456" in str(recording.problems[0])


def test_a_text_that_a_parquet_table_stores_once_is_in_memory_once(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = in_tables(tmp_path / "x", "parquet") / "data" / "10" / "part-0.parquet"
    table = parquet.read_table(path)
    numbers = pyarrow.array([0] * len(table), pyarrow.int32())
    texts = pyarrow.DictionaryArray.from_arrays(numbers, pyarrow.array(["x" * (80 << 20)]))
    infos = pyarrow.StructArray.from_arrays([texts], ["text"])
    parquet.write_table(table.set_column(table.column_names.index("infos"), "infos", infos), path)
    episode = rollout_data.open(tmp_path / "x")[2]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    actual = episode.read("infos/text")
    assert (len(actual), len(actual[0])) == (LENGTHS[10], 80 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "KiB"


def test_real_datasets_of_both_kinds_agree() -> None:
    groups, tables = (
        rollout_data.open(ROOT / "minari" / f"cartpole-{kind}-v0") for kind in ("hdf5", "parquet")
    )
    for episode, other in zip(groups, tables, strict=True):
        for name in ("observation", "action", "reward"):
            np.testing.assert_array_equal(episode[name], other[name])
        np.testing.assert_array_equal(episode.final_observation, other.final_observation)
        assert (
            (episode.terminated, episode.truncated)
            == (other.terminated, other.truncated)
            == (False, True)
        )
