"""Rules IMG: defects of images.

Most of these rules have a measure: a function that compares the episodes of one image field.
"""

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
    """Result of a measure for one image field.

    Attributes:
        is_wrong: bool `[E]`, whether an episode has the defect.
        values: `[E]`, measured values. The episodes with the largest absolute values are the worst.
        message: Beginning of the message, which is continued by "in 3 episodes".
    """

    is_wrong: Any
    values: Array
    message: str


_Measure = Callable[[Camera, Scan, Settings], _Measurement]


def _check_cameras(measure: _Measure, scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report the episodes that have a defect according to `measure`, for each image field."""
    cameras = scan.collected(Cameras).cameras
    if not cameras:
        raise Inapplicable("no pictures")
    for name, camera in cameras.items():
        is_examined = camera.num_examined > 0
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
    """Return a decorator that registers a measure as the check function of the rule `code`.

    The check function is `_check_cameras`, with the decorated function as its measure.
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
    usually_changes = np.median(share[camera.num_examined > 0]) < settings["usual"]
    is_wrong = (camera.hold >= settings["frames"] - 1) & usually_changes
    return _Measurement(is_wrong, camera.hold, "the picture stands still")


@_measures("IMG04")
def _channels_swapped(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    is_lit = (camera.num_examined > 0) & (camera.dark == 0)
    if camera.channels < 3 or not is_lit.any():
        return _Measurement(np.zeros(scan.num_episodes, bool), camera.dark, "")
    colours = camera.mean(camera.grid)[..., :3]
    usual = np.median(colours[is_lit], axis=0)
    distance = np.abs(colours - usual).mean((1, 2))
    swapped_distance = np.abs(colours[..., ::-1] - usual).mean((1, 2))
    is_wrong = distance > settings["levels"]
    is_wrong &= distance > settings["ratio"] * swapped_distance
    return _Measurement(is_wrong, distance, "red and blue seem to be exchanged")


@_measures("IMG05")
def _layout(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    variation = camera.mean(camera.variation)
    declared = variation[:, 0]
    other = variation[:, 1]
    share = other.sum(1) / np.maximum(declared.sum(1), 1e-9)
    is_wrong = share < settings["share"]
    is_wrong &= (other < 0.95 * declared).all(1)
    is_wrong &= camera.channels > 1
    message = "adjacent pixels are more similar with the channels on the other axis"
    return _Measurement(is_wrong, share, message)


@_measures("IMG07")
def _blurred(camera: Camera, scan: Scan, settings: Settings) -> _Measurement:
    is_examined = camera.num_examined > 0
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
        is_examined = camera.num_examined > 0
        if not is_examined.any():
            continue
        if scan.schema[name].dtype == "uint8":
            numbers = np.flatnonzero(is_examined & (camera.high == 1) & (camera.low == 0))
            if len(numbers):
                yield Defect(name, "the uint8 values are only 0 and 1", numbers)
            continue
        is_large = is_examined & (camera.high > 1.5)
        is_small = is_examined & (camera.high <= 1)
        if is_large.any() and is_small.any():
            rarer = is_large if is_large.sum() < is_small.sum() else is_small
            yield Defect(
                name,
                "the values reach 1 in some episodes, and 255 in others",
                np.flatnonzero(rarer),
            )


@checks("IMG08", Cameras)
def same_camera(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report pairs of image fields that have the same images."""
    cameras = scan.collected(Cameras)
    for pair, is_unlike in cameras.is_unlike.items():
        if not is_unlike and all(cameras.cameras[name].num_examined.any() for name in pair):
            first, second = pair
            message = f"{second!r} equals {first!r}"
            yield Defect(second, message, evidence={"fields": [first, second]})


@checks("IMG09", Cameras)
def undecodable(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Decode all images, and return no defects.

    The scan stores the errors of decoding. `diagnose` reports them as defects of this rule.
    """
    if scan.failure is None:
        scan.collected(Cameras)
    yield from ()
