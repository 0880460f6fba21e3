"""Replay buffers in zarr: rows are right for any chunks and codecs.

No code runs, and no link is followed.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_data
from rollout_data.formats.records.crc32c import crc32c
from rollout_data.tools.cli.command_line import main
from storage.errors import (
    CorruptFileError,
    DataFileError,
    RolloutDataError,
    UnsafeFileError,
    UsageError,
)
from tests.formats.values import action, picture, state

numcodecs = pytest.importorskip("numcodecs")
LENGTHS = (3, 1, 7)
SAMPLES = Path(__file__).parents[1] / "data" / "formats" / "zarr"


def arrays(lengths: tuple[int, ...] = LENGTHS) -> dict[str, np.ndarray]:
    pairs = list(enumerate(lengths, 50))
    return {
        "data/action": np.vstack([action(number, length) for number, length in pairs]),
        "data/state": np.vstack(
            [state(number, length, dtype="float64") for number, length in pairs]
        ),
        "data/img": np.vstack([picture(number, length) for number, length in pairs]),
        "meta/episode_ends": np.cumsum(lengths),
    }


def encoded(data: bytes, codec: dict[str, Any] | None) -> bytes:
    if codec is None:
        return data
    if codec["id"] in ("gzip", "zlib"):
        return gzip.compress(data) if codec["id"] == "gzip" else zlib.compress(data)
    return bytes(numcodecs.get_codec(codec).encode(data))


def chunks_of(values: np.ndarray, shape: tuple[int, ...]) -> Any:
    """Yield the position and the values of each chunk. Chunks at the edges are filled."""
    grid = [range(-(-size // chunk)) for size, chunk in zip(values.shape, shape, strict=True)]
    for place in product(*grid):
        part = values[
            tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, shape, strict=True))
        ]
        yield (
            place,
            np.pad(part, [(0, size - got) for size, got in zip(shape, part.shape, strict=True)]),
        )


def write_2(
    folder: Path,
    found: Mapping[str, np.ndarray],
    compressor: dict[str, Any] | None = None,
    separator: str = ".",
    order: str = "C",
    rows: int = 4,
    skip: tuple[str, ...] = (),
) -> Path:
    """Write a set in format 2, with chunks of this number of rows and half of the other axes."""
    for name, values in found.items():
        shape = (rows, *(-(-size // 2) for size in values.shape[1:]))
        (folder / name).mkdir(parents=True)
        about = {
            "zarr_format": 2,
            "shape": values.shape,
            "chunks": shape,
            "dtype": values.dtype.str,
            "order": order,
        }
        about |= {
            "compressor": compressor,
            "fill_value": 0,
            "filters": None,
            "dimension_separator": separator,
        }
        (folder / name / ".zarray").write_text(json.dumps(about))
        for place, chunk in chunks_of(values, shape):
            path = folder / name / separator.join(map(str, place))
            path.parent.mkdir(parents=True, exist_ok=True)
            if f"{name}/{path.name}" not in skip:
                path.write_bytes(encoded(chunk.tobytes(order), compressor))
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    return folder


def write_3(folder: Path, found: Mapping[str, np.ndarray], at_end: bool = True) -> Path:
    """Write a set in format 3: shards of 2 chunks of 3 rows, each with its checksum."""
    for name, values in found.items():
        inner = (3, *values.shape[1:])
        outer = (6, *values.shape[1:])
        (folder / name / "c").mkdir(parents=True)
        little, checked = (
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        )
        location = {"index_location": "end" if at_end else "start"}
        settings = {
            "chunk_shape": inner,
            "codecs": [little, {"name": "zstd", "configuration": {"level": 1}}, checked],
        }
        shard = {
            "name": "sharding_indexed",
            "configuration": {**settings, "index_codecs": [little, checked], **location},
        }
        about = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": values.shape,
            "data_type": values.dtype.name,
        }
        about |= {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
            "fill_value": 0,
        }
        about |= {
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [shard],
        }
        (folder / name / "zarr.json").write_text(json.dumps(about))
        for place, piece in chunks_of(values, outer):
            index, body = [], b""
            for part in (piece[:3], piece[3:]):
                data = bytes(numcodecs.Zstd(1).encode(part.tobytes())) if part.any() else b""
                data += crc32c(data).to_bytes(4, "little") if data else b""
                index += (
                    [len(body) + (0 if at_end else 36), len(data)] if data else [(1 << 64) - 1] * 2
                )
                body += data
            head = np.array(index, "<u8").tobytes()
            head += crc32c(head).to_bytes(4, "little")
            path = folder / name / "c" / "/".join(map(str, place))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body + head if at_end else head + body)
    (folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    return folder


def check(recording: Any, lengths: tuple[int, ...] = LENGTHS) -> None:
    assert [len(episode) for episode in recording] == list(lengths)
    for number, episode in enumerate(recording, 50):
        length = len(episode)
        np.testing.assert_array_equal(episode.action, action(number, length))
        np.testing.assert_array_equal(
            episode.observation["state"], state(number, length, dtype="float64")
        )
        np.testing.assert_array_equal(episode.observation["img"], picture(number, length))
        np.testing.assert_array_equal(
            episode.read("action", length - 1, length), action(number, length)[-1:]
        )
        assert (episode.reward, episode.terminated, episode.truncated) == (None, None, None)


CODECS = [None] + [
    {"id": "blosc", "cname": name, "clevel": 5, "shuffle": shuffle}
    for name, shuffle in (("lz4", 1), ("zstd", 2), ("blosclz", 0), ("zlib", 1))
]
CODECS += [{"id": name} for name in ("zstd", "lz4", "gzip", "zlib")]


@pytest.mark.parametrize(
    "compressor", CODECS, ids=lambda one: "-".join(map(str, one.values())) if one else "none"
)
@pytest.mark.parametrize("separator", [".", "/"])
def test_zarr_format_2_is_read_completely(
    tmp_path: Path, compressor: dict[str, Any] | None, separator: str
) -> None:
    check(rollout_data.open(write_2(tmp_path / "a.zarr", arrays(), compressor, separator)))


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("order", ["C", "F"])
def test_chunks_of_any_size_and_order_are_read(tmp_path: Path, rows: int, order: str) -> None:
    check(rollout_data.open(write_2(tmp_path / "a.zarr", arrays(), rows=rows, order=order)))


@pytest.mark.parametrize("at_end", [True, False])
def test_zarr_format_3_with_shards_is_read_completely(tmp_path: Path, at_end: bool) -> None:
    check(rollout_data.open(write_3(tmp_path / "a.zarr", arrays(), at_end)))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("write", [write_2, write_3])
def test_a_zip_file_is_read_like_its_folder(tmp_path: Path, write: Any, compression: int) -> None:
    folder = write(tmp_path / "a.zarr", arrays())
    with zipfile.ZipFile(tmp_path / "a.zarr.zip", "w", compression) as archive:
        for path in folder.rglob("*"):
            archive.write(path, path.relative_to(folder))
    check(pickle.loads(pickle.dumps(rollout_data.open(tmp_path / "a.zarr.zip"))))


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(1, 3))]
)
def test_a_flipped_name_in_a_zip_directory_never_returns_other_values(
    tmp_path: Path, first: int
) -> None:
    """Every third character is flipped in turn, starting with number `first`."""
    folder, path = write_2(tmp_path / "a.zarr", arrays()), tmp_path / "a.zarr.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for member in sorted(folder.rglob("*")):
            archive.write(member, member.relative_to(folder))
    whole, start = path.read_bytes(), 0
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
        names = [member.filename.encode() for member in archive.infolist()]
    for name in names:
        place = whole.index(b"PK\x01\x02", whole.index(name, start) - 46) + 46
        for offset in range(first, len(name), 3):
            data = bytearray(whole)
            data[place + offset] ^= 1 << (offset % 7)
            path.write_bytes(data)
            with suppress(RolloutDataError):
                check(rollout_data.open(path))


def packed(folder: Path, path: Path, changed: tuple[str, bytes] = ("", b"")) -> Path:
    """Write the files of a folder to a zip file. One file gets other content."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for piece in sorted(folder.rglob("*")):
            name = piece.relative_to(folder).as_posix()
            if piece.is_file():
                archive.writestr(name, changed[1] if name == changed[0] else piece.read_bytes())
    return path


