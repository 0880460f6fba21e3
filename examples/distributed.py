"""Training on two ranks that is killed, and resumes with the next batch on two ranks and on one.

`python examples/distributed.py` records a teacher (a fixed random network) and clones it three
times. The first run is not interrupted. The second is killed by `kill -9` at a random step and
resumed on two ranks. The third is killed and resumed on one rank. Each rank reads with two workers.
The hashes of every batch, env by env, are stored, and the sequences of the three runs are compared.
`torchrun --nproc-per-node=2 examples/distributed.py --train` only trains. Started again, it resumes
on any number of ranks that divides `num_envs`. The checkpoint contains everything that the next
step depends on, and nothing of a single rank.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollout_data import RolloutDataset, RolloutWriter, Transition, loader
from storage import AsyncCheckpointSaver, load_checkpoint

FOLDER = Path("demo/distributed")
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Settings:
    """Options of the training. `num_envs` is the number of environments of all ranks."""

    num_steps: int = 400
    steps_per_checkpoint: int = 25
    num_envs: int = 64
    num_transitions_per_env: int = 24
    num_trajectories: int = 400
    num_workers: int = 2
    width: int = 128
    num_inputs: int = 12
    num_actions: int = 4
    learning_rate: float = 1e-3
    seed: int = 0


QUICK = Settings(
    num_steps=40, steps_per_checkpoint=6, num_envs=8, num_transitions_per_env=4, num_trajectories=60, width=16
)  # fmt: skip


def network(settings: Settings) -> nn.Sequential:
    layers = nn.Linear(settings.num_inputs, settings.width), nn.ELU()
    return nn.Sequential(*layers, nn.Linear(settings.width, settings.num_actions))


def record(data: Path, settings: Settings) -> None:
    """Record random walks of 10 to 60 frames with the teacher's actions."""
    generator = torch.Generator().manual_seed(settings.seed)
    torch.manual_seed(settings.seed + 1)
    teacher = network(settings)
    with RolloutWriter(data, num_envs=1, durable=False) as writer:
        for _ in range(settings.num_trajectories):
            length = int(torch.randint(10, 61, (), generator=generator))
            observation = (
                torch.randn(length, 1, settings.num_inputs, generator=generator).cumsum(0) / 4
            )
            with torch.no_grad():
                action = teacher(observation)
            done = torch.zeros(length, 1, dtype=torch.bool)
            done[-1] = True
            writer.add_rollout(
                observation=observation, action=action, reward=torch.zeros(length, 1), done=done
            )


def train(data: Path, run: Path, settings: Settings, dies_at: int = 0) -> None:
    """Run one rank, as started by torchrun: train from the last checkpoint, if there is one, to the
    end.
    """
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    policy = DistributedDataParallel(network(settings))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate)
    dataset = RolloutDataset(
        data, settings.num_envs // num_ranks, dataset_loops=0, random_shuffle_traj_order=True, device="cpu",
        num_transitions_per_env=settings.num_transitions_per_env, seed=settings.seed,
    )  # fmt: skip
    batches, num_made = loader(dataset, settings.num_workers), 0
    # No rank writes a checkpoint before all ranks have begun their first step.
    if (run / CHECKPOINT).exists():
        state = load_checkpoint(run / CHECKPOINT)
        policy.module.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        num_made = state["step"]
    with (
        AsyncCheckpointSaver() as saver,
        open(run / f"rank_{rank}_of_{num_ranks}.jsonl", "a") as notes,
    ):
        for step, batch in enumerate(batches, num_made + 1):
            error = (policy(batch.observation) - batch.action).square().mean(-1)
            loss = error[batch.valid].mean()
            optimizer.zero_grad()
            # DDP averages the gradients of the ranks, whose shares are equally large
            loss.backward()
            optimizer.step()
            notes.write(
                json.dumps({"step": step, "loss": loss.item(), "envs": fingerprints(batch)}) + "\n"
            )
            notes.flush()
            if step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            is_last = step == settings.num_steps
            if rank == 0 and (is_last or step % settings.steps_per_checkpoint == 0):
                state = {"policy": policy.module.state_dict(), "optimizer": optimizer.state_dict()}
                saver.save_async(
                    {**state, "batches": batches.state_dict(), "step": step}, run / CHECKPOINT
                )
            if is_last:
                break
    dist.destroy_process_group()


