"""Powers of priorities that have the same bits on every processor, as they decide draws."""

from __future__ import annotations

from decimal import Context

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Bits of a float64 that are rounded away: 33 of 53 stay, a relative error below 2e-10.
_NUM_ROUNDED = 20
_ROUNDED = (1 << _NUM_ROUNDED) - 1
_HALF = 1 << (_NUM_ROUNDED - 1)
#: Units in the last place by which `pow` of any processor may differ from the true power; numpy promises 4.
_MAX_ERROR = 8
_EXACT = Context(prec=40)


def rounded_power(base: Floats, exponent: float) -> Floats:
    """Return `base ** exponent`, rounded to 33 bits; infinite where float64 ends.

    `pow` differs in the last bits between processors, and even between places of one array. Rounding
    hides that, save for one number in 65,000, where a difference could decide which way it is
    rounded. Those powers are computed with 40 decimal digits, in 0.5 ms each.

    Args:
        base: `[n]`, finite and >= 0.
        exponent: Finite and >= 0; 1 rounds nothing.
    """
    found: Floats = base.copy()
    if exponent == 1:
        return found
    with np.errstate(over="ignore"):
        found **= exponent
    bits = found.view(np.int64)
    bits += _HALF
    is_doubtful = ((bits + _MAX_ERROR) & _ROUNDED) < 2 * _MAX_ERROR
    for place in is_doubtful.nonzero()[0].tolist():
        true_power = _EXACT.power(_EXACT.create_decimal(float(base[place])), _EXACT.create_decimal(exponent))
        bits[place] = np.float64(true_power).view(np.int64) + _HALF
    bits &= ~_ROUNDED
    return found
