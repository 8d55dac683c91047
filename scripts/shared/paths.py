"""Where the parts of the repository are, and which version of it this is."""

import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
REQUIREMENTS = REPOSITORY / "requirements.txt"
SAMPLE = REPOSITORY / "data" / "squad_sample.json"


def workshop_version() -> str:
    """The version in pyproject.toml, such as 1.0.0; docs/instructor/own-copy.md says what it promises."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
