"""Paths in the repository, and its version."""

import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
REQUIREMENTS = REPOSITORY / "requirements.txt"
CONSTRAINTS = REPOSITORY / "constraints.txt"
SAMPLE = REPOSITORY / "data" / "squad_sample.json"
CHECKPOINT_MARKER = "complete.json"  # the file that is written last into a checkpoint
ADAPTER_FOLDER = "adapter"  # in the folder of a run with LoRA: its adapters for PEFT
ADAPTER_CONFIG = "adapter_config.json"


def saved_model(output_dir: str | Path) -> Path | None:
    """Return the folder with the saved model of a run, or with its adapters only; None if there is neither."""
    configs = (Path(output_dir, "config.json"), Path(output_dir, ADAPTER_FOLDER, ADAPTER_CONFIG))
    return next((config.parent for config in configs if config.exists()), None)


def workshop_version() -> str:
    """Return the version in pyproject.toml, such as 1.0.0. See docs/instructor/own-copy.md for its meaning."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
