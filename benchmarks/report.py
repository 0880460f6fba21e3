"""The report of one workload: a table, JSON and a chart.

The report contains every requested figure. Skipped and failed figures have a reason.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .harness import LIMIT, OURS, PEER, Timing
from .peers import versions

OUT = Path(__file__).parents[1] / "out" / "benchmarks"
COLOURS = {OURS: "#1f77b4", LIMIT: "#7f7f7f", PEER: "#ff7f0e"}


def machine() -> dict[str, Any]:
    """Describe the machine and the packages of the measurement."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True
    )
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.decode().strip(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "peers": versions(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def table(timings: list[Timing]) -> str:
    """Format the timings: time per call, ratio to the limit, throughput, and the promise."""
    rows = [("case", "who", "", "time", "x limit", "MB/s", "reach", "")]
    previous = ""
    for timing in timings:
        case = timing.case if timing.case != previous else ""
        previous = timing.case
        if timing.median_s is None:
            reason = f"skipped: {timing.skipped}" if timing.skipped else f"FAILED: {timing.failed}"
            rows.append((case, timing.name, timing.role, reason, "", "", "", ""))
            continue
        throughput = f"{timing.num_bytes / timing.median_s / 1e6:,.0f}" if timing.num_bytes else ""
        ratio = f"{timing.ratio:,.2f}" if timing.ratio is not None else ""
        verdict = {None: "", True: "ok", False: "MISSED"}[timing.is_reached]
        rows.append(
            (
                case,
                timing.name,
                timing.role,
                seconds(timing.median_s),
                ratio,
                throughput,
                _promise(timing),
                f"{verdict} {timing.note}".strip(),
            )
        )
    widths = [
        max(len(row[column]) for row in rows if row[4] or column < 3)
        for column in range(len(rows[0]))
    ]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if column in {3, 4, 5, 6} and row[4] else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines[:1]))
    return "\n".join(lines)


def seconds(value_s: float) -> str:
    """Format a duration with three digits and its unit."""
    unit, factor = next(
        ((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if value_s * factor >= 1),
        ("us", 1e6),
    )
    return f"{value_s * factor:.3g} {unit}"


def times(ratio: float) -> str:
    """Format a ratio with three digits."""
    return f"{ratio:.3g}x" if ratio < 1000 else f"{ratio:,.0f}x"


def _promise(timing: Timing) -> str:
    parts = []
    if timing.reach is not None:
        parts.append(f"{timing.reach:.3g}x")
    if timing.reach_s is not None:
        parts.append(seconds(timing.reach_s))
    return " ".join(parts)


def write_json(name: str, timings: list[Timing], folder: Path = OUT) -> Path:
    """Write every repetition of every contender, with the machine, to `folder/name.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    rows = [
        asdict(timing) | {"median_s": timing.median_s, "is_reached": timing.is_reached}
        for timing in timings
    ]
    path.write_text(
        json.dumps({"workload": name, "machine": machine(), "timings": rows}, indent=1),
        encoding="utf-8",
    )
    return path


def draw(name: str, timings: list[Timing], folder: Path = OUT) -> Path:
    """Draw the ratios to the limit as bars, one group per case, to `folder/name.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [timing for timing in timings if timing.ratio is not None and timing.role != LIMIT]
    cases = list(dict.fromkeys(timing.case for timing in shown))
    # Leave a gap of half a bar between two cases.
    positions = [number + 0.5 * cases.index(timing.case) for number, timing in enumerate(shown)]
    height = 1 + (positions[-1] if positions else 0)
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.27 * height), layout="constrained")
    for position, timing in zip(positions, shown, strict=True):
        ratio = timing.ratio or 0
        axes.barh(position, ratio, color=COLOURS[timing.role], height=0.8)
        text = f" {times(ratio)}  ({seconds(timing.median_s or 0)})"
        axes.annotate(text, (max(ratio, timing.reach or 0), position), va="center", fontsize=8)
        if timing.reach is not None:
            axes.plot(
                [timing.reach] * 2, [position - 0.45, position + 0.45], color="#2ca02c", linewidth=2
            )
    axes.set_yticks(positions, [f"{timing.case} · {timing.name}" for timing in shown], fontsize=8)
    axes.set_ylim(height, -1)
    axes.set_xscale("log")
    ratios = [timing.ratio or 1 for timing in shown]
    lowest, highest = min([0.5, *ratios]) * 0.8, max([2.0, *ratios])
    # Space for the figures beside the bars.
    axes.set_xlim(lowest, highest * 1.5 * (highest / lowest) ** 0.25)
    axes.axvline(1, color="#7f7f7f", linewidth=1)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[role]) for role in (OURS, PEER)]
    handles.append(plt.Line2D([], [], color="#2ca02c", linewidth=2))
    axes.legend(
        handles,
        ["ours", "peer", "promised"],
        fontsize=8,
        ncols=3,
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("time over limit; lower is better")
    axes.set_title(name, loc="left")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
