"""Where the parts of the repository are, and how a path is told without the machine it is on."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = REPOSITORY / "scripts"
EXPERIMENTS = REPOSITORY / "experiments"
REQUIREMENTS = REPOSITORY / "requirements.txt"
SAMPLE = REPOSITORY / "data" / "squad_sample.json"
