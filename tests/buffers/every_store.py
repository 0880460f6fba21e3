"""A small store of every class that can be saved, and code that runs on them in another process."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from storage import (
    ActionLabelRollout,
    AdvancedReplayBuffer,
    BufferManager,
    DictBuffer,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    PrioritizedWindows,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
    load_buffer,
    load_store,
)
from tests.storage.rollouts import make_storage, make_transition

ROOT = Path(__file__).parents[2]


def rollout(kind: Any = RolloutStorage, num_envs: int = 2) -> Any:
    storage = make_storage(num_envs, 2, kind)
    item = make_transition(0, num_envs)
    if kind is ActionLabelRollout:
        item.action_labels = torch.zeros(num_envs, 2)
    if kind is SarsaRolloutStorage:
        item.next_observations, item.next_critic_observations = (
            item.observations + 1,
            item.critic_observations + 1,
        )
    storage.add_transitions(item)
    return storage


def ring(value: float = 1.0, num_rows: int = 3) -> DictBuffer:
    buffer = DictBuffer(capacity=4, end_key="done", generator=0)
    ends = torch.zeros(num_rows, 1, dtype=torch.bool)
    ends[1] = True
    data = {"o": torch.full((num_rows, 2), value), "done": ends}
    buffer.extend(data, final={"o": torch.full((num_rows, 2), value + 100)})
    return buffer


def laned() -> TrajectoryDictBufferMultiDim:
    buffer = TrajectoryDictBufferMultiDim(capacity=3, n_dim=2, seq_length=1, generator=0)
    buffer.extend(
        {"observation": torch.ones(2, 2, 1), "done": torch.zeros(2, 2, 1, dtype=torch.bool)}
    )
    return buffer


def expert() -> TrajectoryDictBuffer:
    return TrajectoryDictBuffer([{"observation": torch.ones(3, 1)}] * 2, "cpu", 2, generator=0)


def latent() -> ZBuffer:
    buffer = ZBuffer(3, 2, generator=0)
    buffer.add(torch.ones(2, 2))
    return buffer


def pairs() -> ReplayBuffer:
    buffer = ReplayBuffer(3, 4, generator=0)
    buffer.insert(torch.ones(2, 3), torch.zeros(2, 3))
    return buffer


def items(kind: Any) -> Any:
    item = {"x": torch.ones(2), "name": "a"}
    buffer = kind(4, generator=0)
    buffer.append([item, item] if kind is EpisodeReplayBuffer else item)
    return buffer


def windows() -> PrioritizedWindows:
    made = PrioritizedWindows(capacity=8, seq_length=2, generator=0)
    made.extend({"x": torch.ones(3, 2, 1), "done": torch.zeros(3, 2, 1, dtype=torch.bool)})
    return made


def manager() -> BufferManager:
    made = BufferManager(
        {"buffer_name": ["a"], "a": {"replay_buffer_size": 4, "generator": 0}}, generator=0
    )
    made.push([{"x": torch.ones(2)}])
    return made


MAKERS: dict[str, Callable[[], Any]] = {
    "rollout": rollout,
    "queue": lambda: rollout(QueueRolloutStorage),
    "labels": lambda: rollout(ActionLabelRollout),
    "sarsa": lambda: rollout(SarsaRolloutStorage),
    "replay": pairs,
    "naive": lambda: items(NaiveReplayBuffer),
    "advanced": lambda: items(AdvancedReplayBuffer),
    "episodes": lambda: items(EpisodeReplayBuffer),
    "windows": windows,
    "manager": manager,
    "dict": ring,
    "laned": laned,
    "expert": expert,
    "z": latent,
}
#: Names that code in the child process may use.
CHILD_MODULES = ("every_store", "test_safe_saving", "test_safe_motions")
BUFFERS = ("dict", "laned", "expert", "z")


def load(folder: Path) -> Any:
    return load_store(folder) if (folder / "columns.hdf5").exists() else load_buffer(folder)


def columns_of(folder: Path) -> Path:
    return next(
        folder / name for name in ("buffer.hdf5", "columns.hdf5") if (folder / name).exists()
    )


def plain(tree: Any) -> Any:
    """Convert a state to values that can be compared."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tree.tolist()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def in_child(code: str, *arguments: object, timeout_s: float = 300) -> str:
    """Run code of this file in another process, which may crash or hang. Return its output."""
    modules = ("storage.errors", *(f"tests.buffers.{name}" for name in CHILD_MODULES))
    script = "\n".join(["import sys", *(f"from {module} import *" for module in modules), code])
    context = multiprocessing.get_context("forkserver")
    # It takes seconds.
    context.set_forkserver_preload(["torch", "h5py", "pytest", "storage", "rollout_data"])
    with tempfile.NamedTemporaryFile("r") as out:
        # The child imports this file under this name; pytest uses another name.
        target = importlib.import_module("tests.buffers.every_store").run_script
        child = context.Process(
            target=target, args=(script, [str(argument) for argument in arguments], out.name)
        )
        child.start()
        child.join(timeout_s)
        is_late = child.is_alive()
        child.kill()
        child.join()
        text = out.read()
    assert not is_late and child.exitcode == 0, f"exit status {child.exitcode}: {text[-2000:]}"
    return text


def run_script(script: str, arguments: list[str], out: str) -> None:
    """Run the code in the child process."""
    sys.argv = ["-c", *arguments]
    warnings.simplefilter("ignore")
    with open(out, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            exec(script, {})
        except BaseException:
            traceback.print_exc()
            raise
