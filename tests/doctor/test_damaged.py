"""Damaged files of any format: the doctor prints the JSON of the guide, and exits with 0 or 1."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data.tools.cli.command_line import main
from rollout_data.tools.edit.pack_folder import check_folder
from tests.doctor.folders import FORMATS, write
from tests.doctor.worlds import walker

pytestmark = pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
GUIDE = (Path(__file__).parents[2] / "rollout_data" / "DOCTOR.md").read_text(encoding="utf-8")
SCHEMA = json.loads(re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)[0])
#: Name of a type in JSON Schema -> type.
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}


def check(value: Any, schema: dict[str, Any], where: str = "$") -> None:
    """Check a value against the part of JSON Schema that the guide uses."""
    assert schema.keys() <= {
        "type",
        "required",
        "properties",
        "items",
        "enum",
        "minItems",
        "maxItems",
    }
    types = schema.get("type", [])
    kinds = tuple(TYPES[item] for item in ([types] if isinstance(types, str) else types))
    assert not kinds or (isinstance(value, kinds) and not isinstance(value, bool)), where
    assert value in schema.get("enum", [value]), where
    if isinstance(value, list):
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)), where
        for place, item in enumerate(value):
            check(item, schema.get("items", {}), f"{where}[{place}]")
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= value.keys(), where
        for name, part in schema.get("properties", {}).items():
            if name in value:
                check(value[name], part, f"{where}.{name}")


def examined(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the JSON of the command."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["doctor", str(path), "--json"])
    answer = json.loads(out.getvalue())
    check(answer, SCHEMA)
    return code, answer


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> dict[str, Path]:
    """Four short episodes in each format."""
    world, folder = walker(np.random.default_rng(0), 4, 12, 3), tmp_path_factory.mktemp("samples")
    return {form: write(folder / form, world, form) for form in FORMATS}


@settings(max_examples=24, deadline=None)
@given(data=st.data())
def test_truncated_files_and_flipped_bits_are_reported_without_an_exception(
    samples, tmp_path_factory, data
) -> None:
    form = data.draw(st.sampled_from(sorted(samples)))
    source, path = samples[form], tmp_path_factory.mktemp("damaged") / samples[form].name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
    files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    file = data.draw(st.sampled_from(files))
    raw = bytearray(file.read_bytes())
    is_cut = data.draw(st.booleans())
    if is_cut:
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    for _ in range(0 if is_cut else data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    code, answer = examined(path)
    assert "FIL00" not in {item["code"] for item in answer["findings"]}, answer["findings"]
    assert code == int(answer["summary"]["error"] > 0)
    if form == "own":
        assert code == 1 or not set(check_folder(path).problems) - {"metadata.json"}


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_cut_in_half_is_an_error_in_every_format(samples, tmp_path: Path, form: str) -> None:
    source, path = samples[form], tmp_path / samples[form].name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
    files = [
        item for item in path.rglob("*") if item.suffix in (".h5", ".hdf5", ".parquet", ".pickle")
    ] or [path]
    # An index can be rebuilt from the data.
    files = [path for path in files if "meta" not in path.parts]
    file = max(files, key=lambda item: item.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    os.utime(file, (1e9, 1e9))  # no writer is running
    assert examined(path)[0] == 1


def test_a_set_that_opens_without_any_episode_is_an_error(samples, tmp_path: Path) -> None:
    path = Path(shutil.copytree(samples["lerobot"], tmp_path / "set"))
    info = path / "meta/info.json"
    info.write_text(info.read_text().replace(".parquet", "/parquet"))
    code, answer = examined(path)
    assert code == 1 and {item["code"] for item in answer["findings"]} >= {"FIL03"}
    assert answer["summary"]["episodes"] == 0


@pytest.mark.soak
@settings(max_examples=2000, deadline=None, derandomize=False)
@given(data=st.data())
def test_many_truncated_files_and_flipped_bits_are_reported(
    samples, tmp_path_factory, data
) -> None:
    few_examples = test_truncated_files_and_flipped_bits_are_reported_without_an_exception
    few_examples.hypothesis.inner_test(samples, tmp_path_factory, data)
