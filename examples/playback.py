"""Play a recording frame by frame: `python examples/playback.py FOLDER` (default: the recording of
`make demo`).
"""

from __future__ import annotations

import sys

from rollout_data import RolloutDataset

folder = sys.argv[1] if len(sys.argv) > 1 else "demo/data"
num_frames = int(sys.argv[2]) if len(sys.argv) > 2 else 20
dataset = RolloutDataset(folder, num_envs=4, dataset_loops=0, device="cpu")
print(
    f"{folder}: {dataset.num_trajectories} trajectories, {dataset.num_frames} frames; 4 are played side by side"
)
for number, frame in zip(range(num_frames), dataset, strict=False):
    for env in range(dataset.num_envs):
        if frame.is_first[env]:
            print(f"frame {number}: env {env} begins a trajectory")
    rewards = (
        "none"
        if frame.reward is None
        else " ".join(f"{reward:8.3f}" for reward in frame.reward.flatten().tolist())
    )
    print(
        f"frame {number}: rewards {rewards}   observation of env 0 {frame.observation[0][:3].tolist()}"
    )