def test_damaged_zip_files_beside_good_recordings_are_listed_and_the_rest_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, many = write_2(tmp_path / "folder", arrays()), tmp_path / "many"
    many.mkdir()
    whole = packed(folder, many / "good.zarr.zip").read_bytes()
    (many / "cut.zarr.zip").write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(many / "good.zarr.zip") as archive:
        member = archive.getinfo("meta/episode_ends/.zarray")
    checksum = member.CRC.to_bytes(4, "little")
    (many / "checksum.zarr.zip").write_bytes(
        whole.replace(checksum, (member.CRC ^ 1).to_bytes(4, "little"))
    )
    packed(folder, many / "json.zarr.zip", ("data/action/.zarray", b"{no json"))
    packed(folder, many / "list.zarr.zip", ("data/action/.zarray", b"[]"))
    packed(folder, many / "chunk.zarr.zip", ("meta/episode_ends/0", b"\0" * 5))
    (many / "empty.zarr.zip").touch()
    damaged = ["checksum", "chunk", "cut", "empty", "json", "list"]
    for name in damaged:
        with pytest.raises(DataFileError, match=r"zarr|episode_ends|data/action"):
            rollout_data.open(many / f"{name}.zarr.zip")
        assert rollout_data.doctor(many / f"{name}.zarr.zip").findings
    check(rollout_data.open(many / "good.zarr.zip"))
    assert main(["ls", str(many)]) == 1
    listed = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    expected = {f"{name}.zarr.zip": "-" for name in damaged} | {"good.zarr.zip": "zarr"}
    assert {line[0]: line[1] for line in listed} == expected


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_zip_file_raises_library_errors_and_returns_no_other_rows(
    tmp_path: Path, compression: int
) -> None:
    folder = write_2(tmp_path / "folder", arrays(), {"id": "zlib"})
    path = tmp_path / "a.zarr.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for piece in sorted(folder.rglob("*")):
            if piece.is_file():
                archive.write(piece, piece.relative_to(folder))
    whole = path.read_bytes()
    cuts = [whole[: len(whole) * part // 12] for part in range(12)]
    flips = [
        whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]
        for place in range(0, len(whole), 97)
    ]
    refused = []
    for damaged in [*cuts, b"no zip file at all" * 9, *flips]:
        path.write_bytes(damaged)
        try:
            check(rollout_data.open(path))
        except RolloutDataError as error:
            refused.append(str(error))
        except (AssertionError, IndexError):
            pytest.fail("a damaged file gave other rows")
    assert len(refused) >= len(cuts) + len(flips) // 2
    path.write_bytes(b"no zip file at all" * 9)
    with pytest.raises(DataFileError, match=r"a\.zarr\.zip"):
        rollout_data.convert(path, tmp_path / "out", progress=False)
    assert rollout_data.doctor(path).findings


def test_numbers_of_the_other_byte_order_keep_their_width(tmp_path: Path) -> None:
    actual = arrays() | {
        "data/extra": np.arange(11).astype(">i2"),
        "meta/episode_ends": np.cumsum(LENGTHS).astype(">i8"),
    }
    episode = rollout_data.open(write_2(tmp_path / "a.zarr", actual))[2]
    assert episode.observation["extra"].dtype == np.dtype("<i2")
    np.testing.assert_array_equal(episode.observation["extra"], np.arange(4, 11))


def test_a_single_observation_and_rewards_are_found_by_name(tmp_path: Path) -> None:
    actual = {
        "data/obs": state(50, 4),
        "data/reward": np.arange(4.0),
        "meta/episode_ends": np.array([4]),
    }
    episode = rollout_data.open(
        write_2(tmp_path / "a.zarr", actual | {"meta/gain": np.array([2.5])})
    )[0]
    np.testing.assert_array_equal(episode.observation, state(50, 4))
    np.testing.assert_array_equal(episode.reward, np.arange(4.0))
    assert episode.action is None


def test_an_array_with_a_reserved_name_keeps_its_name(tmp_path: Path) -> None:
    actual = {
        "data/action": state(50, 4),
        "data/actions": state(51, 4),
        "meta/episode_ends": np.array([4]),
    }
    episode = rollout_data.open(write_2(tmp_path / "a.zarr", actual))[0]
    np.testing.assert_array_equal(episode.action, state(50, 4))
    np.testing.assert_array_equal(episode.observation["actions"], state(51, 4))


def test_unwritten_chunks_have_the_fill_value(tmp_path: Path) -> None:
    folder = write_2(tmp_path / "a.zarr", arrays(), skip=("data/action/0.0", "data/action/0.1"))
    recording = rollout_data.open(folder)
    assert not recording[0].action.any() and recording[2].action.any()


def test_rows_after_the_last_end_are_dropped_and_reported(tmp_path: Path) -> None:
    actual = arrays()
    actual["meta/episode_ends"] = actual["meta/episode_ends"][:2]
    recording = rollout_data.open(write_2(tmp_path / "a.zarr", actual))
    check(recording, LENGTHS[:2])
    assert "7 rows after the last episode" in str(recording.problems[0])


def test_an_episode_without_rows_is_left_out_alone(tmp_path: Path) -> None:
    actual = arrays() | {"meta/episode_ends": np.array([3, 3, 4, 11])}
    recording = rollout_data.open(write_2(tmp_path / "a.zarr", actual))
    assert [episode.id for episode in recording] == ["0", "2", "3"] and len(recording.problems) == 1


@pytest.mark.parametrize("ends", [[3, 2, 11], [-1, 11], [12], [2.5, 11.0], [[11]]])
def test_invalid_episode_ends_raise(tmp_path: Path, ends: Any) -> None:
    folder = write_2(tmp_path / "a.zarr", arrays() | {"meta/episode_ends": np.array(ends)})
    with pytest.raises(CorruptFileError):
        rollout_data.open(folder)


def test_an_empty_set_has_no_episode(tmp_path: Path) -> None:
    actual = {name: item[:0] for name, item in arrays().items()}
    assert len(rollout_data.open(write_2(tmp_path / "a.zarr", actual))) == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"filters": [{"id": "pickle"}]}, UnsafeFileError),
        ({"dtype": "|O"}, UnsafeFileError),
        ({"compressor": {"id": "pickle"}}, CorruptFileError),
        ({"shape": [1 << 40, 2], "chunks": [1 << 40, 2]}, CorruptFileError),
        ({"shape": [1 << 40, 2]}, CorruptFileError),
        ({"shape": [11, 1 << 40]}, CorruptFileError),
        ({"chunks": [0, 1]}, CorruptFileError),
        ({"shape": [-1, 2]}, CorruptFileError),
        ({"shape": 3}, CorruptFileError),
        ({"dtype": "<c8"}, CorruptFileError),
        ({"dtype": [["a", "<f4"]]}, CorruptFileError),
        ({"fill_value": {}}, CorruptFileError),
    ],
)
def test_hostile_descriptions_are_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    path = write_2(tmp_path / "a.zarr", arrays()) / "data" / "action" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error):
        rollout_data.open(tmp_path / "a.zarr")


