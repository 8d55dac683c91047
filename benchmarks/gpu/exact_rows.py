"""Run train.py with rows that are not rounded up (scripts/data_loader.py::round_up), as in version 2.0.0.

run.py starts it: the items `before-*` are the other half of the pairs `after-*`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import data_loader
import train


def keep(tokens: int, parts: int, largest: int) -> int:
    """Keep the row's length, and round the longest question up to a multiple of 8."""
    return tokens + -tokens % 8 if largest == 128 else tokens


if __name__ == "__main__":
    data_loader.round_up = keep
    train.run_and_exit(train.main)
