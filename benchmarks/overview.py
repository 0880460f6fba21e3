"""The chart of README: eight cases, with ours and the peers side by side.

`python -m benchmarks.overview` reads the reports in `out/benchmarks` and draws
`benchmarks/how_fast.png`. Cases without a report are left out, and their labels are printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .report import COLOURS, OUT, seconds, times

CHART = Path(__file__).with_name("how_fast.png")
#: Label -> workload, case, our contender.
CASES = {
    "play 4096 envs x 24 steps from files,\nand one Linear": (
        "playback",
        "N=4096 T=24",
        "contiguous",
    ),
    "record 1024 envs x 24 steps, 50 MB": ("record", "not durable", "add_rollout"),
    "256 windows of 10 frames from disk": ("windows_disk", "L=10 B=256, no workers", "DataLoader"),
    "4 x 5 mini-batches of 24 x 4096": (
        "ppo",
        "mini-batches 4x5 T=24 N=4096",
        "new permutation per epoch",
    ),
    "sample 256 of 10^6 transitions": ("replay", "sample 256", "DictBuffer"),
    "sample and update 256 of 10^6 priorities": (
        "prioritized",
        "sample and update 256",
        "AdvancedReplayBuffer",
    ),
    "sample 1024 rows of 100 trajectories": (
        "trajectory_replay",
        "sample 1024, all cached",
        "TrajectoryReplayBuffer",
    ),
    "save 200 MB beside training": ("checkpoint", "wait of the training loop", "save_async"),
}
#: Contenders that do only a part of the work.
PARTS = {"clone of all tensors", "copies, then write", "memcpy"}


def timings(workload: str, case: str) -> list[dict[str, Any]]:
    """Return the timings of a case from the newest report that has it; empty if there is none."""
    reports = sorted(
        OUT.glob(f"{workload}*.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for report in reports:
        if report.stem in (workload, f"{workload}-part"):
            rows = json.loads(report.read_text(encoding="utf-8"))["timings"]
            if results := [row for row in rows if row["case"] == case and row["ratio"]]:
                return results
    return []


def draw(path: Path = CHART) -> list[str]:
    """Draw the chart. Return the labels without a report."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    bars: list[tuple[float, str, dict[str, Any]]] = []
    missing, ticks, position = [], {}, 0.0
    for label, (workload, case, ours) in CASES.items():
        rows = timings(workload, case)
        our_rows = [row for row in rows if row["role"] == "ours" and row["name"].startswith(ours)][
            :1
        ]
        if not our_rows:
            missing.append(label)
            continue
        peers = sorted(
            (row for row in rows if row["role"] == "peer" and row["name"] not in PARTS),
            key=lambda row: row["ratio"],
        )
        shown = our_rows + peers[:4]
        ticks[position + (len(shown) - 1) / 2] = label
        bars += [(position + number, row["role"], row) for number, row in enumerate(shown)]
        position += len(shown) + 0.8
    figure, axes = plt.subplots(figsize=(10, 1 + 0.24 * position), layout="constrained")
    for place, role, row in bars:
        axes.barh(place, row["ratio"], color=COLOURS[role], height=0.8)
        name = "" if role == "ours" else f" {row['name']},"
        text = f"{name} {times(row['ratio'])} ({seconds(row['median_s'])})"
        axes.annotate(text, (max(row["ratio"], 1), place), va="center", fontsize=8)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.set_ylim(position, -1)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 8 * max([2.0, *(row["ratio"] for _, _, row in bars)]))
    axes.axvline(1, color=COLOURS["limit"], linewidth=1)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("time over that of moving the same bytes in the cheapest way; lower is better")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[role]) for role in ("ours", "peer")]
    axes.legend(handles, ["rollout-data", "others"], fontsize=9, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return missing


if __name__ == "__main__":
    for label in draw():
        sys.stdout.write(f"no report of: {' '.join(label.split())}\n")
    sys.stdout.write(f"written {CHART}\n")
