"""The numbers that a user may give, in a flag, a variable or a file."""

import argparse
import math
from dataclasses import dataclass

LARGEST = 1e100  # a larger number overflows in arithmetic
ABOVE_ZERO = math.ulp(0)  # the smallest number above 0


@dataclass(frozen=True)
class Limits:
    """The limits of a number, which is also finite. besides: a number that is allowed in spite of the limits."""

    at_least: float = 0
    below: float = LARGEST
    besides: float | None = None

    def refusal(self, value: object) -> tuple[str, str] | None:
        """Return what is wrong with a number and what to give instead, None if nothing is wrong."""
        if not isinstance(value, int | float) or value == self.besides or self.at_least <= value < self.below:
            return None
        wanted = "above 0" if self.at_least == ABOVE_ZERO else f"of at least {self.at_least}"
        below = "" if value < self.at_least and self.below == LARGEST else f" and below {self.below}"
        return f"{value!s:.20} is out of range", f"give a number {wanted}{below}"

    def number(self, text: str) -> float:
        """Read the value of a flag, as argparse's `type`. Raise ArgumentTypeError for a number outside the limits."""
        value = int(text) if text.lstrip("-").isdecimal() else float(text)
        if refusal := self.refusal(value):
            raise argparse.ArgumentTypeError(", ".join(refusal))
        return value

    def whole_number(self, text: str) -> int:
        self.number(text)
        return int(text)
