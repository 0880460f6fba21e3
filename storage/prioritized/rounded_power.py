"""Powers of priorities with equal bits on every processor, so that draws are reproducible.

The last bits of `pow` differ between processors, and even between positions of one array. So a
power is rounded to 33 of its 53 bits. If a power is almost exactly between two rounded numbers,
two processors may still round it to different numbers. Such powers, one in 65,000, are computed
with 40 decimal digits.
"""

from __future__ import annotations

from decimal import Context

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Rounding removes this number of the 53 bits of a float64. The relative error is below 2e-10.
_NUM_ROUNDED = 20
_ROUNDED = (1 << _NUM_ROUNDED) - 1
_HALF = 1 << (_NUM_ROUNDED - 1)
#: Assumed maximum error of numpy's power, in units in the last place. Numpy guarantees 4.
_MAX_ERROR = 8
#: Precision of exact powers: 40 digits, 24 more than a float64. A power takes 0.5 ms.
_EXACT = Context(prec=40)


def rounded_power(base: Floats, exponent: float) -> Floats:
    """Return `base ** exponent`, rounded to 33 bits: a new array.

    Args:
        base: `[n]`, finite and >= 0; no power may overflow.
        exponent: Finite and >= 0. With the exponent 1, the result is `base` without rounding.
    """
    if exponent == 1:
        unrounded: Floats = base.copy()
        return unrounded
    power: Floats = base**exponent
    bits = power.view(np.int64)
    bits += _HALF  # Cutting off the last bits below then rounds to the nearest number.
    is_doubtful = ((bits + _MAX_ERROR) & _ROUNDED) < 2 * _MAX_ERROR
    if is_doubtful.any():
        for doubtful in np.unique(base[is_doubtful]).tolist():
            true_power = np.array(_true_power(doubtful, exponent))
            bits[base == doubtful] = true_power.view(np.int64) + _HALF
    bits &= ~_ROUNDED
    return power


def _true_power(base: float, exponent: float) -> float:
    """Return the float64 nearest to the exact `base ** exponent`."""
    return float(_EXACT.power(_EXACT.create_decimal(base), _EXACT.create_decimal(exponent)))
