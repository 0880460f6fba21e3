"""Defects in files of other systems, and sound recordings that resemble a defect, one row each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rollout_data import RolloutWriter, doctor
from tests.doctor.folders import write
from tests.doctor.test_rules import sound
from tests.doctor.worlds import World, arm, walker
from tests.doctor.wrong_files import edited_json, edited_parquet, flipped

pytestmark = pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
DATA = Path(__file__).parents[1] / "data"
INFO, EPISODES = "meta/info.json", "meta/episodes/chunk-000/file-000.parquet"
CHUNK = "data/chunk-000/episode_00000"
Edit = Callable[[Path], Any]


def written(path: Path, form: str) -> Path:
    if form == "aloha":
        for number, episode in enumerate(arm(np.random.default_rng(0), 9).episodes):
            (path / "set").mkdir(parents=True, exist_ok=True)
            with h5py.File(path / f"set/episode_{number}.hdf5", "w") as file:
                file.attrs["sim"], file["action"] = True, episode.fields["action"]
                file["observations/qpos"] = episode.fields["observation/joint_pos"]
        return path / "set"
    if form == "motion":
        (path / "set").mkdir(parents=True)
        for number in range(4):
            arrays = {name: np.zeros((9, 3), np.float32) for name in ("joint_pos", "joint_vel")}
            arrays |= {
                f"body_{name}_w": np.ones((9, 2, 3), np.float32)
                for name in ("pos", "lin_vel", "ang_vel")
            }
            quaternions = np.full((9, 2, 4), 0.5, np.float32)
            np.savez(path / f"set/clip_{number}.npz", fps=[50], body_quat_w=quaternions, **arrays)
        return path / "set"
    return write(path, walker(np.random.default_rng(0)), form)


def cut(name: str) -> Edit:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-200])


def copied(source: str, target: str) -> Edit:
    return lambda path: (path / target).write_bytes((path / source).read_bytes())


def one_reward_less(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        rewards = file["rewards"][()]
        del file["rewards"]
        file["rewards"] = rewards[:-1]


def without_env(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["data"].attrs["env_args"]


def outside(columns: dict[str, list[Any]]) -> None:
    columns["dataset_to_index"][23] += 50


ROWS: dict[str, tuple[str, str, Edit, set[int]]] = {
    "a range behind the last row": ("STR03", "lerobot", lambda path: edited_parquet(path / EPISODES, outside), {23}),
    "a number twice": ("STR05", "aloha", copied("episode_3.hdf5", "episode_03.hdf5"), {3, 4}),
    "a file under another number": (
        "STR05", "lerobot_v21", copied(CHUNK + "4.parquet", CHUNK + "3.parquet"),
        {3},
    ),
    "another dtype": (
        "STR07", "lerobot",
        lambda path: edited_json(path / INFO, lambda info: info["features"]["action"].update(dtype="int64")),
        set(),
    ),
    "a feature without data": (
        "STR07", "lerobot_v21",
        lambda path: edited_json(
            path / INFO, lambda info: info["features"].update(effort={"dtype": "float32", "shape": [3]})
        ),
        set(),
    ),
    "frames of a total": (
        "STR08", "folders", lambda path: edited_json(path / "metadata.json", lambda one: one.update(total_timesteps=7)),
        set(),
    ),
    "a column of another length": ("STR08", "d4rl", one_reward_less, set()),
    "a chunk cut now": ("FIL03", "folders", lambda path: cut(next((path / "trajectory_5").iterdir()).name)(
        path / "trajectory_5"), {5}),
    "a cut file": ("FIL03", "aloha", cut("episode_4.hdf5"), {4}),
    "a cut first file": ("FIL03", "aloha", cut("episode_0.hdf5"), {0}),
    "a cut clip": ("FIL03", "motion", cut("clip_2.npz"), {2}),
    "a stray file of LeRobot": ("FIL05", "lerobot", lambda path: (path / "notes.txt").write_text("x"), set()),
    "a stray file": ("FIL05", "folders", lambda path: (path / "notes.txt").write_text("x"), set()),
    "cut statistics": ("FIL06", "lerobot", cut("meta/stats.json"), set()),
    "no environment": ("PRV01", "robomimic", without_env, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_defect_of_other_files_is_found_and_named(name: str, tmp_path: Path) -> None:
    code, form, edit, named = ROWS[name]
    path = written(tmp_path, form)
    assert [
        finding for finding in doctor(path, only=[code]).findings if finding.severity != "info"
    ] == []
    edit(path)
    diagnosis = doctor(path, only=[code, "STR10", "FIL00"])
    assert {finding.code for finding in diagnosis.findings} == {code}
    assert named <= {number for finding in diagnosis.findings for number in finding.trajectories}


@pytest.mark.parametrize("at", [-40, 160, 90])
def test_a_record_with_a_wrong_checksum_is_named(at: int, tmp_path: Path) -> None:
    (source,) = {path.parent for path in DATA.rglob("*.tfrecord*") if "no_reward" not in str(path)}
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (record,) = tmp_path.glob("*.tfrecord*")
    flipped(record, at % record.stat().st_size)
    (actual,) = (finding for finding in doctor(tmp_path).findings if finding.severity == "error")
    assert actual.code == "FIL01" and len(actual.trajectories) == 1


def test_next_observations_with_another_width_do_not_disturb_other_rules(tmp_path: Path) -> None:
    path = written(tmp_path, "d4rl")
    with h5py.File(path, "r+") as file:
        rows = file["observations"][()]
        del file["next_observations"]
        file["next_observations"] = rows[:, 1:]
        file["actions"][3] = np.nan
    codes = {finding.code for finding in doctor(path).findings}
    assert "VAL01" in codes and "FIL00" not in codes


def test_success_is_compared_with_rewards_if_the_ends_are_unknown(tmp_path: Path) -> None:
    world = walker(np.random.default_rng(0))
    for number, item in enumerate(world.episodes):
        item.fields["reward"][:] = 0
        item.fields["reward"][-1] = number % 2
        item.said = {"success": (number % 2 == 0) == (number < 12)}
    actual = doctor(write(tmp_path, world, "lerobot"), only=["LRN05"]).findings
    assert [set(item.trajectories) for item in actual] == [set(range(12))]


@pytest.mark.parametrize("form", ["lerobot", "folders"])
def test_the_record_of_a_conversion_belongs_to_the_recording(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, walker(np.random.default_rng(0)), form)
    assert list(path.rglob("rollout_conversion*"))
    assert [finding.message for finding in doctor(path, only=["FIL05"]).findings] == []


Rows = dict[str, np.ndarray]


def record(path: Path, episodes: list[Rows], has_finals: bool = False) -> Path:
    """Record episodes of flat fields. `quat` and pictures are observations."""
    with RolloutWriter(path, 1, durable=False) as writer:
        for item in episodes:
            is_last = np.arange(len(item["action"]))[:, None] == len(item["action"]) - 1
            rows = {
                name: values[:, None]
                for name, values in item.items()
                if not name.startswith("observation/")
            }
            observation = {
                name[12:]: values[:, None]
                for name, values in item.items()
                if name[:12] == "observation/"
            }
            final = (
                {name: values[-1] for name, values in observation.items()} if has_finals else None
            )
            writer.add_rollout(
                observation=observation, truncated=is_last, final_observation=final, **rows
            )
    return path


def simple(rng: np.random.Generator, num: int = 16) -> list[Rows]:
    return [
        {
            "action": item["action"],
            **{f"observation/{name}": rows for name, rows in item["observation"].items()},
        }
        for item in (sound(rng) * 2)[:num]
    ]


def halves_of_a_turn(rng: np.random.Generator, episodes: list[Rows]) -> None:
    for number, episode in enumerate(episodes):
        angle = (
            (0.6 if number % 3 else 2.6)
            + rng.uniform(-0.4, 0.4)
            + 0.01 * np.arange(len(episode["action"]))
        )
        quaternion = np.stack([np.cos(angle / 2), 0 * angle, 0 * angle, np.sin(angle / 2)], 1)
        episode["observation/quat"] = quaternion.astype(np.float32)


def single_frames(rng: np.random.Generator, episodes: list[Rows]) -> None:
    for item in episodes:
        del item["observation/quat"]
        item.update({name: values[:1] + np.float32(rng.normal()) for name, values in item.items()})


def ever_larger(rng: np.random.Generator, episodes: list[Rows]) -> None:
    for number, episode in enumerate(episodes):
        episode["observation/joints"] = episode["observation/joints"] * np.float32(1.35**number)


def rests_before_a_still_camera(rng: np.random.Generator, episodes: list[Rows]) -> None:
    for number, episode in enumerate(episodes):
        episode["action"] = (
            np.concatenate([np.repeat(episode["action"][:1], 11, 0), episode["action"]])[:120]
            if number == 3
            else (episode["action"])
        )
        level = np.floor(40 * (1.5 + episode["action"][:, :1, None, None])).astype(np.uint8)
        episode["observation/camera"] = level + rng.integers(0, 9, (1, 16, 16, 3)).astype(np.uint8)
        episode["observation/camera"] += (
            np.arange(120) % 2 * (np.arange(120) > 12 * (number == 3))
        )[:, None, None, None].astype(np.uint8)


def opens_often(rng: np.random.Generator, episodes: list[Rows]) -> None:
    for number, episode in enumerate(episodes):
        grip = (np.arange(120) // (4 if number == 5 else 60) % 2) + rng.normal(0, 1e-3, 120)
        episode["action"] = np.concatenate([episode["action"], grip[:, None].astype(np.float32)], 1)


def swims(rng: np.random.Generator, episodes: list[Rows]) -> None:
    for episode in episodes:
        phases = 2 * np.pi * 0.08 * np.arange(120)[:, None] + np.zeros(10)
        episode["observation/joints"] = (np.sin(phases) + rng.normal(0, 1e-3, (120, 10))).astype(
            np.float32
        )


SOUND = [
    halves_of_a_turn,
    single_frames,
    ever_larger,
    rests_before_a_still_camera,
    opens_often,
    swims,
]


@pytest.mark.parametrize("change", SOUND, ids=lambda change: change.__name__)
def test_a_sound_recording_that_resembles_a_defect_has_no_finding(
    change: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    episodes = simple(rng)
    change(rng, episodes)
    path = record(tmp_path / "a", episodes, has_finals=change is single_frames)
    actual = doctor(path, skip=["VAL12", "END05", "VAL16"]).findings
    assert [finding for finding in actual if finding.severity != "info"] == []


def lonely(rng: np.random.Generator, episodes: list[Rows]) -> set[int]:
    episodes[3]["observation/joints"][50, 1] = 150
    return {3}


def in_centimetres(rng: np.random.Generator, episodes: list[Rows]) -> set[int]:
    for number, episode in enumerate(episodes):
        episode["observation/joints"] = episode["observation/joints"] * np.float32(
            rng.uniform(0.7, 1.4)
        )
        episode["observation/joints"] *= np.float32(0.01 if number in (2, 9) else 1)
    return {2, 9}


def a_second_clock(rng: np.random.Generator, episodes: list[Rows]) -> set[int]:
    for number, episode in enumerate(episodes):
        episode["timestamp"] = np.arange(120) / 50
        episode["timestamp_camera"] = episode["timestamp"] * (1.1 if number == 4 else 1)
    return {4}


def a_noisy_gripper(rng: np.random.Generator, episodes: list[Rows]) -> set[int]:
    for number, episode in enumerate(episodes):
        grip = np.arange(120) // rng.integers(5, 60) % 2
        episode["action"] = np.concatenate([episode["action"], grip[:, None].astype(np.float32)], 1)
        episode["action"] += rng.normal(0, 0.1 * (number == 6), episode["action"].shape).astype(
            np.float32
        )
    return {6}


def bits_for_bytes(rng: np.random.Generator, episodes: list[Rows]) -> set[int]:
    for number, episode in enumerate(episodes):
        camera = rng.integers(0, 250, (120, 16, 16, 3)).astype(np.uint8)
        episode["observation/camera"] = (camera > 99).astype(np.uint8) if number == 5 else camera
    return {5}


FOUND = {"VAL05": lonely, "VAL10": in_centimetres, "TIM13": a_second_clock, "TIM12": a_noisy_gripper,
         "IMG06": bits_for_bytes}  # fmt: skip


@pytest.mark.parametrize("code", FOUND)
def test_a_defect_among_larger_ones_of_other_kinds_is_found(code: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    episodes = simple(rng)
    named = FOUND[code](rng, episodes)
    actual = doctor(record(tmp_path / "a", episodes), only=[code, "FIL00"]).findings
    assert [(finding.code, set(finding.trajectories)) for finding in actual] == [(code, named)]


def test_all_trajectories_that_are_left_open_are_named(tmp_path: Path) -> None:
    world: World = walker(np.random.default_rng(0), 12)
    for number in (3, 5, 8, 11):
        world[number].end, world[number].final = "open", None
    actual = doctor(write(tmp_path, world), only=["END01"]).findings
    assert [item.trajectories for item in actual] == [(3, 5, 8)]
