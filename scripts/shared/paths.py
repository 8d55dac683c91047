"""Paths in the repository, and its version."""

import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
REQUIREMENTS = REPOSITORY / "requirements.txt"
CONSTRAINTS = REPOSITORY / "constraints.txt"
SAMPLE = REPOSITORY / "data" / "squad_sample.json"
CHECKPOINT_MARKER = "complete.json"  # the file that is written last into a checkpoint


def workshop_version() -> str:
    """Return the version in pyproject.toml, such as 1.0.0. See docs/instructor/own-copy.md for its meaning."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
