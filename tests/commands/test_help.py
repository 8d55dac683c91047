"""Tests of the --help output of every command, called from another directory."""

import ast
import re

import pytest

from helpers import REPOSITORY
from workbench import Bench

SCRIPTS = REPOSITORY / "scripts"
COMMANDS = [path for path in sorted(SCRIPTS.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_help_opens_with_the_purpose_and_commands_to_copy(path, server, tmp_path):
    finished = Bench(server, tmp_path / "elsewhere", {}).run("--help", script=path)
    purpose = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    beginning = finished.out.split("options:")[0].splitlines()[:30]
    assert purpose in beginning, finished.out[:2000]
    assert beginning.index(purpose) < 8, "the purpose must be among the first lines"
    words = rf"\s*(((PYTHONPATH=\S+ )?python|torchrun|srun) .*{path.name}|experiments/{path.stem}\.sh )"
    assert [line for line in beginning if re.match(words, line)]
