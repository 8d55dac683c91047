"""DeepSpeed's compiled optimizers are found again, also by the same environment under another name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import TINY, environment, run


def extensions() -> dict[Path, int]:
    """Each library and its build file below the caller's cache, with the time of its last change."""
    root = Path.home() / ".cache" / "torch_extensions"
    return {path: path.stat().st_mtime_ns for name in ("*.so", "build.ninja") for path in root.glob(f"*/*/{name}")}


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="this python is no virtual environment")
def test_a_link_to_the_environment_compiles_nothing_anew(workplace, tmp_path):
    """Snapshots and preflight's jobs have a link to .venv. Nor is the compiler asked, which DeepSpeed would do."""
    run(workplace, "compiles", "--deepspeed", "ds_configs/zero1.json", "--max_steps", "1", SAVE_STRATEGY="no")
    before = extensions()
    assert before
    (tmp_path / "link").symlink_to(sys.prefix)
    python = tmp_path / "link" / Path(sys.executable).relative_to(sys.prefix)
    values = TINY | {"HF_HOME": workplace / "hf", "JOB_ID": "linked", "SAVE_STRATEGY": "no", "HOME": os.environ["HOME"]}
    values["CXX"] = "no-such-compiler"
    command = [python, "scripts/train.py", "--deepspeed", "ds_configs/zero1.json", "--max_steps", "1"]
    variables = environment({name: str(value) for name, value in values.items()})
    done = subprocess.run(command, cwd=workplace, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert extensions() == before
