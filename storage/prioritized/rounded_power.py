"""Powers of priorities that have the same bits on every processor, as they decide draws.

`pow` of two processors differs in the last bits of a float64, and so do two places of one array. Here a power is
rounded to 33 of its 53 bits, which hides the difference, unless the power lies next to the middle between two
rounded numbers. Those powers, one in 65,000, are computed exactly enough in decimals.
"""

from __future__ import annotations

from decimal import Context

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Bits of a float64 that are rounded away; the relative error of 33 bits is below 2e-10.
_NUM_ROUNDED = 20
_ROUNDED = (1 << _NUM_ROUNDED) - 1
_HALF = 1 << (_NUM_ROUNDED - 1)
#: Units in the last place by which `pow` of any processor may differ from the true power; numpy promises 4.
_MAX_ERROR = 8
#: 40 digits are 24 more than a float64 has. A power takes 0.5 ms.
_EXACT = Context(prec=40)


def rounded_power(base: Floats, exponent: float) -> Floats:
    """Return `base ** exponent`, rounded to 33 bits: a new array.

    Args:
        base: `[n]`, finite and >= 0; no power may overflow.
        exponent: Finite and >= 0; 1 rounds nothing.
    """
    if exponent == 1:
        unrounded: Floats = base.copy()
        return unrounded
    power: Floats = base**exponent
    bits = power.view(np.int64)
    bits += _HALF  # What stays after cutting off the last bits is rounded.
    is_doubtful = ((bits + _MAX_ERROR) & _ROUNDED) < 2 * _MAX_ERROR
    if is_doubtful.any():
        for doubtful in np.unique(base[is_doubtful]).tolist():
            true_power = np.array(_true_power(doubtful, exponent))
            bits[base == doubtful] = true_power.view(np.int64) + _HALF
    bits &= ~_ROUNDED
    return power


def _true_power(base: float, exponent: float) -> float:
    """Return the float64 nearest to a power."""
    return float(_EXACT.power(_EXACT.create_decimal(base), _EXACT.create_decimal(exponent)))
