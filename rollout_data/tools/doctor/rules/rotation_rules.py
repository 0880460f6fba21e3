"""Rules VAL11 to VAL13 of quaternions, four numbers of norm 1 in the order wxyz or xyzw."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..batched_reading import Array, Batch
from ..field_facts import worst
from ..findings import Defect, Settings, checks
from ..scan import Collector, Scan

_FLIP = -0.9
_NORM = 0.02


class Rotations(Collector):
    """Of each quaternion field, per episode.

    Attributes:
        num_off, num_flips: Field -> int64 `[E]`: rows of another norm than 1, and neighbours that flip their sign.
        mean: Field -> `[E, Q, 4]`: of the first batch, each row with a positive largest component.
    """

    def __init__(self, scan: Scan) -> None:
        self._names = scan.roles["quaternion"]
        size = scan.num_episodes
        self.num_off = {name: np.zeros(size, np.int64) for name in self._names}
        self.num_flips = {name: np.zeros(size, np.int64) for name in self._names}
        self.mean = {name: np.zeros((size, scan.schema[name].num_elements // 4, 4)) for name in self._names}

    def add(self, batch: Batch) -> None:
        starts = batch.offsets[:-1]
        counts = np.diff(batch.offsets)
        for name in self._names:
            if name not in batch.values:
                continue
            rows = batch.values[name].reshape(len(batch), -1, 4)
            off = is_off(rows)
            flips = np.zeros(len(batch), bool)
            off[: batch.overlap] = False
            flips[1:] = is_flip(rows)
            flips[starts] = False
            self.num_off[name][batch.numbers] += np.add.reduceat(off.astype(np.int64), starts)
            self.num_flips[name][batch.numbers] += np.add.reduceat(flips.astype(np.int64), starts)
            if batch.starts[0] == 0:
                largest = np.take_along_axis(rows, np.abs(rows).argmax(-1)[..., None], -1)
                with np.errstate(invalid="ignore", over="ignore"):
                    mean = np.add.reduceat(rows * np.sign(largest), starts, axis=0) / counts[:, None, None]
                self.mean[name][batch.numbers] = mean


def is_off(rows: Array) -> Array:
    """bool `[n]`: rows `[n, Q * 4]` with a norm that is not 1."""
    parts = rows.reshape(len(rows), -1, 4)
    found: Array = (np.abs(np.sqrt(np.einsum("nqd,nqd->nq", parts, parts)) - 1) > _NORM).any(1)
    return found


def is_flip(rows: Array) -> Array:
    """bool `[n - 1]`: neighbouring rows `[n, Q * 4]` that point the other way."""
    parts = rows.reshape(len(rows), -1, 4)
    found: Array = (np.einsum("nqd,nqd->nq", parts[1:], parts[:-1]) < _FLIP).any(1)
    return found


@checks("VAL11", Rotations)
def norm(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name in scan.role("quaternion"):
        count = scan.collected(Rotations).num_off[name]
        share = float(count.sum() / max(1, scan.facts[name].num_rows))
        if share > settings["share"]:
            numbers = worst(np.flatnonzero(count), count)
            message = f"{share:.1%} of the quaternions {name!r} do not have the norm 1"
            yield Defect(name, message, numbers, scan.runs(numbers, name, is_off), {"share": share})


@checks("VAL12", Rotations)
def flips(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name in scan.role("quaternion"):
        count = scan.collected(Rotations).num_flips[name]
        numbers = worst(np.flatnonzero(count), count)
        if len(numbers):
            message = f"{name!r} changes its sign {int(count.sum()):,} times within episodes"
            evidence = {"flips": int(count.sum()), "dot_below": _FLIP}
            yield Defect(name, message, numbers, scan.runs(numbers, name, is_flip), evidence)


@checks("VAL13", Rotations)
def order(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Some episodes are wxyz, others xyzw."""
    for name in scan.role("quaternion"):
        for part, mean in enumerate(np.moveaxis(scan.collected(Rotations).mean[name], 1, 0)):
            largest = np.where(np.abs(mean).max(1) > 0, np.abs(mean).argmax(1), -1)
            groups = sorted((np.flatnonzero(largest == place) for place in (0, 3)), key=len)
            few, many = groups
            if len(few) < settings["episodes"]:
                continue
            turned = np.roll(mean[few], 1 if largest[few[0]] == 3 else -1, axis=1)
            with np.errstate(invalid="ignore", over="ignore"):
                centre = mean[many].mean(0)
                spread = np.maximum(mean[many].std(0), 0.01)
                before, after = (np.abs((one.mean(0) - centre) / spread).max() for one in (mean[few], turned))
                each = np.median(np.abs(turned - centre) / spread, axis=0).mean()
            # A few episodes lie off by chance, but far less than before; half turns fit in some components only.
            fits = after < max(settings["after"], before / 8) and each < before / 4
            if before > settings["before"] and fits:
                evidence = {"deviations_before": before, "deviations_after_rolling": after, "quaternion": part}
                message = f"{name!r} is wxyz in some trajectories and xyzw in others"
                yield Defect(name, message, few, scan.whole(few), evidence)
