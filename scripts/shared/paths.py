"""Where the parts of the repository are."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
REQUIREMENTS = REPOSITORY / "requirements.txt"
SAMPLE = REPOSITORY / "data" / "squad_sample.json"
