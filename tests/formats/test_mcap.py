"""MCAP recordings: steps of one clock, and the last message of every other topic.

Each loss is reported.
"""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest

import rollout_data
from storage.errors import (
    CorruptFileError,
    DataFileError,
    RolloutDataError,
    UnsafeFileError,
    UsageError,
)
from tests.formats.values import action, state

zstandard = pytest.importorskip("zstandard")
MAGIC = b"\x89MCAP0\r\n"
COMPRESS = {"": bytes, "lz4": lz4.frame.compress, "zstd": zstandard.ZstdCompressor().compress}
ARM, STATE, NOTE = "/arm/command", "/arm/state", "/note"
#: (topic, log time in ms, message)
Message = tuple[str, int, Any]


def record(kind: int, content: bytes) -> bytes:
    return bytes([kind]) + struct.pack("<Q", len(content)) + content


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def channels(topics: Sequence[str], encoding: str, schema: Mapping[str, Any]) -> bytes:
    actual = b""
    for number, topic in enumerate(topics, 1):
        about = json.dumps(schema.get(topic, {})).encode()
        body = (
            struct.pack("<H", number)
            + text(topic)
            + text("jsonschema")
            + struct.pack("<I", len(about))
            + about
        )
        actual += record(3, body)
        actual += record(
            4,
            struct.pack("<HH", number, number)
            + text(topic)
            + text(encoding)
            + struct.pack("<I", 0),
        )
    return actual


def chunk(
    body: bytes, compression: str, checksum: int | None = None, num_bytes: int | None = None
) -> bytes:
    packed = COMPRESS[compression](body)
    crc, size = (
        zlib.crc32(body) if checksum is None else checksum,
        len(body) if num_bytes is None else num_bytes,
    )
    return record(
        6,
        struct.pack("<QQQI", 0, 0, size, crc)
        + text(compression)
        + struct.pack("<Q", len(packed))
        + packed,
    )


def write(
    path: Path,
    messages: Sequence[Message],
    compression: str | None = "",
    metadata: Mapping[str, str] | None = None,
    encoding: str = "json",
    schema: Mapping[str, Any] | None = None,
    per_chunk: int = 4,
) -> Path:
    """Write a file with this number of messages per chunk; None as compression for no chunks."""
    topics = list(dict.fromkeys(topic for topic, _, _ in messages))
    head, parts = channels(topics, encoding, schema or {}), []
    for topic, time_ms, value in messages:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        stamp = time_ms * 1_000_000
        parts.append(
            record(5, struct.pack("<HIQQ", topics.index(topic) + 1, 0, stamp, stamp) + content)
        )
    whole = MAGIC + record(1, text("") + text("test"))
    if compression is None:
        whole += head + b"".join(parts)
    else:
        for start in range(0, max(1, len(parts)), per_chunk):
            body = b"".join(parts[start : start + per_chunk])
            whole += chunk(head + body if not start else body, compression)
    if metadata is not None:
        pairs = b"".join(text(key) + text(value) for key, value in metadata.items())
        whole += record(12, text("episode") + struct.pack("<I", len(pairs)) + pairs)
    path.write_bytes(whole + record(15, bytes(4)) + record(2, bytes(20)) + MAGIC)
    return path


def session(number: int, length: int) -> list[Message]:
    """Create commands each 20 ms and states each 10 ms.

    A state with the time of a command belongs to it.
    """
    actual: list[Message] = [(NOTE, 0, {"text": "pick up the blüe cube"})]
    acts, states = (
        action(number, length).tolist(),
        state(number, 2 * length, dtype="float64").tolist(),
    )
    actual += [(ARM, 20 * row, {"target": item}) for row, item in enumerate(acts)]
    return actual + [
        (STATE, 10 * row, {"position": item, "count": row}) for row, item in enumerate(states)
    ]


