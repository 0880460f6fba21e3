"""Repair: sound data stay bit-equal, sources unchanged, bytes reproducible, and no finding remains."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import RolloutWriter, doctor, drop, edits_of, repair, tag
from rollout_data.blocks.block_header import read_header
from rollout_data.tools.cli.command_line import main
from rollout_data.tools.edit.pack_folder import check_folder
from rollout_data.tools.edit.repair_actions import EPISODE_REPAIRS
from rollout_data.tools.edit.repair_recording import REPORT_NAME
from storage.errors import DataFileError
from tests.doctor.sets import Case, wrong_cases
from tests.editing.folders import content, files, folder_of, ids

pytestmark = pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
CONTEXT = {"env": "Walk", "policy": "none", "version_of": "1", "frame_rate_hz": 10.0}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A folder of two writers, with a dropped and a tagged trajectory."""
    walk = folder_of(tmp_path_factory.mktemp("sound") / "walk", num=6, metadata=CONTEXT)
    drop(walk, "b:5")
    tag(walk, "a:2", task="push")
    return walk


def walking(path: Path, num: int = 8, change=lambda number, rows: rows) -> Path:
    """Record episodes of a random walk. `change` replaces rows of an episode."""
    rng = np.random.default_rng(0)
    with RolloutWriter(path, 1, durable=False, writer_name="arm", metadata=CONTEXT) as writer:
        for number in range(num):
            length = 40
            quaternion = np.cumsum(rng.normal(size=(length, 4)) * 0.02, 0) + [1, 0.1, 0.2, 0.1]
            rows = {
                "observation": {
                    "pose": np.cumsum(rng.normal(size=(length, 3)), 0).astype(np.float32),
                    "quat": (quaternion / np.linalg.norm(quaternion, axis=1, keepdims=True)).astype(
                        np.float32
                    ),
                },
                "action": rng.normal(size=(length, 2)).astype(np.float32),
                "reward": rng.random(length).astype(np.float32),
            }
            rows = change(number, rows)
            final = {name: item[-1:] + 0 for name, item in rows["observation"].items()}
            in_env = {name: item[:, None] for name, item in rows["observation"].items()}
            action, reward = rows["action"][:, None], rows["reward"][:, None]
            ends = np.arange(len(reward))[:, None] == len(reward) - 1
            others = {
                name: rows[name][:, None]
                for name in rows
                if name not in ("observation", "action", "reward")
            }
            writer.add_rollout(
                observation=in_env,
                action=action,
                reward=reward,
                terminated=ends,
                final_observation=final,
                **others,
            )
    return path


@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_a_flipped_byte_costs_only_its_trajectory(sound: Path, tmp_path_factory, data) -> None:
    folder = tmp_path_factory.mktemp("damage")
    shutil.copytree(sound, folder / "walk")
    path = data.draw(st.sampled_from(sorted((folder / "walk").glob("*.h5"))))
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    before, whole = files(folder / "walk"), content(sound)
    problems = check_folder(folder / "walk").problems
    done = repair(folder / "walk", folder / "new")
    assert not done.problems and not done.remaining
    assert not check_folder(folder / "new").problems
    assert not [
        finding
        for finding in doctor(folder / "new").at_least("warning")
        if finding.code[:3] in ("FIL", "STR")
    ]
    assert files(folder / "walk") == before, "the source is not touched, nor are its times"
    left = content(folder / "new")
    header = read_header(sound / path.name)
    hit = {f"{header.writer}:{number}" for number in header.fragments["trajectory"]}
    is_edit = "_1000000" in path.name
    if not is_edit:
        assert left == {item: episode for item, episode in whole.items() if item in left}, (
            "what is left is bit-equal"
        )
        assert whole.keys() - left.keys() <= hit and (problems or left == whole)
    repair(folder / "walk", folder / "again", progress=False)
    assert {name: item for name, (item, _) in files(folder / "new").items()} == {
        name: item for name, (item, _) in files(folder / "again").items()
    }


