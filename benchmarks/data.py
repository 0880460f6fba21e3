"""Data of the workloads: created once below out/benchmarks/data, then reused.

Small data are real MuJoCo rollouts. Large data come from a generator: every feature is a Gaussian
AR(1) process over time (coefficient 0.95, mean 0, variance 1). Features and environments are
independent, and values are float32. So frames that follow each other are similar, and nothing
compresses to zero.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm import trange

import rollout_data
from rollout_data import RolloutWriter

from .peers import PeerMissing
from .report import OUT

DATA = OUT / "data"
#: Widths of the frames that locomotion learners record: observation, privileged observation,
#: action.
WIDTHS = {"observation": 235, "privileged_observation": 235, "action": 12}
AR_COEFFICIENT = 0.95
#: Frames per fragment, and per pickle of the trajectory folders.
FRAGMENT = 64

Rollout = dict[str, torch.Tensor]


def row_bytes(rollout: Rollout) -> int:
    """Count the bytes of one frame in the columns of a rollout."""
    return sum(value[0, 0].numel() * value.element_size() for value in rollout.values())


def generated(
    num_steps: int, num_envs: int, widths: dict[str, int] | None = None, seed: int = 0
) -> Rollout:
    """Generate `[T, N, ...]` columns with the process of this module.

    Each environment's trajectory ends with the last step.
    """
    generator = torch.Generator().manual_seed(seed)
    rollout: Rollout = {}
    for name, width in (widths or WIDTHS).items():
        column = torch.randn(num_steps, num_envs, width, generator=generator)
        for step in range(1, num_steps):
            column[step].mul_((1 - AR_COEFFICIENT**2) ** 0.5).add_(
                column[step - 1], alpha=AR_COEFFICIENT
            )
        rollout[name] = column
    rollout["reward"] = torch.randn(num_steps, num_envs, generator=generator)
    rollout["done"] = torch.zeros(num_steps, num_envs, dtype=torch.bool)
    rollout["done"][-1] = True
    return rollout


def mujoco(task: str, num_steps: int, num_envs: int, seed: int = 0) -> Rollout:
    """Record a uniform random policy in a MuJoCo task: float32 observations, and the ends of the
    task.
    """
    try:
        import gymnasium
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        envs = SyncVectorEnv(
            [lambda: gymnasium.make(task)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
        )
    except Exception as error:  # Without MuJoCo the case is left out.
        raise PeerMissing(f"{task}: {type(error).__name__}: {error}") from error
    envs.action_space.seed(seed)
    observation, _ = envs.reset(seed=seed)
    steps: list[dict[str, np.ndarray]] = []
    for _ in trange(num_steps, desc=task, unit=" steps", leave=False):
        action = envs.action_space.sample()
        following, reward, terminated, truncated, _ = envs.step(action)
        steps.append(
            {"observation": observation, "action": action, "reward": reward, "done": terminated | truncated}
        )  # fmt: skip
        observation = following
    envs.close()
    rollout = {name: torch.as_tensor(np.stack([step[name] for step in steps])) for name in steps[0]}
    rollout["done"][-1] = True
    return {
        name: value if value.dtype == torch.bool else value.float()
        for name, value in rollout.items()
    }


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder with a name below `DATA`.

    Call `make(folder)` unless an earlier run has created the same data.
    """
    folder, stamp = DATA / name, DATA / f"{name}.done"
    recipe = _recipe()
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != recipe:
        stamp.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(folder)
        stamp.write_text(recipe, encoding="utf-8")
    return folder


def _recipe() -> str:
    """Return an identifier of the data: it depends on the file format and the code of this
    module.
    """
    library = Path(rollout_data.__file__).parent
    names = ("FORMAT.md", "blocks/block_header.py", "blocks/write_block.py")
    sources = (*(library / name for name in names), Path(__file__))
    return f"{zlib.crc32(b''.join(path.read_bytes() for path in sources)):08x}"


#: Environments of one rollout, and maximum bytes of one file, of a large dataset.
ENVS_PER_ROLLOUT = 1024
BLOCK_BYTES = 1 << 30


def record(folder: Path, rollout: Rollout, steps_per_rollout: int = 0) -> None:
    """Record a rollout with our writer, in files of `ENVS_PER_ROLLOUT` environments and some steps
    (0: all steps).
    """
    num_steps, num_envs = rollout["done"].shape
    num_together = min(num_envs, ENVS_PER_ROLLOUT)
    step = steps_per_rollout or num_steps
    with RolloutWriter(folder, num_together, durable=False, block_bytes=BLOCK_BYTES) as writer:
        for env in range(0, num_envs, num_together):
            for start in range(0, num_steps, step):
                part = {
                    name: value[start : start + step, env : env + num_together]
                    for name, value in rollout.items()
                }
                writer.add_rollout(**part)
                writer.flush()


#: Our column -> the name in the pickles of a trajectory folder.
FOLDER_NAMES = {
    "observation": "observations",
    "privileged_observation": "privileged_observations",
    "action": "actions",
    "reward": "rewards",
    "done": "dones",
}


def record_folders(folder: Path, rollout: Rollout) -> None:
    """Write a rollout of one trajectory per environment as `trajectory_*/traj_<start>_<stop>.pickle`."""
    num_steps, num_envs = rollout["done"].shape
    for env in trange(num_envs, desc="trajectory folders", leave=False):
        trajectory = folder / f"trajectory_{env}"
        trajectory.mkdir(parents=True)
        for start in range(0, num_steps, FRAGMENT):
            stop = min(start + FRAGMENT, num_steps)
            chunk = {
                FOLDER_NAMES[name]: value[start:stop, env].numpy()
                for name, value in rollout.items()
            }
            with open(trajectory / f"traj_{start:06d}_{stop:06d}.pickle", "wb") as file:
                pickle.dump(chunk, file, protocol=pickle.HIGHEST_PROTOCOL)
    text = json.dumps({"total_timesteps": num_steps * num_envs, "total_trajectories": num_envs})
    (folder / "metadata.json").write_text(text, encoding="utf-8")


def num_bytes_of(folder: Path) -> int:
    """Count the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget(folder: Path) -> None:
    """Remove the files below a folder from the page cache, except mapped files."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
