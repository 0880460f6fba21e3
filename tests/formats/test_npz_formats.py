"""OGBench and motion files: rows and hints are right. No bomb is unpacked and no pickle is read."""

from __future__ import annotations

import json
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_data
from storage.errors import (
    CorruptFileError,
    DataFileError,
    RolloutDataError,
    RolloutDataWarning,
    UnsafeFileError,
    UsageError,
)
from tests.formats.values import action, state

CLIPS = Path(__file__).parents[2] / "examples" / "data" / "motions"


def ogbench_arrays(lengths: list[int], first: int = 50) -> dict[str, np.ndarray]:
    """Return trajectories of these numbers of steps.

    The last row of each has a dummy action of 777.
    """
    numbers = range(first, first + len(lengths))
    pairs = list(zip(numbers, lengths, strict=True))
    acts = [
        np.vstack([action(number, length), np.full((1, 2), 777, "float32")])
        for number, length in pairs
    ]
    return {
        "observations": np.vstack([state(number, length + 1) for number, length in pairs]),
        "actions": np.vstack(acts),
        "terminals": np.hstack([np.arange(length + 1) == length for length in lengths]).astype(
            "float32"
        ),
    }


def clip_arrays(number: int = 50, length: int = 5, joints: int = 3) -> dict[str, np.ndarray]:
    """Return a clip of the tracking layout with unit quaternions and bodies above the ground."""
    shape = (length, joints + 1)
    quaternions = np.zeros((*shape, 4), "float32")
    quaternions[..., 0] = 1
    return {
        "fps": np.array([50]),
        "joint_pos": state(number, length, joints),
        "joint_vel": state(number, length, joints) / 10,
        "body_pos_w": np.full((*shape, 3), 0.5, "float32"),
        "body_quat_w": quaternions,
        "body_lin_vel_w": np.full((*shape, 3), number, "float32"),
        "body_ang_vel_w": np.full((*shape, 3), -number, "float32"),
    }


@pytest.fixture(params=[np.savez, np.savez_compressed], ids=["stored", "packed"])
def save(request: pytest.FixtureRequest) -> Any:
    return request.param