def test_sound_blocks_are_hard_links_and_the_report_is_complete(
    sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / "walk")
    path = sorted((tmp_path / "walk").glob("rollout_a_0*.h5"))[2]
    header = read_header(path)
    number = int(header.fragments["trajectory"][0])
    raw = bytearray(path.read_bytes())
    raw[header.locations["data"][next(iter(header.locations["data"]))][0] + 1] ^= 1
    path.write_bytes(raw)
    done = repair(tmp_path / "walk", tmp_path / "new")
    blocks = (tmp_path / "new").glob("rollout_?_0*.h5")
    linked = [block.name for block in blocks if block.samefile(tmp_path / "walk" / block.name)]
    assert (
        len(linked) == len(list((tmp_path / "walk").glob("rollout_?_0*.h5"))) - 1
        and path.name not in linked
    )
    assert (
        ids(tmp_path / "new") == ids(sound) - {f"a:{number}"}
        and f"a:{number}" in edits_of(tmp_path / "new")["dropped"]
    )
    assert rollout_data.open(tmp_path / "new").select("a:2")[0].task == "push" and "b:5" not in ids(
        tmp_path / "new"
    )
    report = json.loads((tmp_path / "new" / REPORT_NAME).read_text())
    (action,) = [item for item in report["actions"] if item["kind"] == "K"]
    assert (
        action["code"] == "FIL01"
        and action["trajectories"] == [f"a:{number}"]
        and report["source"]["checksum"]
    )
    assert "FIL01" in [action.finding.code for action in done.actions]


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def _damaged_reward(path: Path) -> str:
    """Damage a reward in a folder of `walking`. Return the id of its trajectory."""
    block = next(path.glob("rollout_arm_*.h5"))
    header = read_header(block)
    layout, (offset, _) = (
        header.layouts["data"].columns["frames"],
        header.locations["data"]["frames"],
    )
    _flip(block, offset + 50 * layout.row_bytes + layout.offsets["reward"] + 3)
    return "arm:1"


def test_damaged_rows_never_get_a_right_checksum(tmp_path: Path) -> None:
    damaged = _damaged_reward(walking(tmp_path / "walk"))
    actual = {finding.code for finding in doctor(tmp_path / "walk").findings}
    assert {"FIL01", "STA01"} <= actual, (
        "the sum of the rewards disagrees, too, and would be mended"
    )
    done = repair(tmp_path / "walk", tmp_path / "new", only=["FIL", "STA"])
    assert (
        ids(tmp_path / "new") == ids(tmp_path / "walk") - {damaged}
        and not done.remaining
        and not done.problems
    )
    reports = {
        item["code"]: item
        for item in json.loads((tmp_path / "new" / REPORT_NAME).read_text())["actions"]
    }
    assert reports["FIL01"]["trajectories"] == [damaged] and reports["STA01"]["kind"] == "-"
    with pytest.raises(
        DataFileError,
        match=r"'rollout_arm_000000.h5' in .* is damaged\. Repair the rules FIL and STR too",
    ):
        repair(tmp_path / "walk", tmp_path / "other", only=["STA01"])
    walking(tmp_path / "sound")
    assert not (tmp_path / "other").exists()
    both = rollout_data.merge([tmp_path / "sound", tmp_path / "walk"], tmp_path / "both")
    assert [
        "reward" in str(problem) and "expected checksum" in str(problem)
        for problem in both.problems
    ] == [True]
    num_sound = len(ids(tmp_path / "sound"))
    assert (
        both.num_trajectories
        == len(ids(tmp_path / "both"))
        == num_sound + len(ids(tmp_path / "walk")) - 1
    )
    assert not rollout_data.doctor(tmp_path / "both", only=["FIL01"]).findings


@pytest.mark.parametrize(("place", "has_cache"), [(1, False), (-1, True)])
def test_trajectories_of_a_block_without_header_are_named_by_the_cache_or_other_blocks(
    sound: Path, tmp_path: Path, capsys, place: int, has_cache: bool
) -> None:
    shutil.copytree(sound, tmp_path / "walk")
    path = sorted((tmp_path / "walk").glob("rollout_a_0*.h5"))[place]
    lost = {f"a:{number}" for number in read_header(path).fragments["trajectory"].tolist()}
    _flip(path, 0)
    if not has_cache:
        (tmp_path / "walk/.index.npz").unlink()
    assert check_folder(tmp_path / "walk").lost == {path.name: sorted(lost)}
    assert (
        main(["verify", str(tmp_path / "walk")]) == 1
        and "with frames of a:" in capsys.readouterr().out
    )
    repair(tmp_path / "walk", tmp_path / "new", only=["FIL"])
    (action,) = json.loads((tmp_path / "new" / REPORT_NAME).read_text())["actions"]
    assert set(action["trajectories"]) == lost == ids(sound) - ids(tmp_path / "new")


