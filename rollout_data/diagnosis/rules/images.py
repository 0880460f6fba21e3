"""Rules IMG: pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ..finding import Found, Inapplicable, Rule, Settings
from ..pictures import Camera, Cameras
from ..scan import Scan

#: Gives (which episodes, what was compared, message) of one camera.
_Measure = Callable[[Camera, Scan, Settings], tuple[Any, Any, str]]


def _each(measure: _Measure, scan: Scan, settings: Settings) -> Iterator[Found]:
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
            frames = [(number, 0, scan.lengths[number]) for number in order]
            evidence = {"values": [float(values[number]) for number in order[:20]], **dict(settings)}
            yield Found(name, f"{message} in {len(numbers)} episodes", numbers, frames, evidence)


def _black(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    return camera.dark >= settings["frames"], camera.dark, "frames are black"


def _blown(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    share = camera.mean(camera.bright)
    return share > settings["share"], share, "frames are white in large parts"


def _frozen(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    share = camera.repeats / np.maximum(1, scan.lengths - 1)
    is_noisy = np.median(share[camera.looked > 0]) < settings["usual"]
    moves = scan.collected(Cameras).moves
    return (camera.hold >= settings["frames"] - 1) & moves & is_noisy, camera.hold, "the picture stands still"


def _swapped(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    is_lit = (camera.looked > 0) & (camera.dark == 0)
    if camera.channels < 3 or not is_lit.any():
        return np.zeros(scan.num_episodes, bool), camera.dark, ""
    grid = camera.mean(camera.grid)[..., :3]
    usual = np.median(grid[is_lit], axis=0)
    told, swapped = (np.abs(one - usual).mean((1, 2)) for one in (grid, grid[..., ::-1]))
    wrong = (told > settings["levels"]) & (told > settings["ratio"] * swapped)
    return wrong, told, "red and blue seem exchanged"


def _layout(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    variation = camera.mean(camera.variation)
    told, other = variation[:, 0], variation[:, 1]
    share = other.sum(1) / np.maximum(told.sum(1), 1e-9)
    wrong = (share < settings["share"]) & (other < 0.95 * told).all(1) & (camera.channels > 1)
    return wrong, share, "neighbours are more alike with channels at the other end"


def _blurred(camera: Camera, scan: Scan, settings: Settings) -> tuple[Any, Any, str]:
    sharp = camera.mean(camera.sharp)
    usual = np.median(sharp[camera.looked > 0])
    wrong = (sharp < settings["share"] * usual) & (camera.dark == 0)
    alone = (wrong & (camera.looked > 0)).sum() < 2
    return wrong & (sharp < settings["share"] * usual * (0.5 if alone else 1)), usual - sharp, "pictures are blurred"


def value_range(scan: Scan, settings: Settings) -> Iterator[Found]:
    """IMG06: floats of two ranges, or bytes of 0 and 1 only."""
    for name, camera in scan.collected(Cameras).found.items():
        there = camera.looked > 0
        if not there.any():
            continue
        if scan.schema[name].dtype == "uint8":
            if camera.high[there].max() <= 1 and camera.low[there].min() < camera.high[there].max():
                yield Found(name, "bytes of 0 and 1 only", np.flatnonzero(there))
            continue
        large, small = there & (camera.high > 1.5), there & (camera.high <= 1)
        if large.any() and small.any():
            fewer = large if large.sum() < small.sum() else small
            yield Found(name, "some episodes reach 1, some 255", np.flatnonzero(fewer))


def same_camera(scan: Scan, settings: Settings) -> Iterator[Found]:
    """IMG08: two fields hold the same pictures."""
    cameras = scan.collected(Cameras)
    for (one, other), is_unlike in cameras.unlike.items():
        if not is_unlike and cameras.found[one].looked.any() and cameras.found[other].looked.any():
            yield Found(other, f"{other!r} is {one!r}", evidence={"fields": [one, other]})


def undecodable(scan: Scan, settings: Settings) -> Iterator[Found]:
    """IMG09: a picture or a video cannot be decoded, or lacks frames."""
    if scan.failure is None:
        scan.collected(Cameras)
    yield from scan.files.told("undecodable")


_W, _G = "warning", (Cameras,)
IMAGES: tuple[Rule, ...] = (
    Rule("IMG01", "black", "images", _W, "G", "K", "pictures are black", "look at the camera and its cable",
         partial(_each, _black), {"frames": 3}, collectors=_G),
    Rule("IMG02", "blown out", "images", _W, "G", "K", "pictures are white in large parts", "lower the exposure",
         partial(_each, _blown), {"share": 0.1}, collectors=_G),
    Rule("IMG03", "frozen", "images", _W, "G", "K", "the picture stands still while the action moves",
         "leave the trajectory out, or look at the camera's driver", partial(_each, _frozen),
         {"frames": 10, "usual": 0.02}, collectors=_G),
    Rule("IMG04", "channels", "images", _W, "G", "N", "red and blue are exchanged in some episodes",
         "exchange them back", partial(_each, _swapped), {"levels": 8, "ratio": 3}, compares=True, collectors=_G),
    Rule("IMG05", "layout", "images", _W, "G", "N", "pictures have their channels at the other end",
         "transpose them", partial(_each, _layout), {"share": 0.7}, absolute=True, collectors=_G),
    Rule("IMG06", "range", "images", _W, "G", "N", "pictures have another range of values", "scale them alike",
         value_range, absolute=True, collectors=_G),
    Rule("IMG07", "blur", "images", _W, "G", "K", "pictures are blurred", "clean or focus the camera",
         partial(_each, _blurred), {"share": 0.3}, compares=True, collectors=_G),
    Rule("IMG08", "same camera", "images", _W, "G", "-", "two fields hold the same pictures",
         "look at how the cameras are named", same_camera, absolute=True, collectors=_G),
    Rule("IMG09", "undecodable", "images", "error", "G", "K", "pictures cannot be decoded, or are missing",
         "take the file from a copy, or leave the trajectory out", undecodable, absolute=True, collectors=_G),
)  # fmt: skip
