"""Where the parts of the repository are."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
EXPERIMENTS = REPOSITORY / "experiments"
REQUIREMENTS = REPOSITORY / "requirements.txt"
SAMPLE = REPOSITORY / "data" / "squad_sample.json"
