"""Imitate motion clips with latent goals: `python examples/motion_imitation.py` draws demo/motion_imitation.png.

Real clips (examples/data/motions, with licences) are the expert. A point-mass character tracks
them; the policy commands the velocities of its joints. As in forward-backward learning, a window of
future frames is embedded into a latent z, and the policy acts towards z. Three buffers store the
data: a `TrajectoryDictBuffer` the expert windows, a `TrajectoryDictBufferMultiDim` the policy's
windows, and a `ZBuffer` the latents. Motions with larger tracking errors are drawn more often.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from storage import TrajectoryDictBuffer, TrajectoryDictBufferMultiDim, ZBuffer, motion_priorities

MOTIONS = Path(__file__).parent / "data" / "motions"
SEQ_LENGTH, RATE_HZ = 8, 30.0
#: Both skeletons share one observation: root and joints of a humanoid, or of a quadruped and zeros.
NUM_POSE = 43


@dataclass(frozen=True)
class Settings:
    """Options of the training. The defaults take about a minute."""

    num_rounds: int = 15
    updates_per_round: int = 300
    num_envs: int = 32
    steps_per_round: int = 60
    batch_windows: int = 64
    z_dim: int = 32
    width: int = 128
    learning_rate: float = 1e-3
    noise: float = 0.05
    #: Distance from the clip from which the policy learns to return.
    spread: float = 0.05
    seed: int = 0


def read_clips(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the poses `[T, NUM_POSE]` of every clip, resampled to `RATE_HZ`."""
    for path in sorted(folder.glob("*/*.txt")):
        if path.name.startswith("LICENCE"):
            continue
        clip = json.loads(path.read_text(encoding="utf-8"))
        rows = np.array(clip["Frames"], np.float64)
        if "FrameDuration" in clip:
            durations, poses = np.full(len(rows), clip["FrameDuration"]), rows
        else:
            durations, poses = rows[:, 0], rows[:, 1:]
        times = np.concatenate([[0.0], np.cumsum(durations[:-1])])
        wanted = np.arange(0.0, times[-1], 1 / RATE_HZ)
        sampled = np.stack([np.interp(wanted, times, column) for column in poses.T], 1)
        padded = np.zeros((len(sampled), NUM_POSE), np.float32)
        padded[:, : sampled.shape[1]] = sampled
        yield path.stem.removeprefix("humanoid3d_"), torch.from_numpy(padded)


def episode(motion_id: int, poses: Tensor) -> dict:
    """Return an episode: nested poses and velocities, and the number of the motion."""
    velocity = torch.diff(poses, dim=0, append=poses[-1:]) * RATE_HZ
    ids = torch.full((len(poses), 1), motion_id)
    return {"observation": {"pose": poses, "velocity": velocity}, "motion_id": ids}


class Imitator(nn.Module):
    """Embed observations into z, and act towards z."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, z_dim = settings.width, settings.z_dim
        self.backward_map = nn.Sequential(
            nn.Linear(NUM_POSE, width), nn.ReLU(), nn.Linear(width, z_dim)
        )
        self.policy = nn.Sequential(
            nn.Linear(NUM_POSE + z_dim, width), nn.ReLU(), nn.Linear(width, NUM_POSE)
        )

    def embed(self, poses: Tensor) -> Tensor:
        """Embed windows of future poses `[N, L, NUM_POSE]` on the sphere of radius sqrt(z_dim)."""
        z = self.backward_map(poses).mean(1)
        return nn.functional.normalize(z, dim=-1) * z.shape[-1] ** 0.5

    def act(self, pose: Tensor, z: Tensor) -> Tensor:
        """Return the commanded velocities `[N, NUM_POSE]`."""
        return self.policy(torch.cat([pose, z], -1))


def imitate(model: Imitator, batch: dict, z_buffer: ZBuffer, spread: float) -> Tensor:
    """Return the loss of actions towards a window's latent, from states near the clip."""
    length = SEQ_LENGTH
    pose = batch["observation"]["pose"].unflatten(0, (-1, length))
    following = batch["next"]["observation"]["pose"].unflatten(0, (-1, length))
    z = model.embed(following)
    z_buffer.add(z)
    start = pose[:, 0] + spread * torch.randn_like(pose[:, 0])
    return nn.functional.smooth_l1_loss(model.act(start, z), (following[:, 0] - start) * RATE_HZ)