@pytest.mark.parametrize(
    "change", [{"dtype": "|O", "filters": [{"id": "vlen-utf8"}]}, {"dtype": "<U9"}, {"shape": []}]
)
def test_texts_and_single_values_are_left_out_by_name(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = (
        write_2(tmp_path / "a.zarr", arrays() | {"meta/task": np.arange(3)})
        / "meta"
        / "task"
        / ".zarray"
    )
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    recording = rollout_data.open(tmp_path / "a.zarr")
    assert ["meta/task" in str(problem) for problem in recording.problems] == [True]
    np.testing.assert_array_equal(recording[2].action, action(52, 7))


def test_pictures_of_jpeg_xl_are_decoded_or_name_the_package_that_they_need(tmp_path: Path) -> None:
    actual = {"data/img": picture(50, 2), "meta/episode_ends": np.array([2])}
    folder = write_2(tmp_path / "a.zarr", actual, rows=1)
    path = folder / "data" / "img" / ".zarray"
    settings = {
        "chunks": [1, 8, 10, 3],
        "compressor": {"id": "imagecodecs_jpegxl", "lossless": True},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    episode = rollout_data.open(folder)[0]
    if importlib.util.find_spec("imagecodecs") is None:
        with pytest.raises(UsageError, match=r"rollout-data\[jpegxl\]"):
            _ = episode.observation
        return
    for row, pixels in enumerate(picture(50, 2)):
        data = importlib.import_module("imagecodecs").jpegxl_encode(pixels, lossless=True)
        (path.parent / f"{row}.0.0.0").write_bytes(data)
    np.testing.assert_array_equal(episode.observation["img"], picture(50, 2))


@pytest.mark.parametrize("where", ["data/action/0.0", "data/action/.zarray"])
def test_a_link_to_another_place_is_refused(tmp_path: Path, where: str) -> None:
    path = write_2(tmp_path / "a.zarr", arrays()) / where
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFileError):
        _ = rollout_data.open(tmp_path / "a.zarr")[0].action


@pytest.mark.parametrize(
    "compressor", [{"id": "zlib"}, {"id": "zstd"}, {"id": "blosc", "cname": "lz4"}, {"id": "lz4"}]
)
def test_a_chunk_that_unpacks_to_more_than_it_may_is_refused(
    tmp_path: Path, compressor: dict[str, Any]
) -> None:
    folder = write_2(tmp_path / "a.zarr", arrays(), compressor)
    (folder / "data" / "action" / "0.0").write_bytes(encoded(bytes(1 << 24), compressor))
    episode = rollout_data.open(folder)[0]
    with pytest.raises(CorruptFileError, match="data/action"):
        _ = episode.action


def test_changed_and_truncated_chunks_raise_library_errors_only(tmp_path: Path) -> None:
    rng, num_refused = np.random.default_rng(0), 0
    folders = [
        shutil.copytree(SAMPLES / name, tmp_path / name)
        for name in ("v2_dir.zarr", "v3_shards.zarr")
    ]
    paths = [
        path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size > 2
    ]
    for number in range(120):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        at = int(rng.integers(len(whole)))
        changed = (
            bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
            if rng.integers(2)
            else b""
        )
        path.write_bytes(whole[:at] + changed)
        try:
            for episode in rollout_data.open(
                folders[path.is_relative_to(folders[1])], format="zarr"
            ):
                _ = episode.action, episode.observation
        except RolloutDataError as error:
            assert isinstance(error, DataFileError)
            num_refused += 1
        path.write_bytes(whole)
    assert num_refused > 50


def test_very_many_arrays_are_refused(tmp_path: Path) -> None:
    folder = write_2(tmp_path / "a.zarr", arrays())
    for number in range(300):
        shutil.copytree(folder / "meta" / "episode_ends", folder / "data" / str(number))
    with pytest.raises(CorruptFileError, match="the limit of 256 arrays"):
        rollout_data.open(folder)


def test_a_set_without_episode_ends_or_data_raises(tmp_path: Path) -> None:
    folder = write_2(tmp_path / "a.zarr", arrays())
    shutil.rmtree(folder / "data")
    with pytest.raises(DataFileError, match="'data'"):
        rollout_data.open(folder)
