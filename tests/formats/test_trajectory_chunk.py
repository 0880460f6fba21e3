"""One chunk and the metadata: every known form is read, and anything else is reported."""

import json
import time
from typing import Any

import numpy as np
import pytest

from rollout_data.blocks.block_header import OPEN, TERMINATED, TRUNCATED
from rollout_data.formats.trajectory_folders.trajectory_folder import (
    read_chunk_rows,
    scan_trajectory_folder,
)
from storage.errors import ForeignFileError
from tests.formats.folders import NaiveFolder, frames_of, one_problem, read, scan_of, write_metadata

# What a chunk may look like.


@pytest.mark.parametrize(
    "dones",
    [
        np.array([0, 0, 1], np.uint8),
        np.array([[0], [0], [1]], np.uint8),
        np.array([False, False, True]),
        np.array([[0], [0], [1]], np.float32),
        np.array([[0], [0], [1]], ">i4"),
    ],
)
@pytest.mark.parametrize("key", ["timeouts", "timeout", None])
def test_ends_are_read_in_every_form(
    folder: NaiveFolder, dones: np.ndarray, key: str | None
) -> None:
    extra = {key: dones} if key else {}
    folder.chunk(
        0, 0, 3, **{"dones": dones, **extra}, drop=() if key == "timeouts" else ("timeouts",)
    )
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 3, TRUNCATED if key else TERMINATED)]
    assert scan.problems == ()


def test_a_timeout_without_done_ends_the_trajectory(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 3, timeouts=np.array([False, False, True]))
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 3, TRUNCATED)]
    assert "a timeout without a done is read as the end of a trajectory." in one_problem(scan)


def test_an_observation_in_a_tuple_is_unpacked(folder: NaiveFolder) -> None:
    for number in range(3):
        folder.chunk(number, 0, 2, observations=(np.full((2, 3), number, np.float32),))
    scan = scan_of(folder.data_dir)
    assert [t["observation"].tolist() for t in read(scan)] == [[[k] * 3] * 2 for k in range(3)]
    assert one_problem(scan) == (
        "'DIR/trajectory_0/traj_000000_000002.pickle' and 2 more: 'observations' is a tuple, and "
        "the array in the tuple is read."
    )


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_rewards_keep_their_shape(folder: NaiveFolder, shape: tuple[int, ...]) -> None:
    rewards = np.arange(4 * int(np.prod(shape)), dtype=np.float32).reshape(4, *shape)
    folder.chunk(0, 0, 4, rewards=rewards)
    scan = scan_of(folder.data_dir)
    assert scan.schema["reward"].shape == shape
    np.testing.assert_array_equal(read(scan)[0]["reward"], rewards)


def test_privileged_observations_and_rewards_are_optional(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4, drop=("privileged_observations", "values", "rewards"))
    scan = scan_of(folder.data_dir)
    assert (list(scan.schema), scan.problems) == (["observation", "action"], ())
    empty = {key: np.zeros((4, 0), np.float32) for key in ("privileged_observations", "rewards")}
    folder.chunk(1, 0, 4, **empty)
    assert list(scan_of(folder.data_dir).schema) == ["observation", "action"]


def test_unknown_arrays_are_reported_once(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 2, log_probs=np.zeros(2), infos={})
    folder.chunk(1, 0, 2, log_probs=np.zeros(2), infos={})
    text = one_problem(scan_of(folder.data_dir))
    assert "and 1 more: unknown keys are ignored: 'log_probs', 'infos'." in text


def test_other_dtypes_are_kept(folder: NaiveFolder) -> None:
    observations = np.random.default_rng(0).random((4, 3))
    folder.chunk(
        0, 0, 4, observations=observations, actions=np.arange(4), rewards=np.ones((4, 1), ">f4")
    )
    scan = scan_of(folder.data_dir)
    assert [scan.schema[name].dtype for name in ("observation", "action", "reward")] == [
        "float64",
        "int64",
        "float32",
    ]
    np.testing.assert_array_equal(read(scan)[0]["observation"], observations)
    np.testing.assert_array_equal(read(scan)[0]["reward"], np.ones((4, 1)))


