"""Collect the names that a version promises to keep (docs/instructor/own-copy.md). Store them for a release with:

PYTHONPATH=scripts python tests/names.py
"""

import json
import re

from config import KNOBS
from records.schema import Record
from shared import errors
from shared.paths import EXPERIMENTS, REPOSITORY

PROMISED = REPOSITORY / "tests" / "data" / "names.json"
EXIT_CODES = ("BAD_INPUT", "ENVIRONMENT", "NO_CHECKPOINT", "STOPPED")


def names() -> dict[str, list[str]]:
    """The current names of each kind."""
    patterns = ("experiments/**/*.slurm", "ds_configs/*.json", "fsdp_configs/*.json", "scripts/*.py")
    paths = [path for pattern in patterns for path in REPOSITORY.glob(pattern)]
    modules = {path for path in paths if path.suffix == ".py" and '"__main__"' not in path.read_text()}
    schema = Record.model_json_schema()
    parts = {"Record": schema} | schema["$defs"]
    site = (EXPERIMENTS / "sites" / "example.sh").read_text()
    job = (EXPERIMENTS / "job.sh").read_text()
    targets = re.search(r"^\.PHONY: (.*)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert targets
    found = {
        "knobs": [f"{knob.variable} --{knob.flag}" for knob in KNOBS],
        "variables of a site": {*re.findall(r"\${(\w+):", site)},
        "functions of a job": re.findall(r"^((?:run|check)_\w+)\(\)", job, re.MULTILINE),
        "files": [str(path.relative_to(REPOSITORY)) for path in paths if path not in modules],
        "targets of make": targets[1].split(),
        "exit codes": [f"{name} {getattr(errors, name)}" for name in EXIT_CODES],
        "record": [f"{part} {field}" for part, content in parts.items() for field in content.get("properties", {})],
    }
    return {kind: sorted(each) for kind, each in found.items()}


if __name__ == "__main__":
    PROMISED.write_text(json.dumps(names(), indent=1) + "\n")
