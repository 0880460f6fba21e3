"""Training with Ray Train: two workers, each a rank, stop and resume with the next batch.

`python examples/ray_train.py` needs `pip install rollout-data[ray]`. It records a teacher (a fixed
random network), trains for half a pass, and resumes from the reported checkpoint to the end of the
pass. The training function is the same as with torchrun. Ray Train creates the process group before
it calls the function.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from rollout_data import RolloutDataset, RolloutWriter, loader

FOLDER = Path("demo/ray_train")
NUM_WORKERS, NUM_ENVS, NUM_TRAJECTORIES, NUM_INPUTS = 2, 8, 60, 6
STATE = "state.pt"


def record(data: Path) -> int:
    """Record walks of 10 to 40 frames, whose first input is the number of the frame.

    Return the number of frames.
    """
    torch.manual_seed(0)
    teacher, num_frames = nn.Linear(NUM_INPUTS, 2), 0
    with RolloutWriter(data, num_envs=1, durable=False) as writer, torch.no_grad():
        for _ in range(NUM_TRAJECTORIES):
            length = int(torch.randint(10, 41, ()))
            observation = torch.randn(length, 1, NUM_INPUTS)
            action = teacher(observation)
            observation[:, 0, 0] = torch.arange(num_frames, num_frames + length)
            done = torch.arange(length).view(-1, 1) == length - 1
            writer.add_rollout(
                observation=observation, action=action, reward=torch.zeros(length, 1), done=done
            )
            num_frames += length
    return num_frames


def learn(config: dict[str, Any]) -> None:
    """Run one worker: train for a number of batches, or to the end of the pass.

    Report the frames that all workers have read.
    """
    torch.set_num_threads(1)
    # wraps the policy in DistributedDataParallel
    policy = prepare_model(nn.Linear(NUM_INPUTS, 2))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    dataset = RolloutDataset(
        config["data"],
        NUM_ENVS // dist.get_world_size(),
        1,
        True,
        device="cpu",
        num_transitions_per_env=8,
    )
    batches, seen = loader(dataset), list[int]()
    if config["checkpoint"] is not None:
        state = torch.load(Path(config["checkpoint"]) / STATE)
        policy.module.load_state_dict(state["policy"])
        batches.load_state_dict(state["batches"])
    for step, batch in enumerate(batches, 1):
        inputs = batch.observation.clone()
        inputs[..., 0] = 0
        error = (policy(inputs) - batch.action).square().mean(-1)
        optimizer.zero_grad()
        # The gradients of the workers are averaged
        (error * batch.valid.view(error.shape)).mean().backward()
        optimizer.step()
        seen += batch.observation[..., 0][batch.valid.view(error.shape)].long().tolist()
        if step == config["num_steps"]:
            break
    everyone = [list[int]() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, seen)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:  # the state of the batches is the same in all ranks
            state = {"policy": policy.module.state_dict(), "batches": batches.state_dict()}
            torch.save(state, Path(folder) / STATE)
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report({"frames": everyone}, checkpoint=checkpoint)


def run(data: Path, num_steps: int | None, checkpoint: str | None) -> train.Result:
    """Start the workers, and wait for them."""
    config = {"data": str(data.absolute()), "num_steps": num_steps, "checkpoint": checkpoint}
    scaling = train.ScalingConfig(num_workers=NUM_WORKERS, resources_per_worker={"CPU": 0.5})
    place = train.RunConfig(storage_path=str(FOLDER.absolute() / "runs"))
    return TorchTrainer(
        learn, train_loop_config=config, scaling_config=scaling, run_config=place
    ).fit()


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    num_frames = record(FOLDER / "data")
    first = run(FOLDER / "data", 10, None)
    rest = run(FOLDER / "data", None, first.checkpoint.path)
    read = [
        frame for result in (first, rest) for frames in result.metrics["frames"] for frame in frames
    ]
    shares = [
        sum(map(len, shares))
        for shares in zip(first.metrics["frames"], rest.metrics["frames"], strict=True)
    ]
    print(
        f"{num_frames} frames recorded; workers read {shares}, {len(first.metrics['frames'][0])} before the break"
    )
    print(f"each frame once: {sorted(read) == list(range(num_frames))}")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    main()
    ray.shutdown()