class TestOGBench:
    def test_the_last_row_of_a_trajectory_is_its_final_observation_and_its_action_is_dropped(
        self, tmp_path: Path, save: Any
    ) -> None:
        lengths = [3, 1, 12]
        save(tmp_path / "a.npz", **ogbench_arrays(lengths), qpos=np.arange(19.0))
        recording = rollout_data.open(tmp_path / "a.npz")
        assert [len(episode) for episode in recording] == lengths
        for number, episode in enumerate(recording, 50):
            np.testing.assert_array_equal(episode.observation, state(number, len(episode)))
            np.testing.assert_array_equal(episode.action, action(number, len(episode)))
            np.testing.assert_array_equal(
                episode.final_observation, state(number, len(episode) + 1)[-1]
            )
            assert (episode.reward, episode.terminated, episode.truncated) == (None, None, None)
        np.testing.assert_array_equal(recording[1]["qpos"], [4.0])
        assert recording.problems == []

    @pytest.mark.parametrize(
        ("name", "split"), [("x-v0.npz", "train"), ("x-v0-val.npz", "validation")]
    )
    def test_the_file_name_determines_the_split(
        self, tmp_path: Path, name: str, split: str
    ) -> None:
        np.savez(tmp_path / name, **ogbench_arrays([2]))
        recording = rollout_data.open(tmp_path / name)
        assert recording.metadata["split"] == recording[0].metadata["split"] == split

    @pytest.mark.parametrize("dtype", [">f4", ">f8", "<f8", "<f2", ">i2", "uint8"])
    def test_numbers_keep_their_width_whatever_their_byte_order(
        self, tmp_path: Path, save: Any, dtype: str
    ) -> None:
        arrays = ogbench_arrays([4, 2], first=0)
        arrays["observations"] = np.minimum(arrays["observations"], 250).astype(dtype)
        save(tmp_path / "a.npz", **arrays)
        actual = rollout_data.open(tmp_path / "a.npz")[0].observation
        assert actual.dtype == np.dtype(dtype).newbyteorder("<")
        np.testing.assert_array_equal(actual, arrays["observations"][:4])

    def test_adjacent_columns_of_the_file_are_read_correctly(
        self, tmp_path: Path, save: Any
    ) -> None:
        arrays = {name: np.asfortranarray(item) for name, item in ogbench_arrays([4, 2]).items()}
        save(tmp_path / "a.npz", **arrays)
        np.testing.assert_array_equal(
            rollout_data.open(tmp_path / "a.npz")[1].observation, state(51, 2)
        )

    def test_an_unfinished_trajectory_is_read_up_to_its_last_state(self, tmp_path: Path) -> None:
        arrays = ogbench_arrays([3, 4])
        arrays["terminals"][-1] = 0
        np.savez(tmp_path / "a.npz", **arrays)
        recording = rollout_data.open(tmp_path / "a.npz")
        assert [len(episode) for episode in recording] == [3, 4]
        assert "its last action" in str(recording.problems[0]).lower()

    def test_a_trajectory_of_one_state_is_left_out_alone(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", **ogbench_arrays([3, 0, 2]))
        recording = rollout_data.open(tmp_path / "a.npz")
        assert [episode.id for episode in recording] == ["0", "2"]
        np.testing.assert_array_equal(recording[1].observation, state(52, 2))
        assert "Trajectory 1 of" in str(recording.problems[0])

    @pytest.mark.parametrize(
        "change",
        [
            {"actions": np.zeros((3, 2), "float32")},
            {"terminals": np.full(9, 2.0)},
            {"observations": np.zeros((9, 3), "complex64")},
            {
                name: np.zeros((0, 1), "float32")
                for name in ("observations", "actions", "terminals")
            },
        ],
        ids=["short actions", "no flags", "complex", "empty"],
    )
    def test_arrays_of_contradictory_shapes_raise(
        self, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        np.savez(tmp_path / "a.npz", **{**ogbench_arrays([3, 4]), **change})
        with pytest.raises(CorruptFileError):
            rollout_data.open(tmp_path / "a.npz", format="ogbench")

    def test_pieces_of_a_large_packed_array_are_read_in_any_order(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        arrays = {
            "observations": rng.integers(0, 9, (3000, 400)).astype("float32"),
            "actions": np.zeros((3000, 1)),
        }
        np.savez_compressed(
            tmp_path / "a.npz", **arrays, terminals=(np.arange(3000) % 100 == 99).astype("float32")
        )
        recording = rollout_data.open(tmp_path / "a.npz")
        reader = pickle.loads(pickle.dumps(recording))
        for number in [29, 0, 15, 14, 16, 29]:
            expected = arrays["observations"][100 * number : 100 * number + 99]
            np.testing.assert_array_equal(recording[number].observation, expected)
            np.testing.assert_array_equal(reader[number].observation, expected)

    def test_plain_pictures_are_mapped(self, tmp_path: Path) -> None:
        arrays = ogbench_arrays([3, 1])
        arrays["observations"] = arrays["observations"].astype("uint8")
        np.savez(tmp_path / "a.npz", **arrays)
        actual = rollout_data.open(tmp_path / "a.npz")[0].observation
        assert not actual.flags.owndata and not actual.flags.writeable


class TestMotion:
    def test_a_folder_is_in_the_order_of_the_numbers_in_its_names(
        self, tmp_path: Path, save: Any
    ) -> None:
        for number in (2, 10, 1):
            save(tmp_path / f"run_{number}.npz", **clip_arrays(number, number))
        recording = rollout_data.open(tmp_path)
        assert [episode.id for episode in recording] == ["run_1", "run_2", "run_10"]
        for number, episode in zip((1, 2, 10), recording, strict=True):
            assert len(episode) == number and episode.action is None and episode.terminated is None
            np.testing.assert_array_equal(episode.observation["joint_pos"], state(number, number))

    @pytest.mark.parametrize("rate", [50, 50.0, np.array([50]), np.array([[50.0]], "float32")])
    def test_the_rate_is_a_number_or_an_array_of_one(self, tmp_path: Path, rate: Any) -> None:
        np.savez(tmp_path / "a.npz", **{**clip_arrays(), "fps": rate})
        assert rollout_data.open(tmp_path / "a.npz")[0].metadata["fps"] == 50

    @pytest.mark.parametrize("rate", [0, -1, np.nan, np.inf, np.array([50, 50]), np.array("50")])
    def test_another_rate_is_refused(self, tmp_path: Path, rate: Any) -> None:
        np.savez(tmp_path / "a.npz", **{**clip_arrays(), "fps": rate})
        with pytest.raises(CorruptFileError, match="one frame rate > 0"):
            rollout_data.open(tmp_path / "a.npz")

    @pytest.mark.parametrize(
        ("names", "option", "expected"),
        [
            (None, None, "unknown"),
            (None, "breadth", "breadth"),
            (None, "depth", "depth"),
            (None, list("abcd"), "names"),
            (list("pqrs"), None, "names"),
        ],
    )
    def test_the_order_of_bodies_is_recorded_and_nothing_is_permuted(
        self, tmp_path: Path, names: list[str] | None, option: Any, expected: str
    ) -> None:
        arrays = clip_arrays()
        np.savez(tmp_path / "a.npz", **arrays, **({} if names is None else {"body_names": names}))
        episode = rollout_data.open(tmp_path / "a.npz", body_order=option)[0]
        assert episode.metadata["body_order"] == expected
        assert episode.metadata.get("body_names") == (
            names or (option if isinstance(option, list) else None)
        )
        np.testing.assert_array_equal(episode.observation["body_quat_w"], arrays["body_quat_w"])

    @pytest.mark.parametrize(
        "option", ["deepest", 3, ["a", "b"], [1, 2, 3, 4], np.array(list("abcd"))]
    )
    def test_an_order_of_unknown_bodies_raises_a_usage_error(
        self, tmp_path: Path, option: Any
    ) -> None:
        np.savez(tmp_path / "a.npz", **clip_arrays())
        with pytest.raises(UsageError, match="body_order"):
            rollout_data.open(tmp_path / "a.npz", body_order=option)

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"body_pos_w": np.zeros((5, 4, 3), "float32")}, "below the ground"),
            ({"body_quat_w": np.ones((5, 4, 4), "float32")}, "unit quaternions"),
            (
                {"body_pos_w": np.full((5, 4, 3), [[[0.5]]] * 3 + [[[-1]], [[0.5]]], "float32")},
                "Frame 3 of",
            ),
            (
                {"body_quat_w": np.full((5, 4, 4), [[[0.5]]] * 4 + [[[0.6]]], "float32")},
                "Frame 4 of",
            ),
            (
                {"joint_pos": np.zeros((5, 7), "f4"), "joint_vel": np.zeros((5, 7), "f4")},
                "merged links",
            ),
        ],
    )
    def test_hints_at_other_poses_are_reported(
        self, tmp_path: Path, change: dict[str, Any], word: str
    ) -> None:
        np.savez(tmp_path / "a.npz", **{**clip_arrays(), **change})
        recording = rollout_data.open(tmp_path / "a.npz")
        assert len(recording) == 1 and recording.problems == []
        remarks = [
            str(remark) for remark in recording.advice if "The quaternions of" not in str(remark)
        ]
        assert [word in remark for remark in remarks] == [True]

    @pytest.mark.parametrize("stored", ["wxyz", "xyzw"])
    def test_the_order_of_quaternions_is_unknown_without_a_mark(
        self, tmp_path: Path, stored: str
    ) -> None:
        half = np.linspace(0, 0.15, 5)
        rows = np.zeros((5, 4, 4), "f4")
        rows[..., "wxyz".index("z") if stored == "wxyz" else 2] = np.sin(half)[:, None]
        rows[..., 0 if stored == "wxyz" else 3] = np.cos(half)[:, None]
        name, other = "observation/body_quat_w", {"wxyz": "xyzw", "xyzw": "wxyz"}[stored]
        np.savez(tmp_path / "plain.npz", **{**clip_arrays(), "body_quat_w": rows})
        plain = rollout_data.open(tmp_path / "plain.npz")
        assert (
            plain.metadata["quaternion_order"] == plain[0].metadata["quaternion_order"] == "unknown"
        )
        assert [f'quaternions="{stored}"' in str(remark) for remark in plain.advice] == [True]
        declared = rollout_data.open(tmp_path / "plain.npz", quaternions=stored)
        assert (declared.metadata["quaternion_order"], declared.advice, declared.problems) == (
            stored,
            [],
            [],
        )
        doubted = rollout_data.open(tmp_path / "plain.npz", quaternions=other)
        assert doubted.metadata["quaternion_order"] == other and f"as {other}" in str(
            doubted.advice[0]
        )
        for recording in (plain, declared, doubted):
            np.testing.assert_array_equal(recording[0].read(name), rows)
        np.savez(
            tmp_path / "marked.npz",
            **{**clip_arrays(), "body_quat_w": rows, "quaternion_order": stored},
        )
        marked = rollout_data.open(tmp_path / "marked.npz")
        assert (marked.metadata["quaternion_order"], marked.advice) == (stored, [])
        turned = rollout_data.open(tmp_path / "marked.npz", quaternions=other)
        assert turned.metadata["quaternion_order"] == other
        expected = np.stack([rows[..., stored.index(axis)] for axis in other], axis=-1)
        np.testing.assert_array_equal(turned[0].read(name), expected)
        windows = rollout_data.WindowDataset(turned, length=2)
        np.testing.assert_array_equal(
            windows[1]["observation"]["body_quat_w"].numpy(), expected[1:3]
        )

    def test_clips_of_several_orders_of_quaternions_in_one_folder_are_advice(
        self, tmp_path: Path
    ) -> None:
        for order in ("wxyz", "xyzw"):
            np.savez(tmp_path / f"{order}.npz", **clip_arrays(), quaternion_order=order)
        mixed = rollout_data.open(tmp_path)
        assert mixed.metadata["quaternion_order"] == "mixed" and mixed.problems == []
        remarks = [str(remark) for remark in mixed.advice if "in different orders" in str(remark)]
        assert len(remarks) == 1 and "different orders: wxyz, xyzw" in remarks[0]
        wrong = [
            str(remark) for remark in mixed.advice if "but they are read as xyzw" in str(remark)
        ]
        assert (
            len(wrong) == 1
            and "xyzw.npz" in wrong[0]
            and "The file states xyzw, which may be wrong" in wrong[0]
        )
        turned = rollout_data.open(tmp_path, quaternions="wxyz")
        assert turned.metadata["quaternion_order"] == "wxyz"
        assert not [remark for remark in turned.advice if "in different orders" in str(remark)]

    @pytest.mark.parametrize("orders", [("wxyz", "xyzw"), ("wxyz", None), ("xyzw", "wxyz", None)])
    def test_recordings_of_several_orders_of_quaternions_are_not_mixed_silently(
        self, tmp_path: Path, orders: tuple[str | None, ...]
    ) -> None:
        paths = []
        for number, order in enumerate(orders):
            paths.append(tmp_path / f"{number}.npz")
            np.savez(
                paths[-1],
                **clip_arrays(number),
                **({} if order is None else {"quaternion_order": order}),
            )
        expected = f"different orders: {', '.join(sorted(order or 'unknown' for order in orders))}"
        mixtures = [
            lambda: rollout_data.WindowDataset(paths, length=1),
            lambda: rollout_data.WindowMixture(paths, length=1),
            lambda: rollout_data.RolloutDataset(
                [rollout_data.open(path) for path in paths], 1
            ).get_batch(1),
        ]
        for mix in mixtures:
            with pytest.warns(RolloutDataWarning, match=expected):
                mix()
        merged = rollout_data.merge(paths, tmp_path / "merged")
        assert [expected in str(remark) for remark in merged.advice].count(
            True
        ) == 1 and merged.problems == []
        recording = rollout_data.open(tmp_path / "merged")
        assert recording.metadata["quaternion_order"] == "mixed"
        assert [episode.metadata["quaternion_order"] for episode in recording] == [
            order or "unknown" for order in orders
        ]
        with pytest.warns(RolloutDataWarning, match="different orders: mixed"):
            windows = rollout_data.WindowDataset(tmp_path / "merged", length=1)
        assert ("quaternion_order", "mixed") in windows.conventions

    def test_recordings_of_one_order_of_quaternions_mix_without_a_remark(
        self, tmp_path: Path
    ) -> None:
        paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
        for number, path in enumerate(paths):
            np.savez(path, **clip_arrays(number), quaternion_order="wxyz")
        merged = rollout_data.merge(paths, tmp_path / "merged")
        assert merged.advice == rollout_data.WindowDataset(paths, length=1).advice == []
        assert rollout_data.open(tmp_path / "merged").metadata["quaternion_order"] == "wxyz"

    def test_a_wrong_order_of_quaternions_is_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", **clip_arrays(), quaternion_order="zyxw")
        with pytest.raises(CorruptFileError, match="'zyxw', expected wxyz or xyzw"):
            rollout_data.open(tmp_path / "a.npz")
        with pytest.raises(
            UsageError, match="quaternions must be one of 'wxyz', 'xyzw', got 'wzyx'"
        ):
            rollout_data.open(tmp_path / "a.npz", quaternions="wzyx")

    @pytest.mark.parametrize(
        "change",
        [
            {"joint_vel": np.zeros((4, 3), "float32")},
            {"body_pos_w": np.zeros((5, 4, 2), "float32")},
            {"joint_pos": np.zeros(5, "float32")},
            {"joint_names": np.array(["a"])},
            {"body_lin_vel_w": np.zeros((5, 4, 3), "complex64")},
        ],
    )
    def test_one_bad_clip_is_left_out_alone(self, tmp_path: Path, change: dict[str, Any]) -> None:
        np.savez(tmp_path / "0.npz", **clip_arrays(0))
        np.savez(tmp_path / "1.npz", **{**clip_arrays(1), **change})
        np.savez(tmp_path / "2.npz", **clip_arrays(2))
        (tmp_path / "-.npz").write_bytes((tmp_path / "0.npz").read_bytes()[:200])
        recording = rollout_data.open(tmp_path)
        assert [episode.id for episode in recording] == ["0", "2"]
        assert ["/1.npz" in str(recording.problems[0]), "/-.npz" in str(recording.problems[1])] == [
            True,
            True,
        ]
        np.testing.assert_array_equal(recording[1].observation["joint_pos"], state(2, 5))
        with pytest.raises(CorruptFileError):
            rollout_data.open(tmp_path / "1.npz")

    def test_the_other_set_of_names_and_further_arrays_are_read(self, tmp_path: Path) -> None:
        item = clip_arrays()
        np.savez(
            tmp_path / "walk.npz",
            fps=30.0,
            dof_names=["hip", "knee", "ankle"],
            body_names=["root", "a", "b", "c"],
            dof_positions=item["joint_pos"],
            dof_velocities=item["joint_vel"],
            body_positions=item["body_pos_w"],
            body_rotations=item["body_quat_w"].astype("float64"),
            contact=np.arange(5),
            weight_kg=31.5,
        )
        episode = rollout_data.open(tmp_path / "walk.npz")[0]
        assert sorted(episode.observation) == [
            "body_positions",
            "body_rotations",
            "dof_positions",
            "dof_velocities",
        ]
        assert episode.observation["body_rotations"].dtype == np.float64
        np.testing.assert_array_equal(episode["contact"], np.arange(5))
        assert (
            episode.metadata["dof_names"] == ["hip", "knee", "ankle"]
            and episode.metadata["weight_kg"] == 31.5
        )

    def test_joints_alone_are_a_clip(self, tmp_path: Path) -> None:
        np.savez(
            tmp_path / "a.npz",
            dof_positions=state(50, 4, 2),
            body_names=["root", "arm"],
            dof_names=["a", "b"],
        )
        episode = rollout_data.open(tmp_path / "a.npz")[0]
        np.testing.assert_array_equal(episode.observation["dof_positions"], state(50, 4, 2))
        assert (episode.metadata["body_order"], episode.metadata["body_names"]) == (
            "names",
            ["root", "arm"],
        )

    def test_json_clips_have_poses_and_frame_durations(self) -> None:
        for folder in ("deepmimic_humanoid", "motion_imitation_keyframed"):
            recording = rollout_data.open(CLIPS / folder)
            assert len(recording) == 5 and recording.problems == []
            for episode in recording:
                clip = json.loads((CLIPS / folder / episode.id).read_text())
                rows = np.array(clip["Frames"])
                each = (
                    np.full(len(rows), clip["FrameDuration"])
                    if "FrameDuration" in clip
                    else rows[:, 0]
                )
                np.testing.assert_array_equal(episode["duration_s"], each)
                np.testing.assert_array_equal(
                    episode.observation, rows[:, rows.shape[1] - episode.observation.shape[1] :]
                )
                assert episode.metadata["fps"] == pytest.approx(1 / each[0])

    @pytest.mark.parametrize(
        "text",
        [
            '{"Frames": ' + "[" * 100_000,
            '{"Frames": [[0.1, 1], [0.1]]}',
            '{"Frames": []}',
            '{"Frames": [[1' + "0" * 5000 + ", 1]]}",
            '{"Frames": [[NaN, 1.0]]}',
            '{"Frames": [["a", "b"]]}',
            '{"Frames": [[1, 2]], "FrameDuration": 0}',
        ],
        ids=["deep", "ragged", "empty", "huge number", "NaN", "texts", "no duration"],
    )
    def test_a_bad_json_clip_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(CorruptFileError, match="'Frames'"):
            rollout_data.open(tmp_path / "a.txt")


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class TestHostileFiles:
    @pytest.mark.parametrize("format", ["ogbench", "motion"])
    @pytest.mark.parametrize("name", ["observations", "joint_pos", "extra"])
    def test_a_pickle_raises_and_is_not_run(self, tmp_path: Path, format: str, name: str) -> None:
        arrays = ogbench_arrays([3]) if format == "ogbench" else clip_arrays()
        np.savez(
            tmp_path / "a.npz", **{**arrays, name: np.array([Touch(tmp_path / "run")], object)}
        )
        for named in (format, None):  # also where the content tells the format
            with pytest.raises(UnsafeFileError, match="pickled"):
                rollout_data.open(tmp_path / "a.npz", format=named)
        assert not (tmp_path / "run").exists()

    def test_an_array_that_declares_more_than_its_bytes_is_refused(self, tmp_path: Path) -> None:
        head = (
            b"\x93NUMPY\x01\x00v\x00"
            + b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }"
        )
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("observations", "actions", "terminals"):
                archive.writestr(f"{name}.npy", (head % (1 << 60)).ljust(127) + b"\n" + bytes(100))
        with pytest.raises(
            CorruptFileError, match=r"bytes, which do not fit shape \[1152921504606846976\]"
        ):
            rollout_data.open(tmp_path / "a.npz", format="ogbench")

    def test_an_archive_that_unpacks_to_gigabytes_allocates_no_memory(self, tmp_path: Path) -> None:
        rows = 1 << 25
        head = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '%b', 'fortran_order': False, 'shape': %b, }"
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, width in (("observations", 9), ("actions", 1), ("terminals", 1)):
                shape = b"(%d, %d)" % (rows, width) if width > 1 else b"(%d,)" % rows
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    member.write((head % (b"|u1", shape)).ljust(127) + b"\n")
                    for _ in range(rows * width >> 24):
                        member.write(bytes(1 << 24))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        episode = rollout_data.open(tmp_path / "a.npz")[0]
        assert episode.read("observation", 1 << 24, (1 << 24) + 5).sum() == 0
        with pytest.raises(CorruptFileError, match="at once"):
            _ = episode.observation
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB

    def test_a_truncated_or_changed_file_raises_or_is_read_unchanged(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "whole.npz", **ogbench_arrays([3, 2]))
        data = (tmp_path / "whole.npz").read_bytes()
        path, rng = tmp_path / "a.npz", np.random.default_rng(0)
        damaged = [data[:size] for size in range(0, len(data), 41)]
        for at in rng.integers(0, len(data), 300):
            damaged.append(
                data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :]
            )
        for content in damaged:
            path.write_bytes(content)
            try:
                recording = rollout_data.open(path, format="ogbench")
                actual = [(episode.observation, episode.action) for episode in recording]
            except RolloutDataError as error:
                assert isinstance(error, DataFileError)
                continue
            for number, (observation, acted) in enumerate(actual, 50):
                if len(observation) == [3, 2][number - 50] and not recording.problems:
                    np.testing.assert_array_equal(observation, state(number, len(observation)))
                    np.testing.assert_array_equal(acted, action(number, len(acted)))

    def test_a_link_out_of_a_folder_of_clips_raises(self, tmp_path: Path) -> None:
        (tmp_path / "clips").mkdir()
        np.savez(tmp_path / "secret.npz", **clip_arrays())
        np.savez(tmp_path / "clips" / "a.npz", **clip_arrays())
        (tmp_path / "clips" / "b.npz").symlink_to(tmp_path / "secret.npz")
        for named in ("motion", None):
            with pytest.raises(UnsafeFileError):
                rollout_data.open(tmp_path / "clips", format=named)