def check(episode: Any, number: int, length: int, first: int = 0) -> None:
    assert len(episode) == length - first
    np.testing.assert_array_equal(episode.action, action(number, length)[first:])
    np.testing.assert_array_equal(
        episode.observation["arm/state/position"], state(number, 2 * length)[::2][first:]
    )
    assert (
        episode.observation["/arm/state/position"]
        is episode.observation["arm"]["state"]["position"]
    )
    assert (
        "/arm/state/position" in episode.observation
        and episode.observation.get("arm/nothing") is None
    )
    np.testing.assert_array_equal(episode["log_time"], np.arange(first, length) * 20_000_000)
    assert (episode.reward, episode.terminated, episode.truncated) == (None, None, None)
    assert episode.metadata["end_time_ns"] == 20_000_000 * (length - 1)


@pytest.mark.parametrize("compression", [None, "", "lz4", "zstd"])
def test_steps_hold_the_last_message_of_every_topic_whatever_the_order_in_the_file(
    tmp_path: Path, compression: Any
) -> None:
    messages = session(50, 9)
    np.random.default_rng(0).shuffle(messages)
    path = write(
        tmp_path / "a.mcap",
        messages,
        compression,
        {"operator": "оператор", "success": "True", "task": "cube"},
    )
    episode = rollout_data.open(path, action=ARM)[0]
    check(episode, 50, 9)
    assert (
        episode.metadata["operator"] == "оператор"
        and episode.metadata["note/text"] == "pick up the blüe cube"
    )
    assert (episode.success, episode.task) == (True, "cube")
    np.testing.assert_array_equal(episode.read("action", 3, 5), action(50, 9)[3:5])