@torch.no_grad()
def collect(
    model: Imitator,
    expert: TrajectoryDictBuffer,
    own: TrajectoryDictBufferMultiDim,
    z_buffer: ZBuffer,
    settings: Settings,
) -> None:
    """Move all characters from expert frames towards stored latents.

    Every trajectory is truncated at the end.
    """
    pose = expert.sample(settings.num_envs, seq_length=1)["observation"]["pose"]
    z = z_buffer.sample(settings.num_envs)
    for number in range(settings.steps_per_round):
        velocity = model.act(pose, z)
        velocity = velocity + settings.noise * torch.randn_like(velocity)
        is_last = torch.full((1, settings.num_envs, 1), number == settings.steps_per_round - 1)
        observation = {"pose": pose.unsqueeze(0), "velocity": velocity.unsqueeze(0)}
        own.extend(
            {
                "observation": observation,
                "terminated": torch.zeros_like(is_last),
                "truncated": is_last,
            }
        )
        pose = pose + velocity / RATE_HZ


@torch.no_grad()
def tracking_errors(model: Imitator, clips: list[tuple[str, Tensor]]) -> Tensor:
    """Track every clip from its first frame.

    Return the mean distance to it, relative to its movement.
    """
    errors = []
    for _, poses in clips:
        pose, distances = poses[:1], []
        for t in range(len(poses) - 1):
            z = model.embed(poses[None, t + 1 : t + 1 + SEQ_LENGTH])
            pose = pose + model.act(pose, z) / RATE_HZ
            distances.append((pose - poses[t + 1]).norm())
        errors.append(torch.stack(distances).mean() / (poses - poses.mean(0)).norm(dim=-1).mean())
    return torch.stack(errors)


def shares(expert: TrajectoryDictBuffer, num_draws: int = 20_000) -> Tensor:
    """Return how often each motion is drawn."""
    batch = expert.sample(num_draws * SEQ_LENGTH)
    drawn = batch["motion_id"].view(num_draws, SEQ_LENGTH)[:, 0]
    return torch.bincount(drawn, minlength=expert.num_episodes) / num_draws


def train(settings: Settings, folder: Path = MOTIONS) -> dict:
    """Imitate. Return names, shares of draws before and after the priorities, and tracking errors
    per round.
    """
    torch.manual_seed(settings.seed)
    clips = list(read_clips(folder))
    names = [name for name, _ in clips]
    keys = ["observation", "motion_id"]
    episodes = [episode(number, poses) for number, (_, poses) in enumerate(clips)]
    expert = TrajectoryDictBuffer(
        episodes, "cpu", SEQ_LENGTH, keys, file_names=names, generator=settings.seed
    )
    own = TrajectoryDictBufferMultiDim(
        capacity=2000, n_dim=2, seq_length=SEQ_LENGTH, generator=settings.seed
    )
    z_buffer = ZBuffer(4096, settings.z_dim, generator=settings.seed)
    model = Imitator(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    before, history = shares(expert), []
    rows = settings.batch_windows * SEQ_LENGTH
    for number in range(settings.num_rounds):
        for _ in range(settings.updates_per_round):
            loss = imitate(model, expert.sample(rows), z_buffer, settings.spread)
            if not own.empty():
                loss = loss + 0.2 * imitate(model, own.sample(rows), z_buffer, settings.spread)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        collect(model, expert, own, z_buffer, settings)
        errors = tracking_errors(model, clips)
        history.append(errors)
        expert.update_priorities(
            motion_priorities(errors / errors.median()), torch.arange(len(clips))
        )
        print(f"round {number}: loss {loss.item():.3f}, mean tracking error {errors.mean():.3f}")
    return {
        "names": names,
        "before": before,
        "after": shares(expert),
        "errors": torch.stack(history),
    }


def draw(result: dict, path: Path) -> None:
    """Draw the shares before and after over the errors, and the errors over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.6), layout="constrained", width_ratios=(3, 2)
    )
    order = result["errors"][-1].argsort().tolist()
    names, places = [result["names"][i] for i in order], np.arange(len(order))
    left.bar(places - 0.2, result["before"][order], 0.4, label="equal priorities", color="#7f7f7f")
    left.bar(
        places + 0.2,
        result["after"][order],
        0.4,
        label="priorities from tracking errors",
        color="#ff7f0e",
    )
    left.set_xticks(places, names, rotation=35, ha="right")
    left.set(title="how often each motion is drawn, best tracked first", ylabel="share of draws")
    left.legend()
    for i in order[::-1]:
        right.plot(
            range(1, 1 + len(result["errors"])),
            result["errors"][:, i],
            label=result["names"][i],
            linewidth=1,
        )
    right.set(
        title="tracking error",
        xlabel="round",
        ylabel="distance / extent of the motion",
        yscale="log",
    )
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    quick = Settings(
        num_rounds=2, updates_per_round=10, steps_per_round=20, num_envs=8, batch_windows=16
    )
    result = train(quick if "--quick" in sys.argv else Settings())
    draw(result, Path("demo/motion_imitation.png"))
    print(f"{'motion':<16}{'error':>8}{'share before':>14}{'after':>8}")
    for i, name in enumerate(result["names"]):
        print(
            f"{name:<16}{result['errors'][-1][i]:>8.3f}{result['before'][i]:>14.3f}{result['after'][i]:>8.3f}"
        )
