"""Minari's own classes read the datasets that we write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rollout_data
from tests.formats.hdf5_files import LENGTHS as BY_NUMBER
from tests.formats.hdf5_files import actions, rewards, values
from tests.readers.recordings import CAMERAS, LENGTHS, record, record_with_gaps

minari = pytest.importorskip("minari", reason="its tests need minari: make test-readers")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Convert a recording and load it by its id."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))

    def load(source: Any, name: str, **options: Any) -> Any:
        rollout_data.convert(
            source, tmp_path / "root" / "tests" / name, "minari", progress=False, **options
        )
        return minari.load_dataset(f"tests/{name}")

    return load


def test_cameras_and_final_observations_are_read(tmp_path, load):
    read = load(record(tmp_path / "ours"), "walk-v0")
    assert (read.total_episodes, read.total_steps) == (len(LENGTHS), sum(LENGTHS))
    assert {*read.observation_space["images"]} == {*CAMERAS}
    for number, episode in enumerate(read.iterate_episodes()):
        frames = np.arange(LENGTHS[number] + 1)
        assert episode.observations["state"][:, 0].tolist() == (100 * number + frames).tolist()
        for camera, first in CAMERAS.items():
            pictures = episode.observations["images"][camera]
            assert pictures[:, 0, 0, 0].tolist() == (first + 20 * number + frames).tolist()
            assert read.observation_space["images"][camera].contains(pictures[0])
        assert episode.actions[:, 0].tolist() == (10 * number + frames[:-1]).tolist()
        assert episode.rewards.tolist() == (10 * number + frames[:-1]).tolist()
        assert (episode.terminations[-1], episode.truncations[-1]) == (number != 1, number == 1)
        assert not episode.terminations[:-1].any() and not episode.truncations[:-1].any()


def test_an_episode_without_an_end_is_read_without_its_last_step(tmp_path, load):
    read = load(record(tmp_path / "ours", is_open=True), "open-v0")
    lengths = [len(episode) for episode in read.iterate_episodes()]
    assert lengths == [*LENGTHS[:2], LENGTHS[2] - 1] and read.total_steps == sum(lengths)
    last = read[2]
    assert (
        len(last.observations["state"]) == LENGTHS[2]
        and not last.terminations.any()
        and not last.truncations.any()
    )


def test_missing_flags_and_floats_are_read_as_false_and_nan(tmp_path, load):
    read = load(record_with_gaps(tmp_path / "gaps.hdf5"), "gaps-v0")
    assert {*read.observation_space} == {"low", "touch", "is_held"}
    assert (
        np.isnan(read[1].observations["touch"]).all() and not read[1].observations["is_held"].any()
    )
    assert read[2].observations["touch"][:, 0].tolist() == [20, 21, 22, 23, 24]
    assert read[2].observations["is_held"].all()
    chosen = read.sample_episodes(2)
    assert (
        len([*chosen]) == 2
        and read.filter_episodes(lambda episode: len(episode) > 3).total_episodes == 2
    )


def test_demonstrations_without_observations_are_read(tmp_path, load):
    with h5py.File(tmp_path / "raw.hdf5", "w") as file:
        for number, length in enumerate((4, 6)):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"], demo["states"] = (
                np.full((length, 2), number, np.float32),
                np.zeros((length, 3)),
            )
    read = load(tmp_path / "raw.hdf5", "raw-v0", missing_reward=0.5)
    assert [episode.actions[:, 0].tolist() for episode in read.iterate_episodes()] == [
        [0] * 4,
        [1] * 6,
    ]
    assert [(episode.observations, episode.rewards[0]) for episode in read.iterate_episodes()] == [
        ({}, 0.5)
    ] * 2


@pytest.mark.parametrize("kind", ["hdf5", "arrow", "parquet"])
def test_our_reader_reads_minari_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    buffers = pytest.importorskip("minari.data_collector.episode_buffer")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    made = [
        buffers.EpisodeBuffer(
            id=number,
            seed=100 + number,
            observations={"low": values(number, length + 1), "state": {"n": np.arange(length + 1)}},
            actions=actions(number, length),
            rewards=list(rewards(number, length)),
            terminations=[frame == length - 1 for frame in range(length)],
            truncations=[False] * length,
        )
        for number, length in enumerate(BY_NUMBER.values())
    ]
    low = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    state = gymnasium.spaces.Dict({"n": gymnasium.spaces.Discrete(9)})
    minari.create_dataset_from_buffers(
        dataset_id="lab/some-v0",
        buffer=made,
        observation_space=gymnasium.spaces.Dict({"low": low, "state": state}),
        action_space=gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        data_format=kind,
    )
    recording = rollout_data.open(tmp_path / "lab" / "some-v0")
    assert [len(episode) for episode in recording] == list(BY_NUMBER.values())
    for number, episode in enumerate(recording):
        length = len(episode)
        np.testing.assert_array_equal(episode.observation["low"], values(number, length))
        np.testing.assert_array_equal(episode.observation["state"]["n"], np.arange(length))
        np.testing.assert_array_equal(episode.action, actions(number, length))
        np.testing.assert_array_equal(episode.reward, rewards(number, length))
        assert (
            episode.final_observation["state/n"] == length
            and episode.metadata["seed"] == 100 + number
        )
        assert (episode.terminated, episode.truncated) == (True, False)
