"""Tests of the --help output of every command, called from another directory."""

import ast
import re

import pytest

from helpers import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
ONLY_FOR_JOB_SH = (
    "end_with_parent.py",
    "on_node.py",
)  # they have no --help: their arguments are commands and process ids
COMMANDS = [
    path
    for path in sorted([*SCRIPTS.glob("*.py"), *SCRIPTS.glob("job/*.py")])
    if "__main__" in path.read_text() and path.name not in ONLY_FOR_JOB_SH
]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_help_opens_with_the_purpose_and_commands_to_copy(path, command):
    name = f"job.{path.stem}" if path.parent.name == "job" else path.name
    finished = command(name, "--help")
    assert finished.code == 0, finished
    purpose = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    beginning = finished.out.split("options:")[0].splitlines()[:30]
    assert purpose in beginning, finished.out[:2000]
    assert beginning.index(purpose) < 8, "the purpose must be among the first lines"
    words = rf"\s*(((PYTHONPATH=\S+ )?python|torchrun|srun) .*{name}|experiments/{path.stem}\.sh )"
    assert [line for line in beginning if re.match(words, line)]