def fingerprints(batch: Transition) -> list[str]:
    """Hash all bits of a batch, env by env."""
    tensors = [batch.observation, batch.action, batch.valid, batch.is_first, batch.is_last]
    columns = [tensor.transpose(0, 1).contiguous().numpy() for tensor in tensors]
    return [
        hashlib.sha256(b"".join(env.tobytes() for env in envs)).hexdigest()
        for envs in zip(*columns, strict=True)
    ]


def in_ranks(num_ranks: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Start ranks on this machine, as torchrun does, and wait. Return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    fork, ranks = multiprocessing.get_context("fork"), []
    for rank in range(num_ranks):
        os.environ.update({**address, "RANK": str(rank), "WORLD_SIZE": str(num_ranks)})
        ranks.append(fork.Process(target=function, args=arguments))
        ranks[-1].start()
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


def sequence(run: Path) -> list[list[str]]:
    """Return the batches of all ranks, env by env, of the steps that all ranks of a run have taken.

    Steps that were repeated after a kill must have had the same batches.
    """
    steps, is_equal = dict[int, list[str]](), True
    for num_ranks in (1, 2):
        paths = [run / f"rank_{rank}_of_{num_ranks}.jsonl" for rank in range(num_ranks)]
        ranks: list[dict[int, list[str]]] = [{} for _ in paths]
        for path, batches in zip(paths, ranks, strict=True):
            for note in map(json.loads, path.read_text().splitlines() if path.exists() else []):
                is_equal &= batches.setdefault(note["step"], note["envs"]) == note["envs"]
        # A killed rank may have taken one step less than another.
        for step in set(ranks[0]).intersection(*ranks):
            envs = [env for batches in ranks for env in batches[step]]
            is_equal &= steps.setdefault(step, envs) == envs
    assert is_equal
    return [steps[number] for number in range(1, len(steps) + 1)]


def main(settings: Settings) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    shutil.rmtree(FOLDER, ignore_errors=True)
    data, whole, killed, resumed_by_one = (
        FOLDER / name for name in ("data", "whole", "killed", "one")
    )
    record(data, settings)
    whole.mkdir()
    killed.mkdir()
    exit_codes = in_ranks(2, train, data, whole, settings)
    assert exit_codes == [0, 0]
    dies_at = random.randint(settings.steps_per_checkpoint + 1, settings.num_steps - 1)
    exit_codes = in_ranks(2, train, data, killed, settings, dies_at)
    assert -signal.SIGKILL in exit_codes
    shutil.copytree(killed, resumed_by_one)
    saved = load_checkpoint(killed / CHECKPOINT)["step"] if (killed / CHECKPOINT).exists() else 0
    print(f"killed at step {dies_at}; the checkpoint holds step {saved}")
    expected = sequence(whole)
    for run, num_ranks in ((killed, 2), (resumed_by_one, 1)):
        exit_codes = in_ranks(num_ranks, train, data, run, settings)
        assert exit_codes == [0] * num_ranks
        actual, policies = (
            sequence(run),
            [load_checkpoint(path / CHECKPOINT)["policy"] for path in (whole, run)],
        )
        pairs = zip(*(policy.values() for policy in policies), strict=True)
        difference = max((a - b).abs().max().item() for a, b in pairs)
        is_equal = f"equal bit by bit: {actual == expected}"
        print(f"resumed on {num_ranks}: {len(actual)} batches of {len(actual[0])} envs, {is_equal}")
        print(f"  weights differ by {difference:.2g} from those of the run without a kill")


if __name__ == "__main__":
    chosen = QUICK if "--quick" in sys.argv else Settings()
    if "--train" not in sys.argv:
        main(chosen)
    else:
        if int(os.environ["RANK"]) == 0 and not (FOLDER / "data").exists():
            record(FOLDER / "data", chosen)
        (FOLDER / "torchrun").mkdir(parents=True, exist_ok=True)
        train(FOLDER / "data", FOLDER / "torchrun", chosen)