def test_an_array_that_the_directory_of_an_npz_file_hides_is_damage(tmp_path):
    """If a comment declares a larger length, it covers the entry of the next array, which `zipfile`
    then skips.
    """
    path = tmp_path / "clip.npz"
    np.savez(path, **clip_arrays())
    assert len(rollout_data.open(path)) == 1
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        first = archive.start_dir
        num_members = len(archive.infolist())
    sizes = [int.from_bytes(data[first + at : first + at + 2], "little") for at in (28, 30, 32)]
    second = first + 46 + sum(sizes)
    hidden = 46 + sum(
        int.from_bytes(data[second + at : second + at + 2], "little") for at in (28, 30, 32)
    )
    data[first + 32 : first + 34] = (sizes[2] + hidden).to_bytes(2, "little")
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == num_members - 1
    numbers = f"lists {num_members - 1} members, but its end record states {num_members}"
    with pytest.raises(DataFileError, match=numbers):
        rollout_data.open(path, format="motion")


def test_clips_that_are_added_to_an_opened_folder_are_not_played(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **clip_arrays(50))
    dataset = rollout_data.RolloutDataset(tmp_path, 1, 1, False, device="cpu")
    num_frames = [sum(int(batch.valid.sum()) for batch in dataset)]
    np.savez(tmp_path / "b.npz", **clip_arrays(60))
    num_frames.append(sum(int(batch.valid.sum()) for batch in dataset))
    reopened = rollout_data.RolloutDataset(tmp_path, 1, 1, False, device="cpu")
    num_frames.append(sum(int(batch.valid.sum()) for batch in reopened))
    assert num_frames[0] == num_frames[1] and num_frames[2] == 2 * num_frames[0]
