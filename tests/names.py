"""The names that a version promises (docs/instructor/own-copy.md). At a release this writes them down:

PYTHONPATH=scripts python tests/names.py
"""

import json

from config import KNOBS
from shared import errors
from shared.paths import REPOSITORY
from shared.run_record import Record

PROMISED = REPOSITORY / "tests" / "data" / "names.json"


def names() -> dict[str, list[str]]:
    """Kind -> what there is of it now."""
    patterns = ("experiments/**/*.slurm", "ds_configs/*.json", "fsdp_configs/*.json", "scripts/*.py")
    schema = Record.model_json_schema()
    parts = {"Record": schema} | schema["$defs"]
    codes = ("BAD_INPUT", "ENVIRONMENT", "NO_CHECKPOINT", "STOPPED")
    found = {
        "knobs": [f"{knob.variable} --{knob.flag}" for knob in KNOBS],
        "files": [str(path.relative_to(REPOSITORY)) for pattern in patterns for path in REPOSITORY.glob(pattern)],
        "record": [f"{part} {field}" for part, content in parts.items() for field in content.get("properties", {})],
        "exit codes": [f"{name} {getattr(errors, name)}" for name in codes],
    }
    return {kind: sorted(each) for kind, each in found.items()}


if __name__ == "__main__":
    PROMISED.write_text(json.dumps(names(), indent=1) + "\n")
