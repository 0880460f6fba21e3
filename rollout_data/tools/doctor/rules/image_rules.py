"""Rules IMG: pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ..camera_facts import Camera, Cameras
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Scan

#: Gives (which episodes, what was compared, message) of one camera.
_Measure = Callable[[Camera, Scan, Settings], tuple[Any, Any, str]]


def _each(measure: _Measure, scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report the episodes of each camera that a measure chooses, with the numbers."""
    cameras = scan.collected(Cameras)
    if not cameras.found:
        raise Inapplicable("no pictures")
    for name, camera in cameras.found.items():
        if not camera.looked.any():
            continue
        which, values, message = measure(camera, scan, settings)
        numbers = np.flatnonzero(which & (camera.looked > 0))
        if len(numbers):
            order = numbers[np.argsort(-np.abs(values[numbers]), kind="stable")]
            evidence = {"values": [float(values[number]) for number in order[:20]]}
            yield Defect(name, f"{message} in {len(numbers)} episodes", numbers, scan.whole(order), evidence)


def _of_cameras(code: str) -> Callable[[_Measure], _Measure]:
    """Make a measure of one camera the check of a rule."""

    def register(measure: _Measure) -> _Measure:
        checks(code, Cameras)(partial(_each, measure))
        return measure

    return register


@_of_cameras("IMG01")
def _black(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    return camera.dark >= settings["frames"], camera.dark, "frames are black"


@_of_cameras("IMG02")
def _blown(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    share = camera.mean(camera.bright)
    return share > settings["share"], share, "frames are white in large parts"


@_of_cameras("IMG03")
def _frozen(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    share = camera.repeats / np.maximum(1, scan.lengths - 1)
    is_noisy = np.median(share[camera.looked > 0]) < settings["usual"]
    return (camera.hold >= settings["frames"] - 1) & is_noisy, camera.hold, "the picture stands still"


@_of_cameras("IMG04")
def _swapped(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    is_lit = (camera.looked > 0) & (camera.dark == 0)
    if camera.channels < 3 or not is_lit.any():
        return np.zeros(scan.num_episodes, bool), camera.dark, ""
    grid = camera.mean(camera.grid)[..., :3]
    usual = np.median(grid[is_lit], axis=0)
    told, swapped = (np.abs(one - usual).mean((1, 2)) for one in (grid, grid[..., ::-1]))
    wrong = (told > settings["levels"]) & (told > settings["ratio"] * swapped)
    return wrong, told, "red and blue seem exchanged"


@_of_cameras("IMG05")
def _layout(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    variation = camera.mean(camera.variation)
    told = variation[:, 0]
    other = variation[:, 1]
    share = other.sum(1) / np.maximum(told.sum(1), 1e-9)
    wrong = (share < settings["share"]) & (other < 0.95 * told).all(1) & (camera.channels > 1)
    return wrong, share, "neighbours are more alike with channels at the other end"


@_of_cameras("IMG07")
def _blurred(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    sharp = camera.mean(camera.sharp)
    usual = np.median(sharp[camera.looked > 0])
    wrong = (sharp < settings["share"] * usual) & (camera.dark == 0)
    alone = (wrong & (camera.looked > 0)).sum() < 2
    return wrong & (sharp < settings["share"] * usual * (0.5 if alone else 1)), usual - sharp, "pictures are blurred"


@checks("IMG06", Cameras)
def value_range(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Floats of two ranges, or bytes of 0 and 1 only."""
    for name, camera in scan.collected(Cameras).found.items():
        there = camera.looked > 0
        if not there.any():
            continue
        if scan.schema[name].dtype == "uint8":
            numbers = np.flatnonzero(there & (camera.high == 1) & (camera.low == 0))
            if len(numbers):
                yield Defect(name, "bytes of 0 and 1 only", numbers)
            continue
        large = there & (camera.high > 1.5)
        small = there & (camera.high <= 1)
        if large.any() and small.any():
            fewer = large if large.sum() < small.sum() else small
            yield Defect(name, "some episodes reach 1, some 255", np.flatnonzero(fewer))


@checks("IMG08", Cameras)
def same_camera(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Two fields hold the same pictures."""
    cameras = scan.collected(Cameras)
    for (one, other), is_unlike in cameras.unlike.items():
        if not is_unlike and cameras.found[one].looked.any() and cameras.found[other].looked.any():
            yield Defect(other, f"{other!r} is {one!r}", evidence={"fields": [one, other]})


@checks("IMG09", Cameras)
def undecodable(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Decode all pictures: what cannot be is a problem then."""
    if scan.failure is None:
        scan.collected(Cameras)
    yield from ()