def test_a_folder_is_in_the_order_of_the_numbers_in_its_names(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        write(tmp_path / f"run_{number}.mcap", session(number, number))
    recording = pickle.loads(pickle.dumps(rollout_data.open(tmp_path, action=ARM)))
    assert [episode.id for episode in recording] == ["run_2", "run_9", "run_10"]
    for number, episode in zip((2, 9, 10), recording, strict=True):
        check(episode, number, number)


def test_another_clock_makes_other_steps(tmp_path: Path) -> None:
    recording = rollout_data.open(
        write(tmp_path / "a.mcap", session(50, 4)), action=ARM, clock=STATE
    )
    assert len(recording[0]) == 8
    np.testing.assert_array_equal(recording[0].action, action(50, 4).repeat(2, axis=0))
    only = rollout_data.open(tmp_path / "a.mcap", clock=STATE)[0]
    assert only.action is None and sorted(only.observation) == [
        "arm/command/target",
        "arm/state/count",
        "arm/state/position",
    ]


def test_several_topics_of_actions_go_by_their_names(tmp_path: Path) -> None:
    messages = session(50, 4) + [
        ("/grip", 5 * row, {"width": row / 4, "force": [row]}) for row in range(16)
    ]
    episode = rollout_data.open(write(tmp_path / "a.mcap", messages), action=[ARM, "/grip"])[0]
    assert sorted(episode.action) == ["arm/command/target", "grip/force", "grip/width"]
    np.testing.assert_array_equal(episode.action["grip/width"], np.arange(4))
    item = rollout_data.open(tmp_path / "a.mcap", action="/grip", clock=ARM)[0]
    assert sorted(item.action) == ["force", "width"]


def test_steps_before_the_first_message_of_a_topic_are_dropped_and_reported(tmp_path: Path) -> None:
    messages = [item for item in session(50, 9) if item[0] != STATE or item[1] >= 35]
    recording = rollout_data.open(write(tmp_path / "a.mcap", messages), action=ARM)
    check(recording[0], 50, 9, first=2)
    assert "2 messages before" in str(recording.problems[0])
    late = [*session(50, 3), ("/late", 999, {"value": 1})]
    with pytest.raises(CorruptFileError, match="every topic"):
        rollout_data.open(write(tmp_path / "b.mcap", late), action=ARM)


@pytest.mark.parametrize("options", [{}, {"action": "/other"}, {"action": ARM, "clock": "/other"}])
def test_without_a_topic_the_file_s_topics_are_listed(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.mcap", session(50, 6))
    with pytest.raises(
        UsageError,
        match=r"'/arm/command' \(json, 6 messages, 50 Hz\).*'/arm/state' \(json, 12 messages",
    ):
        rollout_data.open(path, **options)


@pytest.mark.parametrize(
    "options", [{"action": 3}, {"action": [ARM, 3]}, {"action": ARM, "clock": [STATE]}]
)
def test_an_invalid_topic_name_raises_a_usage_error(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="names of topics"):
        rollout_data.open(write(tmp_path / "a.mcap", session(50, 3)), **options)


def test_texts_beyond_the_limit_of_metadata_are_reported(tmp_path: Path) -> None:
    texts = [(NOTE, row, {"text": str(row)}) for row in range(5000)]
    recording = rollout_data.open(
        write(tmp_path / "a.mcap", [*session(50, 3)[1:], *texts], per_chunk=999), action=ARM
    )
    assert (
        recording[0].metadata["note/text"][-1] == "4095"
        and len(recording[0].metadata["note/text"]) == 4096
    )
    assert [
        "5000 texts. Only the first 4096" in str(problem) for problem in recording.problems
    ] == [True]


def test_colliding_topics_and_too_large_metadata_are_reported(tmp_path: Path) -> None:
    twice = [("/arm", row, {"state/x": 0, "state": {"position": 1.0}}) for row in range(3)]
    path = write(tmp_path / "a.mcap", [*session(50, 3), *twice], metadata={"long": "x" * (1 << 20)})
    recording = rollout_data.open(path, action=ARM)
    actual = [str(problem) for problem in recording.problems]
    assert any(
        "Topics '/arm' and '/arm/state'" in item and "'observation/arm/state/position'" in item
        for item in actual
    )
    assert any("too much metadata. 1 metadata records are left out" in item for item in actual)
    assert recording[0].observation["arm/state/position"].dtype == np.float64


def test_values_keep_their_dtypes(tmp_path: Path) -> None:
    schema = {
        "/all": {
            "properties": {
                "id": {"type": "integer"},
                "ids": {"type": "array", "items": {"type": "integer"}},
            }
        }
    }
    value = {
        "id": 2**53 + 1,
        "ids": [1, 2],
        "flag": True,
        "grid": [[1, 2.5], [3, 4]],
        "pose": {"x": 1},
        "mode": "go",
    }
    path = write(
        tmp_path / "a.mcap",
        [("/all", row, value | {"odd": [{}], "ragged": [[1], []]}) for row in range(3)],
        schema=schema,
    )
    recording = rollout_data.open(path, clock="/all")
    episode = recording[0]
    actual = {
        name.removeprefix("all/"): item[1]
        for name, item in episode.observation.items()
        if name != "all/mode"
    }
    assert {name: tensor.dtype.name for name, tensor in actual.items()} == {
        "id": "int64", "ids": "int64", "flag": "bool", "grid": "float64", "pose/x": "float64",
    }  # fmt: skip
    assert actual["id"] == 2**53 + 1 and episode["observation/all/mode"] == ["go"] * 3
    np.testing.assert_array_equal(actual["grid"], value["grid"])
    assert "odd, ragged" in str(recording.problems[0])


def test_integers_that_become_other_floats_are_counted_in_the_changes(tmp_path: Path) -> None:
    big = 2**53
    values = [
        {"target": [0.5, big + 2 * row + 1], "grid": [[row, 3 * big + 1], [1.5, 2]], "n": row}
        for row in range(3)
    ]
    path = write(tmp_path / "a.mcap", [(ARM, 20 * row, value) for row, value in enumerate(values)])
    line = "field 'action/target' (integers) is written as float64: 3 values change, by at most 1"
    other = "field 'action/grid' (integers) is written as float64: 3 values change, by at most 1"
    for to, options in (("rollout-data", {}), ("robomimic", {"next_obs": False}), ("rlinf", {})):
        source = rollout_data.open(path, action=ARM)
        done = rollout_data.convert(source, tmp_path / to, to, progress=False, **options)
        assert {change: ids for change, ids in done.changes.items() if "float64" in change} == {
            line: ["a"],
            other: ["a"],
        }
    small = [(ARM, 20 * row, {"target": [0.5, 7], "n": big - row}) for row in range(3)]
    source = rollout_data.open(write(tmp_path / "b.mcap", small), action=ARM)
    assert rollout_data.convert(source, tmp_path / "exact", progress=False).changes == {}


def test_an_integer_that_its_schema_cannot_hold_is_named(tmp_path: Path) -> None:
    schema = {ARM: {"properties": {"n": {"type": "integer"}}}}
    messages = [(ARM, 20 * row, {"n": 2**63 if row == 2 else row}) for row in range(3)]
    episode = rollout_data.open(write(tmp_path / "a.mcap", messages, schema=schema), action=ARM)[0]
    with pytest.raises(CorruptFileError, match="n does not fit into a 64-bit integer"):
        _ = episode.action


@pytest.mark.parametrize(
    "value",
    [{"target": [1.0]}, {"target": "ab"}, {"target": None}, {}, [1], b"{", {"target": [True] * 2}],
)
def test_a_message_of_another_schema_raises_when_it_is_read(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "a.mcap", [*session(50, 3), (ARM, 60, value)])
    episode = rollout_data.open(path, action=ARM)[0]
    np.testing.assert_array_equal(episode.read("action", 0, 3), action(50, 3))
    with pytest.raises(CorruptFileError, match="'/arm/command'"):
        _ = episode.action


def test_messages_of_other_encodings_name_the_package_that_reads_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mcap", session(50, 3), encoding="cdr")
    with pytest.raises(DataFileError, match="mcap-ros2-support"):
        rollout_data.open(path, action=ARM)


@pytest.mark.parametrize("compression", [None, "", "lz4", "zstd"])
def test_a_truncated_file_is_read_to_its_last_complete_message_or_raises(
    tmp_path: Path, compression: Any
) -> None:
    whole = write(tmp_path / "whole.mcap", session(50, 9), compression).read_bytes()
    path, lengths = tmp_path / "a.mcap", set()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        try:
            recording = rollout_data.open(path, format="mcap", action=ARM, clock=ARM)
        except RolloutDataError:
            continue
        lengths.add(len(recording[0]))
        np.testing.assert_array_equal(recording[0].action, action(50, 9)[: len(recording[0])])
        assert any("truncated" in str(problem) for problem in recording.problems)
    assert max(lengths) == 9


@pytest.mark.parametrize("compression", ["", "lz4", "zstd"])
def test_one_damaged_file_is_left_out_alone(tmp_path: Path, compression: str) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.mcap", session(number, 4), compression)
    content = bytearray((tmp_path / "1.mcap").read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / "1.mcap").write_bytes(content)
    recording = rollout_data.open(tmp_path, action=ARM)
    assert [episode.id for episode in recording] == ["0", "2"] and "1.mcap" in str(
        recording.problems[0]
    )
    check(recording[1], 2, 4)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_chunks_that_unpack_to_more_than_they_may_are_refused(
    tmp_path: Path, compression: str
) -> None:
    zeros = record(9, bytes((1 << 24) - 9))
    for content in (
        chunk(zeros, compression, num_bytes=100),
        chunk(zeros, compression, checksum=1),
        chunk(b"", compression, num_bytes=1 << 60),
        chunk(zeros, compression) * 9,
    ):
        path = tmp_path / "a.mcap"
        path.write_bytes(MAGIC + record(1, text("") + text("")) + content + MAGIC)
        with pytest.raises(CorruptFileError):
            rollout_data.open(path, action=ARM)


def test_changed_bytes_raise_library_errors_only(tmp_path: Path) -> None:
    whole, rng = (
        write(tmp_path / "a.mcap", session(50, 4), None).read_bytes(),
        np.random.default_rng(0),
    )
    for at in rng.integers(0, len(whole), 300):
        (tmp_path / "a.mcap").write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        )
        try:
            for episode in rollout_data.open(tmp_path / "a.mcap", format="mcap", action=ARM):
                _ = episode.action, episode.observation
        except RolloutDataError as error:
            assert isinstance(error, (DataFileError, UsageError))


def test_a_link_to_another_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    write(tmp_path / "elsewhere.mcap", session(50, 3))
    (tmp_path / "runs" / "0.mcap").symlink_to(tmp_path / "elsewhere.mcap")
    with pytest.raises(UnsafeFileError):
        rollout_data.open(tmp_path / "runs", format="mcap", action=ARM)