def test_a_damaged_header_costs_no_sound_trajectory(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "walk")
    path = sorted((tmp_path / "walk").glob("rollout_a_0*.h5"))[-1]
    header, raw = read_header(path), path.read_bytes()
    numbers = header.fragments["trajectory"].tolist()
    others = {int(item[2:]) for item in ids(sound) if item[0] == "a"} - {*numbers}
    wrong = next(item for item in sorted(others) if (item ^ numbers[0]).bit_count() == 1)
    at = raw.index(header.fragments.tobytes())
    path.write_bytes(raw[:at] + bytes([wrong]) + raw[at + 1 :])
    (finding,) = doctor(tmp_path / "walk", only=["FIL"]).findings
    assert finding.code == "FIL02" and wrong in finding.trajectories, "as its table says now"
    repair(tmp_path / "walk", tmp_path / "new", only=["FIL"])
    assert ids(tmp_path / "new") == ids(sound) - {f"a:{number}" for number in numbers}


def test_a_copy_of_a_block_under_another_name_leaves_no_gap(tmp_path: Path) -> None:
    walking(tmp_path / "walk")
    shutil.copy(next((tmp_path / "walk").glob("*.h5")), tmp_path / "walk/rollout_arm_000007.h5")
    done = repair(tmp_path / "walk", tmp_path / "new", only=["STR", "FIL", "STA"])
    assert (
        not done.remaining
        and not done.problems
        and content(tmp_path / "new") == content(tmp_path / "walk")
    )
    assert not [
        finding.code
        for finding in doctor(tmp_path / "new").findings
        if finding.code.startswith("STR")
    ]


def test_final_observations_of_wrong_successors_cost_no_row(tmp_path: Path) -> None:
    case = next(case for case in wrong_cases() if case.name == "next_observations_current")
    path, _ = case.written(tmp_path / "wrong", 0)
    done = repair(path, tmp_path / "new")
    assert {action.finding.code for action in done.actions} >= {
        "END07",
        "END09",
    } and not done.remaining
    assert [len(episode) for episode in rollout_data.open(done.path)] == [
        len(episode) for episode in rollout_data.open(path)
    ]


def test_changes_of_a_new_folder_never_reach_the_source(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "walk")
    before = files(tmp_path / "walk")
    repair(tmp_path / "walk", tmp_path / "new")
    drop(tmp_path / "new", "a:3")
    rollout_data.prune(tmp_path / "new", trajectories=4)
    main(["verify", str(tmp_path / "new"), "--repair"])
    main(["pack", str(tmp_path / "new"), "--in-place"])
    shutil.rmtree(tmp_path / "new")
    assert files(tmp_path / "walk") == before


def _nan(number: int, rows: dict) -> dict:
    if number == 3:
        rows["observation"]["pose"][7, 1] = np.nan
    return rows


def _scaled(number: int, rows: dict) -> dict:
    if number in (2, 5):
        rows["observation"]["pose"] = rows["observation"]["pose"] * np.float32(1000)
    return rows


def _won_early(number: int, rows: dict) -> dict:
    wins = np.arange(40) >= 39
    if 2 <= number <= 5:
        wins[10:] = True
    return rows | {"success": wins}


@pytest.mark.parametrize(
    ("code", "change", "lengths"),
    [("VAL01", _nan, [40] * 7), ("LRN06", _won_early, [16] * 4 + [40] * 4)],
)
def test_a_repaired_defect_has_no_finding_and_other_data_are_bit_equal(
    tmp_path: Path, code, change, lengths
) -> None:
    walking(tmp_path / "walk", change=change)
    before, old = files(tmp_path / "walk"), content(tmp_path / "walk")
    finding = next(
        finding for finding in doctor(tmp_path / "walk").findings if finding.code == code
    )
    plan = repair(tmp_path / "walk", tmp_path / "new", only=[code], dry_run=True)
    assert not (tmp_path / "new").exists() and all(action.kind != "-" for action in plan.actions)
    done = repair(tmp_path / "walk", tmp_path / "new", only=[code])
    assert (
        not done.remaining
        and not done.problems
        and code not in [finding.code for finding in doctor(done.path).findings]
    )
    new = content(tmp_path / "new")
    assert sorted(rollout_data.open(done.path).column("length").tolist()) == lengths
    touched = {rollout_data.open(tmp_path / "walk").ids[place] for place in finding.trajectories}
    assert {name: episode for name, episode in new.items() if not name.startswith("mended")} == {
        name: episode for name, episode in old.items() if name not in touched
    }
    again = repair(tmp_path / "walk", tmp_path / "again", only=[code])
    assert {k: v for k, (v, _) in files(done.path).items()} == {
        k: v for k, (v, _) in files(again.path).items()
    }
    assert files(tmp_path / "walk") == before