def test_a_large_field_has_a_column_of_its_own(folder: NaiveFolder) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 8192), np.uint8)
    folder.chunk(
        0, 0, 3, obs_image=images, obs_pose=np.ones((3, 2), np.float32), drop=("observations",)
    )
    write_metadata(
        folder,
        obs_segments={"pose": [2], "image": [2, 64, 64]},
        obs_disassemble_mapping={"image": "normalized_image"},
    )
    scan = scan_of(folder.data_dir)
    rows = read_chunk_rows(scan, 0)
    assert {name: array.shape for name, array in rows.items()} == {
        "frames": (3, 32),
        "observation/image": (3, 8192),
    }
    np.testing.assert_array_equal(rows["observation/image"], images)
    assert list(read_chunk_rows(scan, 0, ["frames"])) == ["frames"]
    assert all(array.dtype == np.uint8 and array.flags.c_contiguous for array in rows.values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"actions": np.zeros((4, 3), np.float32)}, "has actions float32[3], but most chunks have actions float32[2]"),
        ({"actions": np.zeros((4, 2), np.float64)}, "has actions float64[2], but most chunks have actions float32[2]"),
        ({"drop": ("rewards",)}, "has no rewards, but most chunks have rewards float32[1]"),
        ({"drop": ("actions",)}, "has no array 'actions'. Its keys are 'observations'"),
        ({"drop": ("dones",)}, "has no array 'dones'. Its keys are"),
        ({"drop": ("observations",)}, "has no array 'observations' and no arrays 'obs_*'. Its keys are 'privileged"),
        ({"observations": np.zeros((3, 3), np.float32)}, "has 3 frames in 'observations' and 4 frames in 'dones'"),
        ({"observations": np.float32(1)}, "has a single value in 'observations' and 4 frames in 'dones'"),
        ({"observations": "text"}, "has a str in 'observations', expected an array"),
        ({"observations": (np.zeros((4, 3)), np.zeros((4, 3)))}, "has a tuple in 'observations', expected an array"),
        ({"observations": np.zeros((4, 0))}, "has shape [4, 0] in 'observations'. At least one value per frame"),
        ({"dones": np.zeros((4, 2), np.uint8)}, "has shape [4, 2] in 'dones', expected [T] or [T, 1]"),
        ({"dones": np.full(4, np.nan)}, "has NaN or infinity in 'dones'"),
        ({"timeouts": np.zeros(3, bool)}, "has 3 frames in 'timeouts' and 4 frames in 'dones'"),
    ],
)  # fmt: skip
def test_a_chunk_with_other_fields_truncates_only_its_trajectory(
    folder: NaiveFolder, change: Any, text: str
) -> None:
    folder.chunk(0, 0, 4)
    folder.chunk(0, 4, 8, **change)
    folder.chunk(0, 8, 10, done=True)
    folder.chunk(1, 0, 9, done=True)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 4, OPEN), (1000, 9, TERMINATED)]
    assert len(scan.problems) == 2
    assert text in str(scan.problems[0]) and "trajectory_0/traj_000004_000008.pickle" in str(
        scan.problems[0]
    )
    assert "This chunk and the later chunks of its trajectory are left out" in str(scan.problems[0])
    assert "'traj_000008_000010.pickle'. Only the first 4 frames are read" in str(scan.problems[1])


def test_a_chunk_that_differs_from_most_is_left_out_even_if_it_is_first(
    folder: NaiveFolder,
) -> None:
    folder.chunk(0, 0, 4, observations=np.zeros((4, 5), np.float32))
    folder.chunk(1, 0, 9)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(1000, 9, OPEN)]
    assert "Move the file to a separate data folder to read it." in one_problem(scan)


# Metadata.


def components(folder: NaiveFolder, number: int = 0, **overrides: Any) -> None:
    arrays = {
        "obs_b": np.full((3, 2), 5, np.float32),
        "obs_a": np.full((3, 4), 51, np.uint8),
        **overrides,
    }
    folder.chunk(number, 0, 3, **arrays, drop=("observations",))


def test_metadata_keeps_order_and_unknown_keys(folder: NaiveFolder) -> None:
    components(folder)
    write_metadata(folder, zeta=1, obs_segments={"a": [2, 2], "b": [2]}, alpha={"nested": [None]})
    scan = scan_of(folder.data_dir)
    assert list(scan.metadata) == ["zeta", "obs_segments", "alpha"]
    assert list(scan.schema)[:2] == ["observation/a", "observation/b"]
    field = scan.schema["observation/a"]
    assert (field.shape, field.dtype, field.codec) == ((2, 2), "uint8", "raw")


