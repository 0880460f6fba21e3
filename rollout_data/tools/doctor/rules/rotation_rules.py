"""Rules VAL11 to VAL13: norm, sign and component order of quaternions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..batched_reading import Array, Batch
from ..field_facts import worst
from ..findings import Defect, Settings, checks
from ..scan import Collector, Scan

#: If the dot product of two successive quaternions is smaller, their signs differ.
_FLIP = -0.9
#: Maximum difference between the norm of a quaternion and 1.
_NORM = 0.02


class Rotations(Collector):
    """Collector of facts about quaternion fields, for each of E episodes.

    A field with `Q * 4` elements has Q quaternions.

    Attributes:
        num_off: Number of rows in which the norm of a quaternion is not 1, int64 `[E]`, by field.
        num_flips: Number of rows in which a quaternion changes its sign, int64 `[E]`, by field.
        mean: Mean of the Q quaternions over the first batch of each episode, `[E, Q, 4]`, by field.
            The sign of each quaternion is chosen so that its largest component is positive.
    """

    def __init__(self, scan: Scan) -> None:
        self._names = scan.roles["quaternion"]
        size = scan.num_episodes
        self.num_off: dict[str, Array] = {}
        self.num_flips: dict[str, Array] = {}
        self.mean: dict[str, Array] = {}
        for name in self._names:
            num_quaternions = scan.schema[name].num_elements // 4
            self.num_off[name] = np.zeros(size, np.int64)
            self.num_flips[name] = np.zeros(size, np.int64)
            self.mean[name] = np.zeros((size, num_quaternions, 4))

    def add(self, batch: Batch) -> None:
        starts = batch.offsets[:-1]
        for name in self._names:
            if name not in batch.values:
                continue
            rows = batch.values[name].reshape(len(batch), -1, 4)
            is_off = is_off_norm(rows)
            is_off[: batch.overlap] = False
            flips = np.zeros(len(batch), bool)
            flips[1:] = is_flip(rows)
            flips[starts] = False
            self.num_off[name][batch.numbers] += np.add.reduceat(is_off.astype(np.int64), starts)
            self.num_flips[name][batch.numbers] += np.add.reduceat(flips.astype(np.int64), starts)
            if batch.starts[0] == 0:
                self.mean[name][batch.numbers] = _means(rows, batch)


def _means(rows: Array, batch: Batch) -> Array:
    """Return the mean quaternions of each of k episodes in a batch: `[k, Q, 4]`.

    A quaternion and its negative are the same rotation. So the largest component is made positive
    before computing the mean.
    """
    largest = np.take_along_axis(rows, np.abs(rows).argmax(-1)[..., None], -1)
    counts = np.diff(batch.offsets)[:, None, None]
    with np.errstate(invalid="ignore", over="ignore"):
        sums = np.add.reduceat(rows * np.sign(largest), batch.offsets[:-1], axis=0)
        means: Array = sums / counts
    return means


def is_off_norm(rows: Array) -> Array:
    """Return `[n]` bool: whether any of the Q quaternions of a row has a norm other than 1.

    `rows` is `[n, Q * 4]` or `[n, Q, 4]`.
    """
    parts = rows.reshape(len(rows), -1, 4)
    norms = np.sqrt(np.einsum("nqd,nqd->nq", parts, parts))
    is_off: Array = (np.abs(norms - 1) > _NORM).any(1)
    return is_off


def is_flip(rows: Array) -> Array:
    """Return `[n - 1]` bool: whether any quaternion changes its sign from a row to the next.

    `rows` is `[n, Q * 4]` or `[n, Q, 4]`.
    """
    parts = rows.reshape(len(rows), -1, 4)
    products = np.einsum("nqd,nqd->nq", parts[1:], parts[:-1])
    flips: Array = (products < _FLIP).any(1)
    return flips


@checks("VAL11", Rotations)
def norm(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report quaternions whose norm is not 1."""
    for name in scan.role("quaternion"):
        count = scan.collected(Rotations).num_off[name]
        share = float(count.sum() / max(1, scan.facts[name].num_rows))
        if share > settings["share"]:
            numbers = worst(np.flatnonzero(count), count)
            message = f"{share:.1%} of the quaternions {name!r} do not have the norm 1"
            frames = scan.runs(numbers, name, is_off_norm)
            yield Defect(name, message, numbers, frames, {"share": share})


@checks("VAL12", Rotations)
def flips(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report quaternions that change their sign from one frame to the next."""
    for name in scan.role("quaternion"):
        count = scan.collected(Rotations).num_flips[name]
        numbers = worst(np.flatnonzero(count), count)
        if len(numbers):
            num_flips = int(count.sum())
            message = f"{name!r} changes its sign {num_flips:,} times within episodes"
            evidence = {"flips": num_flips, "dot_below": _FLIP}
            yield Defect(name, message, numbers, scan.runs(numbers, name, is_flip), evidence)


@checks("VAL13", Rotations)
def order(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report quaternions that are wxyz in some episodes and xyzw in others."""
    for name in scan.role("quaternion"):
        means = scan.collected(Rotations).mean[name]
        for quaternion in range(means.shape[1]):
            yield from _order_of(scan, settings, name, quaternion, means[:, quaternion])


def _order_of(
    scan: Scan,
    settings: Settings,
    name: str,
    quaternion: int,
    mean: Array,
) -> Iterator[Defect]:
    """Report episodes in which one quaternion is wxyz if it is xyzw in the others, or the reverse.

    A small rotation has w as its largest component: the first one in wxyz, the last one in xyzw.
    The episodes form two groups by this position. The smaller group has another order if its
    quaternions resemble those of the larger group after rolling the components by one.

    `quaternion` is the index of the quaternion in the field. `mean` `[E, 4]` is its mean in each
    episode.
    """
    is_known = np.abs(mean).max(1) > 0
    largest = np.where(is_known, np.abs(mean).argmax(1), -1)
    first_is_largest = np.flatnonzero(largest == 0)
    last_is_largest = np.flatnonzero(largest == 3)
    few, many = sorted((first_is_largest, last_is_largest), key=len)
    if len(few) < settings["episodes"]:
        return
    rolled = np.roll(mean[few], 1 if largest[few[0]] == 3 else -1, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        # Distances of the smaller group to the larger group, in standard deviations of the larger.
        centre = mean[many].mean(0)
        spread = np.maximum(mean[many].std(0), 0.01)
        before = np.abs((mean[few].mean(0) - centre) / spread).max()
        after = np.abs((rolled.mean(0) - centre) / spread).max()
        typical_after = np.median(np.abs(rolled - centre) / spread, axis=0).mean()
    # Even with the right order of components, the rotations of the two groups may differ. So it is
    # enough if rolling reduces a large distance to 1/8.
    is_near = after < max(settings["after"], before / 8)
    # The smaller group may have half turns instead of another order of components. Then rolling
    # makes only some components similar.
    is_near &= typical_after < before / 4
    if before > settings["before"] and is_near:
        evidence = {
            "deviations_before": before,
            "deviations_after_rolling": after,
            "quaternion": quaternion,
        }
        message = f"{name!r} is wxyz in some trajectories and xyzw in others"
        yield Defect(name, message, few, scan.whole(few), evidence)
