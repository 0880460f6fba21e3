"""RLDS sets: steps, ends and texts are right. Shards that contradict their index raise an error."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_data
from rollout_data.formats.records.crc32c import crc32c
from storage.errors import (
    CorruptFileError,
    DataFileError,
    RolloutDataError,
    UnsafeFileError,
    UsageError,
)
from tests.formats.values import action, picture, reward, state

image = pytest.importorskip("PIL.Image")
PREFIX = "tensorflow_datasets.core.features."
TEMPLATES = [
    "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}",
]


def slow_crc32c(data: bytes) -> int:
    """Compute the checksum bit by bit, from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def framed(payload: bytes) -> bytes:
    head = struct.pack("<Q", len(payload))
    masks = [
        ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        for crc in (slow_crc32c(head), crc32c(payload))
    ]
    return head + struct.pack("<I", masks[0]) + payload + struct.pack("<I", masks[1])


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def part(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(values: Mapping[str, Any]) -> bytes:
    """Return a `tf.train.Example`: texts and bytes unchanged, floats as float32, all other values
    as integers.
    """
    entries = []
    for name, value in values.items():
        if isinstance(value, list):
            feature = part(
                1,
                b"".join(
                    part(1, item if isinstance(item, bytes) else item.encode()) for item in value
                ),
            )
        elif value.dtype.kind == "f":
            feature = part(2, part(1, value.astype("<f4").tobytes()))
        else:
            feature = part(
                3, part(1, b"".join(map(varint, value.astype(np.int64).ravel().tolist())))
            )
        entries.append(part(1, part(1, name.encode()) + part(2, feature)))
    return part(1, b"".join(entries))


def tensor(dtype: str, *shape: int, encoding: str = "none") -> dict[str, Any]:
    dimensions = {"dimensions": list(map(str, shape))} if shape else {}
    return {
        "pythonClassName": f"{PREFIX}tensor_feature.Tensor",
        "tensor": {"dtype": dtype, "shape": dimensions, "encoding": encoding},
    }


def pictures(encoding: str, *shape: int, dtype: str = "uint8") -> dict[str, Any]:
    about = {
        "dtype": dtype,
        "encodingFormat": encoding,
        "shape": {"dimensions": list(map(str, shape))},
    }
    return {"pythonClassName": f"{PREFIX}image_feature.Image", "image": about}


TEXT = {"pythonClassName": f"{PREFIX}text_feature.Text", "text": {}}


def tree(**children: Any) -> dict[str, Any]:
    return {
        "pythonClassName": f"{PREFIX}features_dict.FeaturesDict",
        "featuresDict": {"features": children},
    }


def steps(**children: Any) -> dict[str, Any]:
    return {
        "pythonClassName": f"{PREFIX}dataset_feature.Dataset",
        "sequence": {"feature": tree(**children), "length": "-1"},
    }


USUAL = {
    "observation": tree(state=tensor("float32", 3)),
    "action": tensor("float32", 2),
    "reward": tensor("float32"),
    "is_first": tensor("bool"),
    "is_last": tensor("bool"),
    "is_terminal": tensor("bool"),
}


def usual_steps(number: int, length: int, is_terminal: bool = True) -> dict[str, Any]:
    rows = np.arange(length)
    return {
        "steps/observation/state": state(number, length),
        "steps/action": action(number, length),
        "steps/reward": reward(number, length),
        "steps/is_first": rows == 0,
        "steps/is_last": rows == length - 1,
        "steps/is_terminal": (rows == length - 1) & is_terminal,
    }


def write_set(
    folder: Path,
    shards: Mapping[str, list[list[Mapping[str, Any]]]],
    features: Any = None,
    template: str = TEMPLATES[0],
) -> Path:
    """Write a set: split -> shards -> episodes. Return the version folder."""
    folder = folder / "walk" / "1.0.0"
    folder.mkdir(parents=True)
    splits = []
    for split, listed in shards.items():
        splits.append(
            {
                "name": split,
                "shardLengths": [str(len(item)) for item in listed],
                "filepathTemplate": template,
            }
        )
        for number, episodes in enumerate(listed):
            of_total = f"{number:05d}-of-{len(listed):05d}"
            name = template.replace("{SHARD_X_OF_Y}", of_total).replace(
                "{SHARD_INDEX}", f"{number:05d}"
            )
            name = name.format(DATASET="walk", SPLIT=split, FILEFORMAT="tfrecord")
            (folder / name).write_bytes(b"".join(framed(example(episode)) for episode in episodes))
    (folder / "dataset_info.json").write_text(
        json.dumps({"name": "walk", "fileFormat": "tfrecord", "splits": splits})
    )
    (folder / "features.json").write_text(json.dumps(features or tree(steps=steps(**USUAL))))
    return folder


def encoded(pixels: np.ndarray, kind: str) -> list[bytes]:
    result = []
    for item in pixels:
        out = io.BytesIO()
        image.fromarray(item).save(out, kind)
        result.append(out.getvalue())
    return result


@pytest.mark.parametrize(
    "data", [b"", b"a", b"123456789", bytes(100), bytes(range(256)) * 5, b"\xff" * 3001]
)
def test_the_checksum_equals_its_definition(data: bytes) -> None:
    assert crc32c(data) == slow_crc32c(data)
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("template", TEMPLATES)
def test_splits_and_shards_are_read_in_order(tmp_path: Path, template: str) -> None:
    numbers = {"train": [[50, 51], [52]], "test": [[60]]}
    shards = {
        split: [[usual_steps(item, item - 48) for item in shard] for shard in all]
        for split, all in numbers.items()
    }
    folder = write_set(tmp_path, shards, template=template)
    for path in (folder, folder.parent):  # one level up is the same set
        recording = rollout_data.open(path)
        assert [episode.metadata["split"] for episode in recording] == ["train"] * 3 + ["test"]
        for number, episode in zip([50, 51, 52, 60], recording, strict=True):
            assert len(episode) == number - 48
            np.testing.assert_array_equal(episode.observation["state"], state(number, len(episode)))
            np.testing.assert_array_equal(episode.action, action(number, len(episode)))
            np.testing.assert_array_equal(episode.reward, reward(number, len(episode)))
            np.testing.assert_array_equal(episode.read("reward", 1, 2), reward(number, 2)[1:])
    assert len({episode.id for episode in recording}) == 4


@pytest.mark.parametrize(
    ("flags", "ends"), [((True, True), (True, False)), ((True, False), (False, True))]
)
def test_ends_follow_the_flags_of_the_last_step(tmp_path: Path, flags: Any, ends: Any) -> None:
    episode = rollout_data.open(write_set(tmp_path, {"train": [[usual_steps(50, 3, flags[1])]]}))[0]
    assert (episode.terminated, episode.truncated) == ends


def test_an_end_without_flags_is_unknown_and_a_missing_reward_is_none(tmp_path: Path) -> None:
    only = {
        name: value
        for name, value in usual_steps(50, 3).items()
        if "is_" not in name and "reward" not in name
    }
    recording = rollout_data.open(write_set(tmp_path, {"train": [[only, usual_steps(51, 2)]]}))
    assert (recording[0].terminated, recording[0].truncated, recording[0].reward) == (
        None,
        None,
        None,
    )
    np.testing.assert_array_equal(recording[1].reward, reward(51, 2))


def test_the_last_step_can_be_the_final_observation(tmp_path: Path) -> None:
    folder = write_set(tmp_path, {"train": [[usual_steps(50, 4), usual_steps(51, 1)]]})
    kept, final = rollout_data.open(folder), rollout_data.open(folder, last_step="final")
    assert [len(episode) for episode in kept] == [4, 1] and kept[0].final_observation is None
    assert [len(episode) for episode in final] == [3] and "0 steps" in str(final.problems[0])
    np.testing.assert_array_equal(final[0].final_observation["state"], state(50, 4)[3])
    np.testing.assert_array_equal(final[0].action, action(50, 3))
    with pytest.raises(UsageError, match="last_step must be one of 'final', 'keep'"):
        rollout_data.open(folder, last_step="drop")


def test_terminal_flags_on_every_last_step_are_reported(tmp_path: Path) -> None:
    recording = rollout_data.open(
        write_set(tmp_path, {"train": [[usual_steps(50, 3), usual_steps(51, 3)]]})
    )
    assert "is_terminal" in str(recording.advice[0]) and recording.problems == []


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_integers_of_every_dtype_are_read(tmp_path: Path, dtype: str) -> None:
    limits = np.iinfo(dtype) if dtype != "bool" else None
    values = np.array(
        [[0, 1], [1, 0]] if limits is None else [[limits.min, 0], [1, limits.max]], dtype
    )
    features = tree(steps=steps(**USUAL, count=tensor(dtype, 2)))
    folder = write_set(
        tmp_path,
        {"train": [[{**usual_steps(50, 2), "steps/count": values.astype(np.uint64)}]]},
        features,
    )
    actual = rollout_data.open(folder)[0]["count"]
    assert actual.dtype == values.dtype
    np.testing.assert_array_equal(actual, values)


def test_pictures_texts_and_metadata_are_read(tmp_path: Path) -> None:
    observation = tree(
        state=tensor("float32", 3),
        png=pictures("png", 8, 10, 3),
        any_size=pictures("", -1, -1, 3),
        depth=pictures("png", 8, 10, 1, dtype="uint16"),
        jpeg=pictures("jpeg", 8, 10, 3),
        absent=pictures("jpeg", 8, 10, 3),
        raw=tensor("float64", 2, encoding="zlib"),
        grid=tensor("int32", 2, 2),
    )
    features = tree(
        steps=steps(**{**USUAL, "observation": observation}, language_instruction=TEXT, note=TEXT),
        episode_metadata=tree(success=tensor("bool"), path=TEXT, gains=tensor("float32", 2)),
    )
    pixels, depth = picture(50, 3), np.arange(240, dtype="uint16").reshape(3, 8, 10) * 250
    fine = np.arange(6.0).reshape(3, 2) / 3
    values = usual_steps(50, 3) | {
        "steps/observation/png": encoded(pixels, "PNG"),
        "steps/observation/any_size": encoded(pixels[:, :5], "PNG"),
        "steps/observation/depth": encoded(depth, "PNG"),
        "steps/observation/jpeg": encoded(pixels, "JPEG"),
        "steps/observation/absent": [b""] * 3,
        "steps/observation/raw": [zlib.compress(row.tobytes()) for row in fine],
        "steps/observation/grid": np.arange(12),
        "steps/language_instruction": ["开抽屉"] * 3,
        "steps/note": ["a", "", "ü"],
        "episode_metadata/success": np.array([True]),
        "episode_metadata/path": ["raw/ü.h5"],
        "episode_metadata/gains": np.array([0.5, 2.0]),
    }
    recording = rollout_data.open(write_set(tmp_path, {"train": [[values]]}, features))
    episode = recording[0]
    np.testing.assert_array_equal(episode.observation["png"], pixels)
    np.testing.assert_array_equal(episode.observation["any_size"], pixels[:, :5])
    np.testing.assert_array_equal(episode.observation["depth"], depth[..., None])
    np.testing.assert_array_equal(episode.observation["raw"], fine)
    np.testing.assert_array_equal(
        episode.observation["grid"], np.arange(12, dtype="int32").reshape(3, 2, 2)
    )
    assert np.abs(episode.observation["jpeg"].mean() - pixels.mean()) < 2
    assert "absent" not in episode.observation and any(
        "'observation/absent'" in str(problem) for problem in recording.problems
    )
    assert recording.metadata["lossy"] == ["observation/jpeg"]
    assert (episode.task, episode.success) == ("开抽屉", True)
    assert episode["note"] == ["a", "", "ü"] and episode["language_instruction"] == ["开抽屉"] * 3
    assert episode.metadata["path"] == "raw/ü.h5" and episode.metadata["gains"] == [0.5, 2.0]


def test_unsupported_features_are_left_out_and_reported(tmp_path: Path) -> None:
    ragged = {
        "sequence": {"feature": tensor("float32", 2), "length": "-1"},
        "pythonClassName": "Sequence",
    }
    box = {"pythonClassName": "BBoxFeature", "boundingBox": {}}
    features = tree(
        steps=steps(
            **USUAL, points=ragged, box=box, fine=tensor("float64", 1), pair=tensor("string", 2)
        )
    )
    values = usual_steps(50, 2) | {
        "steps/points/ragged_flat_values": np.zeros(6),
        "steps/points/ragged_row_lengths_0": np.array([1, 2]),
        "steps/box": np.zeros(8),
        "steps/pair": ["a", "b", "c", "d"],
        "steps/fine": np.array([[0.5], [1.5]]),
    }
    recording = rollout_data.open(write_set(tmp_path, {"train": [[values]]}, features))
    assert (
        "points" not in recording[0]
        and "box" not in recording[0]
        and recording[0]["fine"].dtype == np.float32
    )
    assert ["texts of shape [2]" in str(problem) for problem in recording.problems] == [
        False
    ] * 2 + [True]
    assert [
        "different number of values in each step" in str(problem)
        for problem in recording.problems[:2]
    ] == [True] * 2
    assert ["float32" in str(remark) for remark in recording.advice] == [True]
    assert recording.metadata["lossy"] == ["fine"]


@pytest.mark.parametrize(
    "change",
    [
        {"steps/action": np.zeros(5, "float32")},
        {"steps/reward": np.zeros(3, "int64")},
        {"steps/is_first": np.zeros(0, bool)},
        {"steps/observation/state": ["a", "b", "c"]},
    ],
    ids=["half a step", "another kind", "no steps", "texts"],
)
def test_an_episode_that_contradicts_its_declaration_is_left_out_alone(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    episodes = [usual_steps(50, 3), usual_steps(51, 3) | change, usual_steps(52, 3)]
    recording = rollout_data.open(write_set(tmp_path, {"train": [episodes]}))
    assert [episode.id for episode in recording] == ["train_0", "train_2"] and "Record 1 of" in str(
        recording.problems[0]
    )
    np.testing.assert_array_equal(recording[1].action, action(52, 3))


def test_shards_that_disagree_with_the_index_are_refused_or_rebuilt(tmp_path: Path) -> None:
    shards = {"train": [[usual_steps(50, 3), usual_steps(51, 3)], [usual_steps(52, 3)]]}
    folder = write_set(tmp_path, shards)
    first, second = sorted(folder.glob("*.tfrecord-*"))
    whole, spare = first.read_bytes(), second.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", whole + spare):
        first.write_bytes(content)
        with pytest.raises(CorruptFileError, match="on_bad_index='rebuild'"):
            rollout_data.open(folder)
        recording = rollout_data.open(folder, on_bad_index="rebuild")
        assert recording.problems and len(recording) == len(
            [episode for episode in recording if episode.action is not None]
        )
    second.unlink()
    with pytest.raises(CorruptFileError):
        rollout_data.open(folder)


def test_a_set_with_several_versions_raises(tmp_path: Path) -> None:
    folder = write_set(tmp_path, {"train": [[usual_steps(50, 2)]]})
    write_set(tmp_path / "b", {"train": [[usual_steps(50, 2)]]}).rename(folder.parent / "2.0.0")
    with pytest.raises(DataFileError, match=r"contains 1\.0\.0, 2\.0\.0, expected one version"):
        rollout_data.open(folder.parent)


def test_a_set_without_episodes_is_empty(tmp_path: Path) -> None:
    folder = write_set(tmp_path, {"train": [[]]})
    assert len(rollout_data.open(folder)) == 0
    next(folder.glob("*.tfrecord-*")).unlink()
    assert len(rollout_data.open(folder)) == 0


def test_changed_bytes_raise_when_opened_or_read(tmp_path: Path) -> None:
    folder = write_set(tmp_path, {"train": [[usual_steps(50, 3), usual_steps(51, 2)]]})
    shard = next(folder.glob("*.tfrecord-*"))
    whole, rng = shard.read_bytes(), np.random.default_rng(0)
    for at in rng.integers(0, len(whole), 150):
        shard.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        )
        try:
            recording = rollout_data.open(folder)
            actual = [
                (episode.observation, episode.action, episode.reward) for episode in recording
            ]
        except RolloutDataError as error:
            assert isinstance(error, DataFileError)
        else:
            assert recording.problems and len(actual) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda info: info.update(splits=3),
        lambda info: info["splits"][0].update(shardLengths=["many"]),
        lambda info: info["splits"][0].update(filepathTemplate="../../../etc/passwd"),
        lambda info: info["splits"][0].update(filepathTemplate="/etc/passwd"),
        lambda info: info.update(fileFormat="array_record"),
        lambda info: info["splits"][0].update(shardLengths=["0"] * 100_000),
    ],
)
def test_hostile_descriptions_are_refused(tmp_path: Path, change: Any) -> None:
    folder = write_set(tmp_path, {"train": [[usual_steps(50, 2)]]})
    info = json.loads((folder / "dataset_info.json").read_text())
    change(info)
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(DataFileError):
        rollout_data.open(folder)


