"""A file that changed after a recording was opened is never read as the old file, in any format."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollout_data
from storage.errors import DataFileError
from tests.formats.cases import CASES, ROOT, load

_BITS = bytes(range(255, -1, -1))


def rewrite(path: Path) -> None:
    """Invert all bytes of a file in place."""
    content = path.read_bytes().translate(_BITS)
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path)


def replace(path: Path) -> None:
    """Replace a file by another one with the same size and time."""
    state = path.stat()
    other = path.with_name(f"{path.name}.other")
    other.write_bytes(path.read_bytes().translate(_BITS))
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.replace(path)


def read(recording: rollout_data.Recording, number: int, name: str) -> Any:
    """Read a field of an episode, or "final/<name>" of its final observation."""
    episode = recording[number]
    if not name.startswith("final/"):
        return np.array(episode.read(name))
    final = episode.final_observation
    return np.array(final if name == "final/" else final[name.removeprefix("final/")])


def arrays_of(recording: rollout_data.Recording) -> list[dict[str, Any]]:
    """Read all fields of all episodes, the final observations too."""
    result = []
    for number, episode in enumerate(recording):
        final = episode.final_observation
        parts = final if isinstance(final, dict) else {} if final is None else {"": final}
        names = [*episode.schema, *(f"final/{name}" for name in parts)]
        result.append({name: read(recording, number, name) for name in names})
    return result


def check_as_opened(read: Callable[[], Any], expected: Any, path: Path) -> None:
    """Check that a value is that of the opened file, or that an error names the file and
    `refresh()`.
    """
    try:
        value = read()
    except DataFileError as error:
        assert str(path) in str(error)
        assert "refresh()" in str(error)
        return
    torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "change", [rewrite, replace, Path.unlink], ids=["rewritten", "replaced", "removed"]
)
@pytest.mark.parametrize(
    "case", CASES, ids=[case.name.removesuffix(".case.json") for case in CASES]
)
def test_files_that_changed_after_opening_are_refused_by_name(
    tmp_path: Path, case: Path, change: Any
) -> None:
    about = load(case)
    source = ROOT / about["path"]
    path = tmp_path / source.name
    shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
    for beside in source.parent.glob(f"{source.stem}.json"):
        shutil.copy(beside, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = arrays_of(rollout_data.open(path, **about["open"]))
        recording = rollout_data.open(path, **about["open"])
        window = rollout_data.WindowDataset(rollout_data.open(path, **about["open"]))[0]
        windows = rollout_data.WindowDataset(rollout_data.open(path, **about["open"]))
    copy = pickle.dumps(recording)
    for file in [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]:
        change(file)
    for opened in (recording, pickle.loads(copy)):
        for number, arrays in enumerate(expected):
            for name, array in arrays.items():
                check_as_opened(partial(read, opened, number, name), array, path)
    check_as_opened(lambda: windows[0], window, path)
