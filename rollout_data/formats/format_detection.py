"""Detect the format of a path from its content, without importing a reader.

Each function inspects file names, the first bytes of a file, or the names in an HDF5 file. A
function may raise `OSError` or `RolloutDataError` if the content is damaged. `registry.has_format`
treats such an error as no match. Readers also use the functions that list the files of a path.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from pathlib import Path

from h5py import h5d

from storage.core.durable_files import read_text
from storage.saving.saved_folder import CONFIG_NAME, ROWS, SUFFIX

from ..sources.recordings.natural_order import natural
from ..sources.trajectory_checkpoints.checkpoint_folder import checkpoint_folders, index_path
from .arrays.npz_arrays import array_names, is_zip, member_names
from .hdf5.hdf5_datasets import OpenFile, hdf5_names, matches, numbered
from .input_checks import file_inside, first_bytes, listed, parse_attribute

#: Number of inspected files of a folder. One file is not enough, because it may be damaged.
_MAX_FILES = 3

# A LeRobot dataset is a folder with `meta/info.json`.

LEROBOT_INFO = "meta/info.json"


def is_lerobot(path: Path) -> bool:
    """Return whether a folder is a LeRobot dataset."""
    return (path / LEROBOT_INFO).is_file()


# RLinf writes a checkpoint folder with an index, or a folder of checkpoint folders, one per rank.


def is_rlinf(path: Path) -> bool:
    """Return whether a folder contains an RLinf checkpoint of trajectories."""
    return any(index_path(folder) for folder in checkpoint_folders(path))


# An RLDS dataset is a version folder with two JSON files, or a folder of version folders.

RLDS_INFO = "dataset_info.json"
RLDS_FEATURES = "features.json"


def is_rlds(path: Path) -> bool:
    """Return whether a folder is an RLDS dataset."""
    return bool(rlds_folders(path))


def rlds_folders(path: Path) -> list[Path]:
    """Return the folders with a version of an RLDS dataset: the path itself, or its subfolders."""
    if not path.is_dir():
        return []
    if _is_rlds_version(path):
        return [path]
    return [folder for folder in sorted(path.iterdir()) if _is_rlds_version(folder)]


def _is_rlds_version(folder: Path) -> bool:
    return (folder / RLDS_INFO).is_file() and (folder / RLDS_FEATURES).is_file()


# A replay buffer of diffusion policy is a zarr folder or zip file with the array
# `meta/episode_ends`.

ZARR_ENDS = "meta/episode_ends"
_ZARR_FILES = (f"{ZARR_ENDS}/.zarray", f"{ZARR_ENDS}/zarr.json")


def is_zarr_replay_buffer(path: Path) -> bool:
    """Return whether a folder or zip file is a replay buffer of zarr arrays."""
    if path.is_dir():
        return any((path / name).is_file() for name in _ZARR_FILES)
    if not member_names(path).isdisjoint(_ZARR_FILES):
        return True
    # A damaged or empty zip file is a match, so that the reader raises an error about the damage.
    return path.is_file() and path.name.endswith(".zarr.zip")


# An MCAP recording is a file, or a folder of only MCAP files.

MCAP_MAGIC = b"\x89MCAP0\r\n"


def is_mcap(path: Path) -> bool:
    """Return whether a path is an MCAP file, or a folder of MCAP files."""
    paths = mcap_files(path)
    return bool(paths) and first_bytes(paths[0], len(MCAP_MAGIC)) == MCAP_MAGIC


def mcap_files(path: Path) -> list[Path]:
    """Return the MCAP files of a path: the file itself, or the files of a folder.

    The result is empty if a folder also has other files.
    """
    if not path.is_dir():
        return [path]
    paths = listed(path)
    return paths if all(entry.suffix == ".mcap" for entry in paths) else []


# A Minari dataset has groups `episode_<id>` in an HDF5 file, or folders with Parquet or Arrow
# files.

MINARI_METADATA = "metadata.json"
MINARI_MAIN_FILE = "main_data.hdf5"
MINARI_EPISODE = "episode_"
MINARI_NUM_STEPS = "total_steps"


def is_minari(path: Path) -> bool:
    """Return whether a path is a Minari dataset, or its HDF5 file."""
    if not path.is_dir():
        return matches(path, _has_minari_episodes)
    folder = minari_folder(path)
    if folder is None:
        return False
    return matches(folder / MINARI_MAIN_FILE, _has_minari_episodes) or has_minari_tables(folder)


def minari_folder(path: Path) -> Path | None:
    """Return the data folder of a Minari dataset: `path` or its subfolder `data`.

    The result is None if the path is not a Minari dataset.
    """
    for folder in (path, path / "data"):
        if (folder / MINARI_MAIN_FILE).is_file():
            return folder
        metadata = folder / MINARI_METADATA
        if metadata.is_file() and has_minari_tables(folder):
            return folder if '"total_episodes"' in read_text(metadata) else None
    return None


def has_minari_tables(folder: Path) -> bool:
    """Return whether the episodes in a data folder are subfolders with Parquet or Arrow files."""
    return any(folder.glob("*/part-*"))


def _has_minari_episodes(file: OpenFile) -> bool:
    names = file.numbered("", MINARI_EPISODE)
    return bool(names) and file.attribute(file.open(names[0]), MINARI_NUM_STEPS) is not None


# Files of robomimic, LIBERO and Isaac Lab have groups `data/demo_<i>` in an HDF5 file.

ROBOMIMIC_DATA = "data"
ROBOMIMIC_DEMO = "demo_"


def is_robomimic(path: Path) -> bool:
    """Return whether a path is an HDF5 file of demos (robomimic, LIBERO or Isaac Lab)."""
    return matches(path, _has_demos)


def is_libero(path: Path) -> bool:
    """Return whether a path is an HDF5 file of demos that names a LIBERO task."""
    return matches(path, lambda file: _has_demos(file) and _has_libero_task(file))


def is_isaaclab(path: Path) -> bool:
    """Return whether a path is a file of demos that Isaac Lab wrote."""
    return matches(path, lambda file: _has_demos(file) and _is_of_isaaclab(file))


def _has_demos(file: OpenFile) -> bool:
    return bool(file.numbered(ROBOMIMIC_DATA, ROBOMIMIC_DEMO))


def _has_libero_task(file: OpenFile) -> bool:
    data = file.open(ROBOMIMIC_DATA)
    return any(
        file.attribute(data, name) is not None for name in ("problem_info", "bddl_file_name")
    )


def _is_of_isaaclab(file: OpenFile) -> bool:
    root = file.open("")
    data = file.open(ROBOMIMIC_DATA)
    if (
        file.attribute(root, "format_version") is not None
        or file.attribute(data, "schema_version") is not None
    ):
        return True
    env = parse_attribute(file.attribute(data, "env_args"), "env_args")
    first = file.open(file.numbered(ROBOMIMIC_DATA, ROBOMIMIC_DEMO)[0], data)
    return env.get("type", env.get("env_type")) == 2 and file.open("rewards", first) is None


# ALOHA writes files `episode_<n>.hdf5` with `action` and `observations/qpos`.


def is_aloha(path: Path) -> bool:
    """Return whether a path is an ALOHA episode, or a folder of ALOHA episodes."""
    return any(matches(file, _is_aloha_episode) for file in aloha_files(path)[:_MAX_FILES])


def aloha_files(path: Path) -> list[Path]:
    """Return the episode files of a path: the file itself, or the files of a folder.

    The result is empty if a folder also has HDF5 files with other names.
    """
    if not path.is_dir():
        return [path]
    names = hdf5_names(path)
    episodes = numbered([name.removesuffix(".hdf5") for name in names], "episode_")
    if len(episodes) != len(names):
        return []
    return [file_inside(path, f"{name}.hdf5") for name in episodes]


def _is_aloha_episode(file: OpenFile) -> bool:
    return _are_datasets(file, "action", "observations/qpos")


# ManiSkill writes groups `traj_<i>` in an HDF5 file.

MANISKILL_TRAJECTORY = "traj_"


def is_maniskill(path: Path) -> bool:
    """Return whether a path is a file of ManiSkill trajectories."""
    return matches(path, lambda file: bool(file.numbered("", MANISKILL_TRAJECTORY)))


# HumEnv writes groups `ep_<i>` in an HDF5 file. A path may also be a folder of such files, or a
# text file that lists them.

HUMENV_EPISODE = "ep_"
_HUMENV_LIST = ".txt"
_MAX_LIST_BYTES = 1 << 24


def is_humenv(path: Path) -> bool:
    """Return whether a path is a file of HumEnv episodes, or a folder or a list of such files."""
    files = list(humenv_files(path).values())
    return any(matches(file, _has_humenv_episodes) for file in files[:_MAX_FILES])


def humenv_files(path: Path) -> dict[str, Path]:
    """Map the names of HumEnv files, without extension, to their paths.

    If `path` is a HumEnv file itself, its name is "".

    Raises:
        DataFileError: A listed file is missing, or outside the folder of the list.
    """
    if path.is_dir():
        names = sorted(hdf5_names(path), key=natural)
        return {name.rpartition(".")[0]: file_inside(path, name) for name in names}
    if path.suffix != _HUMENV_LIST:
        return {"": path}
    lines = [line.strip() for line in read_text(path, max_bytes=_MAX_LIST_BYTES).splitlines()]
    return {
        line.rpartition(".")[0] or line: file_inside(path.parent, line) for line in lines if line
    }


def _has_humenv_episodes(file: OpenFile) -> bool:
    return bool(file.numbered("", HUMENV_EPISODE))


# D4RL files have flat datasets in the root group, or in the numbered groups of `virtual`.

_D4RL_CHUNKS = "virtual"


def is_d4rl(path: Path) -> bool:
    """Return whether a path is a file of D4RL steps."""
    return matches(path, _has_d4rl_steps)


def d4rl_groups(file: OpenFile) -> list[str]:
    """Return the HDF5 groups that contain the steps: the root, or the groups `virtual/<number>`."""
    return [f"{_D4RL_CHUNKS}/{name}" for name in file.numbered(_D4RL_CHUNKS, "")] or [""]


def _has_d4rl_steps(file: OpenFile) -> bool:
    return any(
        _are_datasets(file, f"{group}/observations", f"{group}/terminals")
        for group in d4rl_groups(file)
    )


def _are_datasets(file: OpenFile, *names: str) -> bool:
    return all(isinstance(file.open(name), h5d.DatasetID) for name in names)


# BFM-Zero saves a folder with a ring buffer and its configuration.

BFM_ZERO_BUFFER = ROWS + SUFFIX


def is_bfm_zero(path: Path) -> bool:
    """Return whether a folder is a saved buffer of BFM-Zero."""
    if not (path / BFM_ZERO_BUFFER).is_file() or not (path / CONFIG_NAME).is_file():
        return False
    return '"_idx"' in read_text(path / CONFIG_NAME)


# An OGBench dataset is an npz file with the arrays of `OGBENCH_ARRAYS`.

OGBENCH_ARRAYS = frozenset({"observations", "actions", "terminals"})


def is_ogbench(path: Path) -> bool:
    """Return whether a path is an npz file of OGBench."""
    return array_names(path) >= OGBENCH_ARRAYS


# Motion clips are npz files with joint and body arrays, or JSON files with frames.

# Names of the arrays of a clip in two formats. The order of the names is joint positions, joint
# velocities, body positions, rotations, linear velocities and angular velocities.
MOTION_TRACKING = (
    "joint_pos",
    "joint_vel",
    "body_pos_w",
    "body_quat_w",
    "body_lin_vel_w",
    "body_ang_vel_w",
)
MOTION_AMP = (
    "dof_positions",
    "dof_velocities",
    "body_positions",
    "body_rotations",
    "body_linear_velocities",
    "body_angular_velocities",
)
_MOTION_ENDINGS = (".npz", ".txt", ".json")
_MAX_CLIPS = 8
_CLIP_HEAD_BYTES = 4096


def is_motion(path: Path) -> bool:
    """Return whether a path is a motion clip, or a folder with clips."""
    return any(is_clip(clip) for clip in islice(clip_files(path), _MAX_CLIPS))


def clip_files(path: Path) -> list[Path]:
    """Return the files that may be motion clips: the file itself, or files of a folder."""
    return listed(path, _MOTION_ENDINGS) if path.is_dir() else [path]


def is_clip(path: Path) -> bool:
    """Return whether a file is a motion clip in an npz file or a JSON file."""
    if is_zip(path):
        return clip_layout(array_names(path)) is not None
    head = first_bytes(path, _CLIP_HEAD_BYTES)
    return head.lstrip().startswith(b"{") and b'"Frames"' in head


def clip_layout(names: Collection[str]) -> tuple[str, ...] | None:
    """Return the array names of the clip format with arrays in `names`; None if no format fits."""
    if {"joint_pos", "body_pos_w"}.issubset(names):
        return MOTION_TRACKING
    if "dof_positions" in names:
        return MOTION_AMP
    return None
