"""Rules IMG: defects of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..batched_reading import Array
from ..camera_facts import Camera, Cameras
from ..field_facts import worst
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Scan


class _Measurement(NamedTuple):
    """Result of comparing the episodes of one image field.

    Attributes:
        is_wrong: bool `[E]`, whether an episode has the defect.
        values: `[E]`, measured values. The largest absolute values are the worst.
        message: Text about the defect, to which the number of episodes is appended.
    """

    is_wrong: Any
    values: Array
    message: str


_Measure = Callable[[Camera, Scan, Settings], _Measurement]


def _check_cameras(measure: _Measure, scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Apply a measure to each image field, and report the episodes that have the defect."""
    cameras = scan.collected(Cameras).cameras
    if not cameras:
        raise Inapplicable("no pictures")
    for name, camera in cameras.items():
        is_examined = camera.looked > 0
        if not is_examined.any():
            continue
        is_wrong, values, message = measure(camera, scan, settings)
        numbers = np.flatnonzero(is_wrong & is_examined)
        if len(numbers):
            ordered = worst(numbers, np.abs(values))
            yield Defect(
                name,
                f"{message} in {len(numbers)} episodes",
                numbers,
                scan.whole(ordered),
                {"values": [float(values[number]) for number in ordered[:20]]},
            )


def _measures(code: str) -> Callable[[_Measure], _Measure]:
    """Return a decorator that registers a measure as the check of the rule `code`.

    The measure is applied to each image field by `_check_cameras`.
    """

    def register(measure: _Measure) -> _Measure:
        checks(code, Cameras)(partial(_check_cameras, measure))
        return measure

    return register


@_measures("IMG01")
def _black(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    return _Measurement(camera.dark >= settings["frames"], camera.dark, "frames are black")


@_measures("IMG02")
def _blown_out(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    share = camera.mean(camera.bright)
    return _Measurement(share > settings["share"], share, "frames are white in large parts")


@_measures("IMG03")
def _frozen(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    share = camera.repeats / np.maximum(1, scan.lengths - 1)
    usually_changes = np.median(share[camera.looked > 0]) < settings["usual"]
    is_wrong = (camera.hold >= settings["frames"] - 1) & usually_changes
    return _Measurement(is_wrong, camera.hold, "the picture stands still")


@_measures("IMG04")
def _channels_swapped(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    is_lit = (camera.looked > 0) & (camera.dark == 0)
    if camera.channels < 3 or not is_lit.any():
        return _Measurement(np.zeros(scan.num_episodes, bool), camera.dark, "")
    colours = camera.mean(camera.grid)[..., :3]
    usual = np.median(colours[is_lit], axis=0)
    distance = np.abs(colours - usual).mean((1, 2))
    swapped_distance = np.abs(colours[..., ::-1] - usual).mean((1, 2))
    is_wrong = distance > settings["levels"]
    is_wrong &= distance > settings["ratio"] * swapped_distance
    return _Measurement(is_wrong, distance, "red and blue seem exchanged")


@_measures("IMG05")
def _layout(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    variation = camera.mean(camera.variation)
    declared = variation[:, 0]
    other = variation[:, 1]
    share = other.sum(1) / np.maximum(declared.sum(1), 1e-9)
    is_wrong = share < settings["share"]
    is_wrong &= (other < 0.95 * declared).all(1)
    is_wrong &= camera.channels > 1
    message = "neighbours are more alike with channels at the other end"
    return _Measurement(is_wrong, share, message)


@_measures("IMG07")
def _blurred(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    is_examined = camera.looked > 0
    sharpness = camera.mean(camera.sharp)
    usual = np.median(sharpness[is_examined])
    limit = settings["share"] * usual
    is_wrong = (sharpness < limit) & (camera.dark == 0)
    if (is_wrong & is_examined).sum() < 2:
        is_wrong &= sharpness < 0.5 * limit
    return _Measurement(is_wrong, usual - sharpness, "pictures are blurred")


@checks("IMG06", Cameras)
def value_range(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report float images with mixed ranges [0, 1] and [0, 255], or uint8 images of 0 and 1."""
    for name, camera in scan.collected(Cameras).cameras.items():
        is_examined = camera.looked > 0
        if not is_examined.any():
            continue
        if scan.schema[name].dtype == "uint8":
            numbers = np.flatnonzero(is_examined & (camera.high == 1) & (camera.low == 0))
            if len(numbers):
                yield Defect(name, "bytes of 0 and 1 only", numbers)
            continue
        is_large = is_examined & (camera.high > 1.5)
        is_small = is_examined & (camera.high <= 1)
        if is_large.any() and is_small.any():
            rarer = is_large if is_large.sum() < is_small.sum() else is_small
            yield Defect(name, "some episodes reach 1, some 255", np.flatnonzero(rarer))


@checks("IMG08", Cameras)
def same_camera(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report pairs of image fields that have the same images."""
    cameras = scan.collected(Cameras)
    for pair, is_unlike in cameras.is_unlike.items():
        if not is_unlike and all(cameras.cameras[name].looked.any() for name in pair):
            first, second = pair
            message = f"{second!r} equals {first!r}"
            yield Defect(second, message, evidence={"fields": [first, second]})


@checks("IMG09", Cameras)
def undecodable(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Decode all images. Errors of decoding become problems of the scan, which are reported."""
    if scan.failure is None:
        scan.collected(Cameras)
    yield from ()
