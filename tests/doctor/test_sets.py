"""The doctor on recordings with one defect, on sound recordings, and on blocks with a flipped bit."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rollout_data import doctor
from rollout_data.blocks.block_header import DATA, FINAL, read_header
from rollout_data.tools.doctor.findings import Diagnosis
from rollout_data.tools.doctor.rule_table import RULES
from rollout_data.tools.edit.pack_folder import check_folder
from tests.doctor.folders import Block, write_own
from tests.doctor.sets import Case, sound_cases, wrong_cases
from tests.doctor.worlds import arm, vectorized, walker
from tests.doctor.wrong_files import flipped

pytestmark = pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
KNOWN = {rule.code for rule in RULES}
#: Seeds of the large set.
SEEDS = (1, 2)


def first_of_each_code() -> list[Case]:
    cases = sorted(wrong_cases(), key=lambda case: (case.code, "own" not in case.name))
    return [
        next(group)
        for code, group in itertools.groupby(cases, lambda case: case.code)
        if code in KNOWN
    ]


def is_named(diagnosis: Diagnosis, code: str, named: set[int] | None) -> bool:
    actual = [finding for finding in diagnosis.findings if finding.code == code]
    return bool(actual) and (named or set()) <= {
        number for item in actual for number in item.trajectories
    }


@pytest.mark.parametrize("case", first_of_each_code(), ids=lambda case: f"{case.code}-{case.name}")
def test_a_defect_is_found_and_its_trajectories_are_named(case: Case, tmp_path: Path) -> None:
    path, named = case.written(tmp_path / "x", 0)
    diagnosis = doctor(path, only=[case.code, "FIL00"])
    assert is_named(diagnosis, case.code, named), diagnosis.findings
    assert all(finding.code == case.code for finding in diagnosis.findings)
    assert not (path.parent / "was_run").exists(), "loading data runs nothing"


SOUND = [
    case
    for case in sound_cases(("own",))
    if case.name.partition("/")[0] not in ("noiseless", "position_targets")
]


@pytest.mark.parametrize(
    "case", [one for one in SOUND if "-v" not in one.name], ids=lambda case: case.name
)
def test_a_sound_folder_is_silent(case: Case, tmp_path: Path) -> None:
    path, _ = case.written(tmp_path / "x", 0)
    assert [finding for finding in doctor(path).findings if finding.severity != "info"] == []


def test_a_flipped_bit_of_any_row_is_named_by_block_trajectory_field_and_frame(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)

    def coded(blocks: list[Block]) -> None:
        for block in blocks:
            block.codecs = {"observation/joint_pos": "shuffle+lz4"}

    few = arm(rng, 8)
    for item in few.episodes:
        item.said = {}
    worlds = {"envs": (vectorized(rng), None), "parts": (arm(rng, 8), None), "coded": (few, coded)}
    for name, (world, edit) in worlds.items():
        path = write_own(tmp_path / name, world, edit)
        for _ in range(6):
            block = path / f"rollout_w_{rng.integers(3):06d}.h5"
            header, data = read_header(block), block.read_bytes()
            table = str(rng.choice([DATA, FINAL], p=[0.8, 0.2]))
            column = str(rng.choice(list(header.locations[table])))
            fragments, layout = header.fragments, header.layouts[table].columns[column]
            number = int(
                rng.choice(
                    np.flatnonzero(fragments["final_row" if table == FINAL else "length"] >= 0)
                )
            )
            start, count = int(fragments["row"][number]), int(fragments["length"][number])
            if table == FINAL:
                start, count = int(fragments["final_row"][number]), 1
            if column in header.chunks[table]:
                low, high = header.chunks[table][column].byte_ranges(
                    np.array([start]), np.array([start + count])
                )
                at, frame = int(rng.integers(low[0], high[0])), None
                fields = {column}
            else:
                row = int(rng.integers(count))
                byte = int(rng.integers(layout.row_bytes))
                at = header.locations[table][column][0] + (start + row) * layout.row_bytes + byte
                fields = {
                    max(
                        (offset, item) for item, offset in layout.offsets.items() if offset <= byte
                    )[1]
                }
                frame = int(fragments["start"][number]) + (row if table == DATA else count * 0)
                frame = (
                    frame
                    if table == DATA
                    else int(fragments["start"][number] + fragments["length"][number])
                )
            flipped(block, at, 1 << int(rng.integers(8)))
            trajectory = int(fragments["trajectory"][number])
            actual = doctor(path, only=["FIL01"]).findings
            assert {item.field for item in actual} == fields and {
                item.trajectories for item in actual
            } == {(trajectory,)}
            assert all(item.evidence["block"] == block.name for item in actual)
            assert frame is None or actual[0].frames[0][1] == frame
            (problem,) = check_folder(path).problems.items()
            assert problem[0] == block.name and all(map(str(problem[1]).__contains__, fields))
            assert f"of trajectory {trajectory}" in str(problem[1])
            block.write_bytes(data)


def test_the_sound_blocks_of_a_damaged_folder_are_examined(tmp_path: Path) -> None:
    world = walker(np.random.default_rng(3))
    world[2].fields["observation"][5, 3] = np.nan
    path = write_own(tmp_path / "own", world)
    for number, name in enumerate(("rollout_w_000001.h5", "metadata.json")):
        (path / name).write_bytes(b"\x89HDF\r\n\x1a\n"[: 8 * number])
    diagnosis = doctor(path)
    codes = {finding.code: finding for finding in diagnosis.findings}
    assert {"FIL03", "FIL06", "VAL01"} <= codes.keys() and "FIL00" not in codes
    assert codes["VAL01"].trajectories == (2,)


@pytest.mark.soak
def test_most_defects_are_found_and_most_sound_recordings_have_no_finding(tmp_path: Path) -> None:
    actual, named, total, alarms, sound = (
        Counter[str](),
        Counter[str](),
        Counter[str](),
        Counter[str](),
        0,
    )
    for seed in SEEDS:
        for number, case in enumerate([*sound_cases(), *wrong_cases()]):
            path, wanted = case.written(tmp_path / f"{seed}_{number}", seed)
            diagnosis = doctor(path)
            assert not any(finding.code == "FIL00" for finding in diagnosis.findings), case.name
            if not case.code:
                sound += 1
                alarms.update(
                    {finding.code for finding in diagnosis.findings if finding.severity != "info"}
                )
            elif case.code in KNOWN:
                total[case.code] += 1
                actual[case.code] += any(
                    finding.code == case.code for finding in diagnosis.findings
                )
                named[case.code] += is_named(diagnosis, case.code, wanted)
    for code in sorted(total):
        print(
            f"{code}: found {actual[code]}, named {named[code]} of {total[code]}; {alarms[code]} alarms"
        )
    print(
        f"{sum(actual.values())} found, {sum(named.values())} named of {sum(total.values())}; {sound} sound"
    )
    assert sum(actual.values()) >= 0.95 * sum(total.values()) and sum(named.values()) >= 0.8 * sum(
        total.values()
    )
    assert all(count < 0.03 * sound for count in alarms.values()), alarms
