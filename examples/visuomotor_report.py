"""The report of `visuomotor_cloning.py`: tables and one picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {"random": "#7f7f7f", "expert": "#1f77b4", "clone, from images": "#ff7f0e"}
RAW, CODED = "#bbbbbb", "#2ca02c"


@dataclass
class Speed:
    """Time for moving a number of frames (or windows), and their size in bytes."""

    number: int
    bytes_each: int
    duration_s: float

    @property
    def per_s(self) -> float:
        return self.number / self.duration_s

    @property
    def megabytes_per_s(self) -> float:
        return self.per_s * self.bytes_each / 1e6


@dataclass
class Report:
    """Results of a run."""

    task: str
    camera: str
    codecs: Mapping[str, str]
    #: Component -> bytes of one image, and a description.
    frame_bytes: dict[str, int] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    #: "observation/" + component -> its line of `rollout-data info`.
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Name of a measurement -> the measurement. Bytes are those of raw images.
    speeds: dict[str, Speed] = field(default_factory=dict)
    #: Loss of each batch, and (batches so far, loss of validation episodes).
    losses: list[float] = field(default_factory=list)
    tests: list[tuple[int, float]] = field(default_factory=list)
    returns: dict[str, np.ndarray] = field(default_factory=dict)
    #: (step, images) of one episode of the clone.
    strip: list[tuple[int, dict[str, np.ndarray]]] = field(default_factory=list)

    def note_component(self, name: str, images: np.ndarray) -> int:
        """Store a description of a component `[N, ...]`. Return the bytes of one image."""
        self.words[name] = f"{images.dtype}{list(images.shape[1:])}"
        self.frame_bytes[name] = images[0].nbytes
        return images[0].nbytes

    def share(self, name: str = "clone, from images") -> float:
        """Return a policy's share of the expert's advantage over random actions."""
        worst, best = self.returns["random"].mean(), self.returns["expert"].mean()
        return float((self.returns[name].mean() - worst) / (best - worst))

    def tables(self) -> str:
        """Format sizes, throughput and returns."""
        head = (
            f"{'component':<14}{'before':>12}{'after':>12}{'ratio':>8}{'largest error':>15}  codec"
        )
        lines = ["", f"images by {self.camera}", "", head]
        for name in self.words:
            size = self.sizes[f"observation/{name}"]
            before, after = (f"{size[key] / 1e6:,.2f} MB" for key in ("num_raw_bytes", "num_bytes"))
            used = (
                self.codecs[name]
                if size["codecs"] == [self.codecs[name]]
                else f"auto: {', '.join(size['codecs'])}"
            )
            error = f"{size['max_error']:.2g} m" if size["max_error"] else "none"
            ratio = size["num_raw_bytes"] / size["num_bytes"]
            lines.append(
                f"{name:<14}{before:>12}{after:>12}{ratio:>8.1f}{error:>15}  {used}, {self.words[name]}"
            )
        lines += ["Drawn images are smooth; those of real cameras have noise, and shrink less.", ""]
        lines.append(f"{'throughput':<34}{'frames/s':>12}{'MB/s of images':>16}")
        for name, speed in self.speeds.items():
            lines.append(f"{name:<34}{speed.per_s:>12,.0f}{speed.megabytes_per_s:>16,.0f}")
        lines += [
            "Written until closed, flushed to the disk; streamed as shuffled windows, one for each frame.",
            "",
        ]
        lines.append(
            f"{self.task:<20}{'mean return':>12}{'std':>8}{'min':>8}{'max':>8}{'episodes':>10}{'share':>8}"
        )
        for name, values in self.returns.items():
            figures = "".join(
                f"{value:>8.1f}" for value in (values.std(), values.min(), values.max())
            )
            lines.append(
                f"{name:<20}{values.mean():>12.1f}{figures}{len(values):>10}{self.share(name):>8.0%}"
            )
        return "\n".join(
            [*lines, "The share is 0 % for random actions and 100 % for the expert's return.", ""]
        )

    def draw(self, path: Path) -> Path:
        """Draw sizes, throughput, the learning curve, the returns, and frames of one episode."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=(17, 9), layout="constrained")
        grid = figure.add_gridspec(2, 4, height_ratios=(1.1, 1))
        self._draw_sizes(figure.add_subplot(grid[0, 0]))
        self._draw_speeds(figure.add_subplot(grid[0, 1]))
        self._draw_losses(figure.add_subplot(grid[0, 2]))
        self._draw_returns(figure.add_subplot(grid[0, 3]))
        self._draw_strip(figure.add_subplot(grid[1, :]))
        figure.suptitle(f"{self.task} cloned from images by {self.camera}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
        pyplot.close(figure)
        return path

    def _draw_sizes(self, axes) -> None:
        names = list(self.words)
        for offset, key, colour, label in (
            (-0.2, "num_raw_bytes", RAW, "before"),
            (0.2, "num_bytes", CODED, "after"),
        ):
            values = [self.sizes[f"observation/{name}"][key] / 1e6 for name in names]
            bars = axes.bar(np.arange(len(names)) + offset, values, 0.38, color=colour, label=label)
            axes.bar_label(bars, [f"{value:,.3g} MB" for value in values], fontsize=8)
        axes.set_yscale("log")
        ratios = [self.sizes[f"observation/{name}"] for name in names]
        ticks = [
            f"{n}\n{ratio['num_raw_bytes'] / ratio['num_bytes']:.0f} x"
            for n, ratio in zip(names, ratios, strict=True)
        ]
        axes.set_xticks(range(len(names)), ticks)
        axes.margins(y=0.15)
        axes.set(title="recorded images, in memory and in files", ylabel="MB")
        axes.legend(loc="upper right", fontsize=8)

    def _draw_speeds(self, axes) -> None:
        speeds = list(self.speeds.values())[::-1]
        names = [name.replace(", ", ",\n") for name in self.speeds][::-1]
        colours = [
            CODED if "coded" in name else RAW if "raw" in name else COLOURS["expert"]
            for name in names
        ]
        bars = axes.barh(names, [speed.per_s for speed in speeds], color=colours)
        texts = [f"{speed.per_s:,.0f} /s\n{speed.megabytes_per_s:,.0f} MB/s" for speed in speeds]
        axes.bar_label(bars, texts, fontsize=8, padding=3)
        axes.margins(x=0.4)
        axes.set(title="throughput, MB of images before coding", xlabel="frames per second")

    def _draw_losses(self, axes) -> None:
        width = max(1, len(self.losses) // 50)
        mean = np.convolve(self.losses, np.ones(width) / width, "valid")
        axes.plot(
            np.arange(width - 1, len(self.losses)),
            mean,
            color=RAW,
            label=f"mean of {width} batches",
        )
        axes.plot(
            *zip(*self.tests, strict=True),
            "o-",
            color=COLOURS["clone, from images"],
            label="other episodes",
        )
        axes.set_yscale("log")
        axes.set(
            title="the clone learns",
            xlabel="batches",
            ylabel="squared error / variance of the actions",
        )
        axes.legend(fontsize=8)

    def _draw_returns(self, axes) -> None:
        generator = np.random.default_rng(0)
        for position, (name, values) in enumerate(self.returns.items()):
            offsets = position + generator.uniform(-0.18, 0.18, len(values))
            axes.plot(offsets, values, "o", color=COLOURS[name], alpha=0.6, markersize=5)
            axes.hlines(values.mean(), position - 0.32, position + 0.32, color="black")
            text = f"{values.mean():.1f}\n({self.share(name):.0%})"
            below = {"textcoords": "offset points", "xytext": (0, -8), "ha": "center", "va": "top"}
            axes.annotate(text, (position, values.min()), fontsize=9, **below)
        axes.set_xticks(
            range(len(self.returns)), [name.replace(", ", ",\n") for name in self.returns]
        )
        axes.set_xlim(-0.5, len(self.returns) - 0.5)
        axes.margins(y=0.2)
        axes.set(title="returns (share of the expert)", ylabel="return of an episode")

    def _draw_strip(self, axes) -> None:
        from matplotlib import pyplot

        rows = []
        for name in self.words:
            images = np.stack([shown[name] for _, shown in self.strip])
            if images.ndim == 3:
                parts = (images - images.min()) / max(1e-9, images.max() - images.min())
                images = pyplot.get_cmap("viridis" if name == "depth" else "turbo")(
                    parts, bytes=True
                )[..., :3]
            framed = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=255)
            rows.append(np.concatenate(framed, axis=1))
        picture = np.concatenate(rows)
        axes.imshow(picture, interpolation="nearest")
        size = picture.shape[0] // len(rows)
        middles = [(place + 0.5) * size for place in range(len(self.strip))]
        axes.set_xticks(middles, [f"step {number}" for number, _ in self.strip])
        axes.set_yticks(middles[: len(rows)], list(self.words))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(
            title="what the clone saw in its first episode: it is to bring the green tip to the red target"
        )
