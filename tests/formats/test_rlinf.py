"""RLinf's checkpoints: episodes between dones, column by column, with the real layout of files and
index.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollout_data
from storage.errors import (
    CorruptFileError,
    DataFileError,
    RolloutDataError,
    RolloutDataWarning,
    UnsafeFileError,
)
from tests.files.recorded import drain
from tests.formats.values import action, reward, state

#: Of two columns: the rows at which they are done.
DONES = {0: [2, 3], 1: [5]}


def block(
    number: int, rows: int = 6, dones: Mapping[int, list[int]] = DONES, is_reset: bool = False
) -> dict[str, Any]:
    """Return a block of two columns.

    The observation after a done is row + 1 of its own column, or 0 after a reset.
    """
    observations = np.stack([state(10 * number + column, rows + 1) for column in dones], 1)
    done = np.zeros((rows, len(dones), 1), bool)
    for column, at in dones.items():
        done[[row for row in at if row < rows], column] = True
    after = observations[1:].copy()
    if not is_reset:
        after[done[..., 0]] += 5
    terminated = done & (np.arange(rows) % 2 == 0)[:, None, None]
    arrays = {
        "actions": np.stack([action(10 * number + column, rows) for column in dones], 1),
        "rewards": np.stack([reward(10 * number + column, rows) for column in dones], 1)[..., None],
        "dones": done,
        "terminations": terminated,
        "truncations": done & ~terminated,
        "prev_logprobs": np.zeros((rows, len(dones), 1), "float32"),
    }
    actual: dict[str, Any] = {name: torch.from_numpy(item) for name, item in arrays.items()}
    actual["curr_obs"] = {
        "states": torch.from_numpy(observations[:-1]),
        "main_images": torch.zeros(rows, len(dones), 2, 2, 3),
    }
    actual["next_obs"] = {
        "states": torch.from_numpy(after),
        "main_images": torch.zeros(rows, len(dones), 2, 2, 3),
    }
    actual["curr_obs"]["task"] = [[f"task {number}", "другое"]] * rows
    return {**actual, "max_episode_length": 8, "model_weights_id": "w0"}


def write(
    folder: Path,
    blocks: Mapping[int, Any],
    index: str = "trajectory_index.json",
    middle: str = "w0",
) -> Path:
    folder.mkdir(parents=True)
    entries = {}
    for number, content in blocks.items():
        torch.save(content, folder / f"trajectory_{number}_{middle}.pt")
        rows, columns = content["prev_logprobs"].shape[:2]
        entries[str(number)] = {
            "num_samples": rows * columns,
            "trajectory_id": number,
            "model_weights_id": "w0",
        }
    about = {"trajectory_index": entries, "trajectory_id_list": list(blocks)}
    (folder / index).write_text(json.dumps(about))
    (folder / "metadata.json").write_text(
        json.dumps({"trajectory_format": "pt", "size": len(blocks)})
    )
    return folder


def spans(recording: Any) -> list[tuple[str, int, Any, Any]]:
    return [
        (episode.id, len(episode), episode.terminated, episode.truncated) for episode in recording
    ]


def test_episodes_lie_between_the_dones_of_a_column(tmp_path: Path) -> None:
    recording = rollout_data.open(write(tmp_path / "a", {7: block(7)}))
    assert spans(recording) == [
        ("7_0_0", 3, True, False),
        ("7_0_1", 1, False, True),
        ("7_0_2", 2, None, None),
        ("7_1_0", 6, False, True),
    ]
    for episode, column, first in zip(recording, (0, 0, 0, 1), (0, 3, 4, 0), strict=True):
        rows, source = slice(first, first + len(episode)), 70 + column
        np.testing.assert_array_equal(episode.observation["states"], state(source, 6)[rows])
        np.testing.assert_array_equal(episode.action, action(source, 6)[rows])
        np.testing.assert_array_equal(episode.reward, reward(source, 6)[rows])
        assert episode["observation/task"] == [["task 7", "другое"][column]] * len(episode)
        assert (episode.task, episode.metadata["env"]) == (["task 7", "другое"][column], column)
        assert (
            episode.metadata["trajectory_id"] == 7 and episode.metadata["max_episode_length"] == 8
        )
        shift = 0 if episode.terminated is None else 5
        np.testing.assert_array_equal(
            episode.final_observation["states"], state(source, 7)[rows.stop] + shift
        )
    assert recording.problems == [] and not any(
        name.startswith("next") for name in recording.schema
    )


def test_a_final_observation_that_begins_the_next_episode_is_reported(
    tmp_path: Path,
) -> None:
    recording = rollout_data.open(write(tmp_path / "a", {0: block(0, is_reset=True)}))
    finals = [episode.final_observation["states"] for episode in recording]
    np.testing.assert_array_equal(
        finals, [state(0, 7)[3], state(0, 7)[4], state(0, 7)[6], state(1, 7)[6]]
    )
    assert [
        "start with the final observation of the previous episode" in str(remark)
        for remark in recording.advice
    ] == [True]


def test_next_observations_that_differ_from_the_next_rows_are_kept(tmp_path: Path) -> None:
    content = block(0)
    content["next_obs"]["main_images"] = content["next_obs"]["main_images"] + 1
    episode = rollout_data.open(write(tmp_path / "b", {0: content}))[3]
    assert (episode["next_observation/main_images"] == 1).all()
    content["next_obs"]["states"] = content["next_obs"]["states"] + 0.5
    episode = rollout_data.open(write(tmp_path / "a", {0: content}))[3]
    np.testing.assert_array_equal(episode["next_observation"]["states"][:5], state(1, 7)[1:6] + 0.5)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_additional_row_of_each_epoch_precedes_its_steps(tmp_path: Path, epochs: int) -> None:
    content = block(0)
    for name in ("dones", "terminations", "truncations"):
        parts = content[name].reshape(epochs, 6 // epochs, 2, 1)
        content[name] = torch.cat([torch.ones_like(parts[:, :1]), parts], 1).reshape(
            6 + epochs, 2, 1
        )
    recording = rollout_data.open(write(tmp_path / "a", {0: content}))
    assert [len(episode) for episode in recording] == [3, 1, 2, 6]


def test_rewards_of_chunks_of_actions_keep_their_width(tmp_path: Path) -> None:
    content = block(0)
    content["rewards"] = content["rewards"].repeat(1, 1, 4)
    content["dones"] = torch.nn.functional.pad(content["dones"], (3, 0))
    content["actions"] = content["actions"].bfloat16()  # which numpy has not
    episode = rollout_data.open(write(tmp_path / "a", {0: content}))[0]
    assert episode.reward.shape == (3, 4) and episode.schema["action"].dtype == "float32"


@pytest.mark.parametrize(
    "missing",
    [("terminations", "truncations"), ("dones", "terminations", "truncations"), ("dones",)],
)
def test_ends_are_known_only_from_stored_flags(tmp_path: Path, missing: tuple[str, ...]) -> None:
    content = {name: item for name, item in block(0).items() if name not in missing}
    lengths = [
        (len(episode), episode.terminated)
        for episode in rollout_data.open(write(tmp_path / "a", {0: content}))
    ]
    cut = [(3, None), (1, None), (2, None), (6, None)]
    assert (
        lengths
        == {2: cut, 3: [(6, None), (6, None)], 1: [(3, True), (1, False), (2, None), (6, False)]}[
            len(missing)
        ]
    )


def test_episodes_are_in_the_order_of_the_index_and_matched_by_id(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "a", {10: block(10), 2: block(2), 1: block(1)}, "trajector_index.json", "a1b2_17"
    )
    recording = rollout_data.open(folder)
    assert [episode.id for episode in recording][::4] == ["10_0_0", "2_0_0", "1_0_0"]
    np.testing.assert_array_equal(recording[4].action, action(20, 3))


def test_ranks_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in (10, 2):
        write(tmp_path / "a" / f"rank_{rank}", {0: block(rank)})
    recording = pickle.loads(pickle.dumps(rollout_data.open(tmp_path / "a")))
    assert [episode.id for episode in recording][::4] == ["rank_2_0_0_0", "rank_10_0_0_0"]
    np.testing.assert_array_equal(recording[4].action, action(100, 3))


def test_entries_without_a_file_and_files_without_an_entry_are_reported(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {0: block(0), 1: block(1)})
    (folder / "trajectory_1_w0.pt").rename(folder / "trajectory_9_w0.pt")
    recording, rebuilt = (
        rollout_data.open(folder),
        rollout_data.open(folder, on_bad_index="rebuild"),
    )
    assert [episode.metadata["trajectory_id"] for episode in recording] == [0] * 4
    assert [episode.metadata["trajectory_id"] for episode in rebuilt] == [0] * 4 + [9] * 4
    np.testing.assert_array_equal(rebuilt[4].action, action(10, 3))
    for problems in (recording.problems, rebuilt.problems):
        assert [
            "no files for the trajectories 1 of its index" in str(problems[0]),
            "trajectory_9" in str(problems[1]),
        ] == [
            True,
            True,
        ]


@pytest.mark.parametrize("ids", [[0, 0], ["a"], 3, [[0]]])
def test_an_index_with_invalid_ids_raises(tmp_path: Path, ids: Any) -> None:
    folder = write(tmp_path / "a", {0: block(0)})
    about = json.loads((folder / "trajectory_index.json").read_text())
    (folder / "trajectory_index.json").write_text(json.dumps(about | {"trajectory_id_list": ids}))
    with pytest.raises(CorruptFileError, match="The index of"):
        rollout_data.open(folder)


def test_an_index_of_other_sizes_is_refused_or_rebuilt(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {0: block(0)})
    about = json.loads((folder / "trajectory_index.json").read_text())
    about["trajectory_index"]["0"]["num_samples"] = 99
    (folder / "trajectory_index.json").write_text(json.dumps(about))
    with pytest.raises(CorruptFileError, match="on_bad_index='rebuild'"):
        rollout_data.open(folder)
    recording = rollout_data.open(folder, on_bad_index="rebuild")
    assert len(recording) == 4 and "the index has 99" in str(recording.problems[0])


@pytest.mark.parametrize(
    "change",
    [
        {"dones": torch.zeros(10, 2, 1)},
        {"prev_logprobs": torch.zeros(0, 2), "rewards": 3, "actions": 3},
    ],
)
def test_one_bad_file_is_left_out_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write(tmp_path / "a", {0: block(0), 1: block(1)})
    torch.save(block(0) | change, folder / "trajectory_0_w0.pt")
    recording = rollout_data.open(folder)
    assert [episode.metadata["trajectory_id"] for episode in recording] == [1] * 4 and len(
        recording.problems
    ) == 1


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_with_code_raises_and_the_code_does_not_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {0: block(0)})
    torch.save({**block(0), "evil": Touch(tmp_path / "run")}, folder / "trajectory_0_w0.pt")
    with pytest.raises(UnsafeFileError):
        rollout_data.open(folder)
    (folder / "trajectory_0_w0.pt").write_bytes(pickle.dumps(Touch(tmp_path / "run")))
    with pytest.raises(DataFileError):
        rollout_data.open(folder)
    (folder / "trajectory_0_w0.pt").rename(folder / "trajectory_0_w0.pkl")
    with pytest.raises(UnsafeFileError, match="'pt'"):
        rollout_data.open(folder)
    (folder / "metadata.json").write_text('{"trajectory_format": "pkl"}')
    with pytest.raises(UnsafeFileError, match="'pkl'"):
        rollout_data.open(folder)
    assert not (tmp_path / "run").exists()


def test_a_packed_archive_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {0: block(0)})
    with zipfile.ZipFile(folder / "trajectory_0_w0.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(1 << 23))
    with pytest.raises(CorruptFileError, match="compressed"):
        rollout_data.open(folder)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1, 1, 1).expand(1 << 40, 2, 1),
        torch.zeros(6, 2, 1, device="meta"),
        torch.zeros(6, 2).to_sparse(),
    ],
    ids=["repeated", "meta", "sparse"],
)
@pytest.mark.parametrize("name", ["dones", "prev_logprobs"])
def test_tensors_without_stored_values_raise(
    tmp_path: Path, name: str, value: torch.Tensor
) -> None:
    folder = write(tmp_path / "a", {0: block(0)})
    torch.save(block(0) | {name: value}, folder / "trajectory_0_w0.pt")
    with pytest.raises(DataFileError):
        rollout_data.open(folder)


def test_circular_dicts_raise_quickly(tmp_path: Path) -> None:
    folder, nested = write(tmp_path / "a", {0: block(0)}), {"a": 1}
    for _ in range(60):
        nested = {"a": nested, "b": nested}
    torch.save(block(0) | {"curr_obs": nested}, folder / "trajectory_0_w0.pt")
    assert len(rollout_data.open(folder)) == 4


def test_a_link_to_another_place_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {0: block(0)})
    (folder / "trajectory_0_w0.pt").rename(tmp_path / "elsewhere.pt")
    (folder / "trajectory_0_w0.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(UnsafeFileError):
        rollout_data.open(folder)
    write(tmp_path / "b", {0: block(0)})
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank_0").symlink_to(tmp_path / "b")
    with pytest.raises(UnsafeFileError):
        rollout_data.open(tmp_path / "ranks")


def test_files_truncated_at_any_byte_raise(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {0: block(0)})
    path = folder / "trajectory_0_w0.pt"
    whole = path.read_bytes()
    for size in range(0, len(whole), len(whole) // 20):
        path.write_bytes(whole[:size])
        with pytest.raises(RolloutDataError):
            rollout_data.open(folder)


def test_the_checkpoint_of_another_system_is_read() -> None:
    recording = rollout_data.open(Path(__file__).parents[1] / "data" / "rlinf" / "ckpt_pt")
    assert sum(len(episode) for episode in recording) == recording.metadata["total_samples"] == 32
    assert all(len(episode["forward_inputs/tok"]) == len(episode) for episode in recording)


def add_block(folder: Path, number: int, content: Any) -> None:
    """Add a trajectory file, then replace the index by one that lists it."""
    torch.save(content, folder / f"trajectory_{number}_w0.pt")
    path = folder / "trajectory_index.json"
    index = json.loads(path.read_text())
    rows, columns = content["prev_logprobs"].shape[:2]
    index["trajectory_index"][str(number)] = {
        "num_samples": rows * columns,
        "trajectory_id": number,
        "model_weights_id": "w0",
    }
    index["trajectory_id_list"].append(number)
    (folder / "new.json").write_text(json.dumps(index))
    (folder / "new.json").replace(path)


def frames_of(batches: Any) -> Counter[bytes]:
    """Count the valid frames by their actions, which differ between all frames of all blocks."""
    counts: Counter[bytes] = Counter()
    for batch in batches:
        counts.update(row.numpy().tobytes() for row in batch.action[batch.valid])
    return counts


@pytest.mark.parametrize("num_workers", [None, 0, 2])
def test_the_next_pass_of_a_growing_folder_has_the_new_trajectories(
    tmp_path: Path, num_workers: int | None
) -> None:
    for rank in range(2):
        write(tmp_path / f"rank_{rank}", {0: block(rank)})
    dataset = rollout_data.RolloutDataset(tmp_path, 2, 1, False, device="cpu")
    batches: Any = dataset
    if num_workers is not None:
        batches = rollout_data.loader(dataset, num_workers=num_workers)
    assert frames_of(batches) == frames_of(
        rollout_data.RolloutDataset(tmp_path, 2, 1, False, device="cpu")
    )
    add_block(tmp_path / "rank_0", 1, block(5))
    write(tmp_path / "rank_2", {0: block(6)})
    after = frames_of(batches)
    assert after == frames_of(rollout_data.RolloutDataset(tmp_path, 2, 1, False, device="cpu"))
    assert after.total() == 4 * 12


def test_trajectories_in_play_continue_in_the_pass_after_a_growth(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"rank_{rank}", {0: block(rank)})
    one_pass = frames_of(rollout_data.RolloutDataset(tmp_path, 2, 1, False, device="cpu"))
    dataset = rollout_data.RolloutDataset(tmp_path, 2, 2, False, device="cpu")
    first = dataset.get_batch(2)
    add_block(tmp_path / "rank_0", 1, block(5))
    expected = one_pass + frames_of(
        rollout_data.RolloutDataset(tmp_path, 2, 1, False, device="cpu")
    )
    assert frames_of([first, *drain(dataset, 1)]) == expected


@pytest.mark.parametrize("damage", [lambda index: index.write_text("{"), Path.unlink])
def test_a_damaged_index_is_reported_and_the_known_trajectories_are_played(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    write(tmp_path / "a", {0: block(0)})
    dataset = rollout_data.RolloutDataset(tmp_path / "a", 1, 1, False, device="cpu")
    before = frames_of(dataset)
    damage(tmp_path / "a" / "trajectory_index.json")
    with pytest.warns(RolloutDataWarning):
        assert frames_of(dataset) == before
    assert dataset.problems


def test_a_recording_is_streamed_as_it_was_when_it_was_opened(tmp_path: Path) -> None:
    write(tmp_path / "a", {0: block(0)})
    recording = rollout_data.open(tmp_path / "a")
    dataset = rollout_data.RolloutDataset(recording, 1, 1, False, device="cpu")
    before = frames_of(dataset)
    add_block(tmp_path / "a", 1, block(5))
    assert frames_of(dataset) == before
