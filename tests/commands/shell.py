"""Experiments whose training is a few lines of Python, and stubs for programs on PATH."""

import os
import subprocess
import sys
from pathlib import Path

from helpers import REPOSITORY, directives


def program(folder: Path, name: str, lines: str) -> Path:
    """Write an executable bash script with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)
    return path


def shell_environment(**variables: object) -> dict[str, str]:
    path = f"{REPOSITORY}/tests/slurm/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    values = {"PATH": path, "HOME": os.environ["HOME"], "SITE": "laptop", "LOG_INTERVAL": "0.2"} | variables
    return {name: str(value) for name, value in values.items() if value is not None}


def start_stub(
    folder: Path,
    code: str,
    *arguments: str,
    lines: str = "",
    gpus: int = 1,
    verb: str = "run_python",
    words: tuple[str, ...] = ("bash", "x.slurm"),
    cwd: Path | None = None,
    **variables: object,
):
    """Write the experiment `folder`, whose training is `code`, and start it with `words` and `arguments`."""
    (folder / "log").mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text(code)
    body = f'set -e\nsource ../../job.sh\n{lines}\n{verb} code.py "$@"\n'
    (folder / "x.slurm").write_text(directives(1, gpus) + body)
    command, streams = [*words, *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = shell_environment(**variables)
    return subprocess.Popen(command, cwd=cwd or folder, env=environment, text=True, start_new_session=True, **streams)