def test_a_repaired_folder_can_be_repaired(tmp_path: Path) -> None:
    def change(number: int, rows: dict) -> dict:
        return _won_early(number, rows) | {"log.done": np.arange(40) == 9}

    walking(tmp_path / "walk", change=change)
    once = repair(tmp_path / "walk", tmp_path / "once", only=["LRN06"])
    twice = repair(once.path, tmp_path / "twice", only=["END02"])
    assert not twice.remaining and not twice.problems
    assert (
        sorted(rollout_data.open(twice.path).column("length").tolist())
        == [6] * 4 + [10] * 8 + [30] * 4
    )
    assert {name.partition(":")[0] for name in ids(twice.path)} == {"mended-2"}


def cases_of_repaired_episodes() -> list[Case]:
    """Return one case of each rule whose repair writes parts of episodes."""
    first: dict[str, Case] = {}
    for case in wrong_cases():
        if case.code in EPISODE_REPAIRS and case.code[:3] in ("END", "TIM", "LRN"):
            first.setdefault(case.code, case)
    return list(first.values())


@pytest.mark.parametrize("case", cases_of_repaired_episodes(), ids=lambda case: case.code)
def test_repaired_episodes_are_consecutive_rows_of_the_source(tmp_path: Path, case: Case) -> None:
    path, _ = case.written(tmp_path / "wrong", 0)
    done = repair(path, tmp_path / "new", only=[case.code])
    assert not done.remaining and not done.problems
    source = {episode.id: episode for episode in rollout_data.open(path)}
    for episode in rollout_data.open(done.path):
        name = episode.metadata.get("id", episode.id).partition("/")[0]
        rows = np.asarray(source[name].read("action"))
        starts = range(len(rows) - len(episode) + 1)
        start = next(
            row for row in starts if np.array_equal(rows[row : row + len(episode)], episode.action)
        )
        for field in episode.schema:
            kept = source[name].read(field, start, start + len(episode))
            assert np.array_equal(episode.read(field), kept), field


def test_a_finding_about_measured_values_is_advice_with_a_script(tmp_path: Path) -> None:
    walking(tmp_path / "walk", change=_scaled)
    (action,) = repair(tmp_path / "walk", tmp_path / "new", only=["VAL10"]).actions
    assert (action.kind, action.trajectories) == ("-", ())
    assert (
        action.says == f"nothing: {action.finding.advice}"
        and "RolloutWriter" in action.finding.script
    )
    assert content(tmp_path / "new") == content(tmp_path / "walk")


def test_a_selection_keeps_the_repaired_episodes(tmp_path: Path) -> None:
    walking(tmp_path / "walk", change=_won_early)
    chosen = rollout_data.open(tmp_path / "walk").select(
        [f"arm:{number}" for number in range(1, 7)]
    )
    done = repair(chosen, tmp_path / "new", only=["LRN06"])
    assert sorted(rollout_data.open(done.path).column("length").tolist()) == [16] * 4 + [40] * 2


def test_other_formats_become_folders_of_blocks_with_the_same_bytes_each_time(
    tmp_path: Path,
) -> None:
    walking(tmp_path / "walk", change=_nan)
    rollout_data.convert(tmp_path / "walk", tmp_path / "set.hdf5", "robomimic", progress=False)
    before = (tmp_path / "set.hdf5").read_bytes(), os.stat(tmp_path / "set.hdf5").st_mtime_ns
    done = repair(tmp_path / "set.hdf5", tmp_path / "new", only=["VAL"])
    again = repair(tmp_path / "set.hdf5", tmp_path / "again", only=["VAL"])
    assert done.num_trajectories == 7 and not done.remaining and not done.problems
    assert {k: v for k, (v, _) in files(done.path).items()} == {
        k: v for k, (v, _) in files(again.path).items()
    }
    assert (tmp_path / "set.hdf5").read_bytes(), (
        os.stat(tmp_path / "set.hdf5").st_mtime_ns == before
    )
    old = {episode.id: episode for episode in rollout_data.open(tmp_path / "set.hdf5")}
    for item in rollout_data.open(done.path):
        source = old[item.metadata["id"]]
        assert all(
            np.array_equal(item.read(name), source.read(name))
            for name in ("action", "observation/pose")
        )


