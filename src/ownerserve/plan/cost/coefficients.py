"""The three numbers of a pass: t = a + b * new + c * new * (prefix + new / 2); compute fits them.

Apart from the fit, so that whoever only prices (the router) need not import numpy.
"""

from __future__ import annotations

import msgspec


class Coefficients(msgspec.Struct, frozen=True):
    """a, b and c, in ms."""

    a_ms: float
    b_ms: float
    c_ms: float

    def ms(self, new: int, prefix: int) -> float:
        """Time to compute `new` tokens after `prefix` others; nothing for none."""
        if new <= 0:
            return 0.0
        return self.a_ms + new * (self.b_ms + self.c_ms * (prefix + 0.5 * new))

    def scaled(self, factor: float) -> Coefficients:
        return Coefficients(self.a_ms * factor, self.b_ms * factor, self.c_ms * factor)