def test_a_link_to_another_place_is_refused(tmp_path: Path) -> None:
    folder = write_set(tmp_path, {"train": [[usual_steps(50, 2)]]})
    shard = next(folder.glob("*.tfrecord-*"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFileError):
        rollout_data.open(folder)
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "1.0.0").symlink_to(
        write_set(tmp_path / "b", {"train": [[usual_steps(50, 2)]]})
    )
    with pytest.raises(UnsafeFileError):
        rollout_data.open(tmp_path / "versions")


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 28,), (60_000, 60_000, 3), (-5,), (1,) * 40])
def test_huge_declared_shapes_allocate_no_memory(tmp_path: Path, shape: tuple[int, ...]) -> None:
    bomb = [zlib.compress(bytes(1 << 28))] * 2
    for kind, values in (
        (tensor("uint8", *shape, encoding="zlib"), bomb),
        (pictures("png", *shape), encoded(picture(0, 2), "PNG")),
    ):
        folder = write_set(
            tmp_path / str(len(list(tmp_path.iterdir()))),
            {"train": [[usual_steps(50, 2) | {"steps/bomb": values}]]},
            tree(steps=steps(**USUAL, bomb=kind)),
        )
        with pytest.raises(RolloutDataError):
            rollout_data.open(folder)[0]["bomb"]