@pytest.mark.parametrize(
    "name", ["shared_rows", "ranges_share_rows", "missing_block", "end_inside_lerobot"]
)
def test_a_repaired_description_has_no_finding(tmp_path: Path, name: str) -> None:
    case = next(case for case in wrong_cases() if case.name == name)
    path, named = case.written(tmp_path / "wrong", 0)
    whole = set(
        rollout_data.open(path, **({} if path.name == "own" else {"on_bad_index": "rebuild"})).ids
    )
    done = repair(path, tmp_path / "new", only=[case.code])
    assert (
        not done.remaining
        and not done.problems
        and not doctor(done.path, only=[case.code]).findings
    )
    left = {episode.metadata.get("id", episode.id) for episode in rollout_data.open(done.path)}
    dropped = {int(item.rpartition(":")[2]) for item in whole - left}
    assert left < whole if name == "missing_block" else dropped == named, (
        "left out, or divided under other names"
    )


@pytest.mark.soak
def test_no_repaired_defect_has_a_finding(tmp_path: Path) -> None:
    left, refused = [], []
    for number, case in enumerate(wrong_cases()):
        path, _ = case.written(tmp_path / str(number) / "wrong", 0)
        try:
            done = repair(path, tmp_path / str(number) / "new", only=[case.code])
        except DataFileError:  # no episode can be opened
            refused.append(case.name)
        else:
            left += [case.name] if done.remaining or done.problems else []
        shutil.rmtree(tmp_path / str(number))
    assert left == [] and refused == ["cut_file_robomimic", "metadata_of_others_minari"]


def test_trajectories_that_opening_leaves_out_are_named_apart_from_places(tmp_path: Path) -> None:
    case = next(case for case in wrong_cases() if case.name == "missing_block")
    path, named = case.written(tmp_path / "wrong", 0)
    (finding,), there = doctor(path, only=["STR01"]).findings, rollout_data.open(path).ids
    assert {*finding.left_out, *(there[place] for place in finding.places)} == {
        f"w:{number}" for number in named
    }
    assert (
        set(finding.trajectories) == named
        and finding.left_out
        and not {*finding.left_out} & {*there}
    )


def test_the_command_plans_repairs_and_lists_the_remaining_findings(tmp_path: Path, capsys) -> None:
    walking(tmp_path / "walk", change=_won_early)
    call = ["repair", str(tmp_path / "walk"), "--to", str(tmp_path / "new"), "--only", "LRN06"]
    assert main([*call, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        "cut 5 frames after success" in out
        and "nothing was written" in out
        and not (tmp_path / "new").exists()
    )
    assert main([*call, "--json"]) == 0
    (action,) = json.loads(capsys.readouterr().out)["actions"]
    assert action["kind"] == "N" and action["trajectories"] == ["arm:2", "arm:3", "arm:4", "arm:5"]
    walking(tmp_path / "bad", num=1, change=lambda number, rows: _nan(3, rows))
    with (
        warnings.catch_warnings(),
        pytest.raises(DataFileError, match="keeps no trajectory after the repair"),
    ):
        repair(tmp_path / "bad", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_secrets_in_metadata_are_masked_on_request(tmp_path: Path) -> None:
    walking(tmp_path / "walk")
    about = json.loads((tmp_path / "walk/metadata.json").read_text())
    token, mail, home = (
        "hf_" + "a1" * 12,
        "jo.doe@lab.example",
        "/".join(["", "home", "jo", "data"]),
    )
    about |= {"note": f"ask {mail}", "runs": [{"api_key": "0123456789ab"}, token], "folder": home}
    (tmp_path / "walk/metadata.json").write_text(json.dumps(about))
    before = files(tmp_path / "walk")
    done = repair(tmp_path / "walk", tmp_path / "new", only=["PRV02"])
    assert files(tmp_path / "walk") == before
    actual = json.loads((done.path / "metadata.json").read_text())
    assert (actual["note"], actual["runs"], actual["folder"]) == (
        "ask ***",
        [{"api_key": "***"}, "***"],
        "***/data",
    )
    texts = (
        json.dumps(doctor(done.path, only=["PRV"]).as_dict())
        + (done.path / "repair.json").read_text()
    )
    assert "PRV02" not in {finding.code for finding in doctor(done.path).findings}
    assert not any(secret in texts for secret in (token, mail, home, "0123456789ab"))
