"""The report of `record_stream_learn.py`: tables and one picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

#: Frames of an episode that are drawn. Later frames only show balance.
NUM_SHOWN = 200
COLOURS = {"random": "#7f7f7f", "expert (PPO)": "#1f77b4", "clone": "#ff7f0e"}


@dataclass
class Episodes:
    """Returns of the episodes of one policy, and the observations of its first episode."""

    returns: np.ndarray
    path: np.ndarray


@dataclass
class Speed:
    """Time for moving a number of frames."""

    num_frames: int
    num_bytes: int
    duration_s: float

    def row(self, name: str, limit: Speed | None = None) -> str:
        frames, megabytes = (
            self.num_frames / self.duration_s,
            self.num_bytes / self.duration_s / 1e6,
        )
        text = f"{name:<42}{frames:>15,.0f}{megabytes:>10,.0f}"
        if limit is None:
            return text
        return text + f"{limit.num_bytes / limit.duration_s / 1e6 / megabytes:>12.1f}"


@dataclass
class Report:
    """Results of a run."""

    task: str
    #: (frames so far, return) of each training episode.
    curve: list[tuple[int, float]] = field(default_factory=list)
    episodes: dict[str, Episodes] = field(default_factory=dict)
    #: Name of a measurement -> the measurement, and its limit.
    speeds: dict[str, tuple[Speed, Speed | None]] = field(default_factory=dict)

    def tables(self) -> str:
        """Format the returns of all policies, and the throughput."""
        lines = [
            "",
            f"{self.task:<28}{'mean return':>12}{'std':>9}{'min':>9}{'max':>9}{'episodes':>10}",
        ]
        for name, episodes in self.episodes.items():
            values = episodes.returns
            figures = (values.mean(), values.std(), values.min(), values.max())
            lines.append(
                f"{name:<28}{figures[0]:>12.1f}"
                + "".join(f"{x:>9.1f}" for x in figures[1:])
                + f"{len(values):>10}"
            )
        lines += ["", f"{'throughput':<42}{'frames/s':>15}{'MB/s':>10}{'time/limit':>12}"]
        lines += [speed.row(name, limit) for name, (speed, limit) in self.speeds.items()]
        lines += [
            "",
            "Rows this small cost more in Python than in copying; `make bench` measures rows of 2 KB.",
            "",
        ]
        return "\n".join(lines)

    def draw(self, path: Path) -> Path:
        """Draw the learning curve, the return distributions, and one trajectory of expert and clone."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
        self._draw_curve(left)
        self._draw_returns(middle)
        self._draw_paths(right)
        figure.suptitle(f"{self.task}: learned by PPO, recorded, streamed back, cloned")
        figure.savefig(path, dpi=120)
        plt.close(figure)
        return path

    def _draw_curve(self, axes) -> None:
        if self.curve:
            frames, returns = np.array(self.curve).T
            axes.plot(frames, returns, ".", color=COLOURS["expert (PPO)"], alpha=0.25, markersize=4)
            width = max(1, len(returns) // 50)
            mean = np.convolve(returns, np.ones(width) / width, "valid")
            axes.plot(
                frames[width - 1 :],
                mean,
                color=COLOURS["expert (PPO)"],
                label=f"mean of {width} episodes",
            )
            axes.legend()
        axes.set(title="PPO learns", xlabel="frames", ylabel="return of an episode")
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter("{x:,.0f}")

    def _draw_returns(self, axes) -> None:
        generator = np.random.default_rng(0)
        for position, (name, episodes) in enumerate(self.episodes.items()):
            values = episodes.returns
            offsets = position + generator.uniform(-0.18, 0.18, len(values))
            axes.plot(offsets, values, "o", color=COLOURS[name], alpha=0.6, markersize=5)
            axes.hlines(values.mean(), position - 0.32, position + 0.32, color="black")
            axes.annotate(f"{values.mean():,.0f}", (position + 0.34, values.mean()), va="center")
        axes.set_xticks(range(len(self.episodes)), list(self.episodes))
        axes.set_xlim(-0.5, len(self.episodes) - 0.2)
        axes.set(title="returns of the episodes, mean as a bar", ylabel="return of an episode")
        axes.margins(y=0.12)

    def _draw_paths(self, axes) -> None:
        for name in ("expert (PPO)", "clone"):
            path = self.episodes[name].path
            axes.plot(path[:NUM_SHOWN, 0], color=COLOURS[name], label=name, alpha=0.8)
        axes.set(
            title="one episode from the same start",
            xlabel="frame",
            ylabel="first observation (cart position)",
        )
        axes.legend()