@pytest.mark.parametrize(
    "text", [None, "", '{"obs_segments": {"a": [4', "[1, 2]", "\x00", "[" * 100_000]
)
def test_without_metadata_the_chunks_determine_the_schema(
    folder: NaiveFolder, text: str | None
) -> None:
    components(folder)
    if text is not None:
        (folder.data_dir / "metadata.json").write_text(text)
    scan = scan_of(folder.data_dir)
    assert scan.metadata == {}
    assert [(f.name, f.shape, f.codec) for f in list(scan.schema.values())[:2]] == [
        ("observation/b", (2,), "raw"),
        ("observation/a", (4,), "normalized_image"),
    ]
    np.testing.assert_allclose(read(scan)[0]["observation/a"], 0.2)
    assert len(scan.problems) == 1 + (text is not None)
    assert "'obs_a' of dtype uint8. The values are decoded as 'normalized_image'" in str(
        scan.problems[-1]
    )
    assert "metadata.json" in str(scan.problems[0])


def test_metadata_that_are_complete_a_moment_later_are_read(
    folder: NaiveFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chunk(0, 0, 2)
    (folder.data_dir / "metadata.json").write_text('{"env": "A')
    sleeps = []

    def finish(duration_s: float) -> None:
        sleeps.append(duration_s)
        write_metadata(folder, env="Ant")

    monkeypatch.setattr(time, "sleep", finish)
    scan = scan_of(folder.data_dir)
    assert (scan.metadata, scan.problems, len(sleeps)) == ({"env": "Ant"}, (), 1)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (
            {"obs_segments": {"b": [2], "a": [5]}},
            "has 5 values for 'a' in obs_segments, but the chunks have 4 values. The chunks are read as",
        ),
        (
            {"obs_segments": {"b": [2]}},
            "has no shape for 'a' in obs_segments, but the chunks have 4 values. The chunks are",
        ),
        (
            {"obs_segments": {"b": [2], "a": [4], "c": [1]}},
            "has 'obs_c' in obs_segments, but the chunks have no array of that name. The chunks",
        ),
        ({"obs_segments": ["b", "a"]}, "has invalid obs_segments, expected a JSON object"),
        ({"obs_segments": {"b": [2], "a": [-4]}}, "has invalid obs_segments, expected a JSON"),
        (
            {
                "obs_segments": {"b": [2], "a": [4]},
                "obs_disassemble_mapping": {"b": "normalized_image"},
            },
            "needs dtype uint8. The chunks have dtype float32, and the values are not decoded",
        ),
    ],
)
def test_chunks_take_precedence_over_contradicting_metadata(
    folder: NaiveFolder, metadata: Any, text: str
) -> None:
    components(folder)
    write_metadata(folder, **metadata)
    scan = scan_of(folder.data_dir)
    assert any(
        text in str(problem) and "metadata.json" in str(problem) for problem in scan.problems
    )
    assert read(scan)[0]["observation/a"].shape == (3, 4)
    np.testing.assert_array_equal(read(scan)[0]["observation/b"], 5)


def test_an_unknown_codec_raises_one_clear_error(folder: NaiveFolder) -> None:
    components(folder)
    write_metadata(
        folder, obs_segments={"b": [2], "a": [4]}, obs_disassemble_mapping={"a": "normalised_image"}
    )
    with pytest.raises(
        ForeignFileError,
        match=r"unknown codec 'normalised_image' for component 'a'\. Known codecs are 'normalized_im",
    ):
        scan_trajectory_folder(folder.data_dir)


def test_metadata_of_subfolders_are_read_if_the_folder_has_none(folder: NaiveFolder) -> None:
    for run in "xy":
        arrays = {"obs_b": np.zeros((1, 2), np.float32), "obs_a": np.zeros((1, 4), np.float32)}
        folder.chunk(f"{run}/trajectory_0", 0, 1, **arrays, drop=("observations",))
        segments = {"a": [4], "b": [2]} if run == "x" else {"b": [2], "a": [4]}
        (folder.data_dir / run / "metadata.json").write_text(json.dumps({"obs_segments": segments}))
    scan = scan_of(folder.data_dir)
    assert list(scan.schema)[:2] == ["observation/a", "observation/b"]
    assert "y/metadata.json" in one_problem(scan)
