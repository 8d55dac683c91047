"""What the repository says about itself: its pins, and the commands in the help of its scripts."""

import ast
import re

import pytest
import yaml

from helpers import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
COMMANDS = [
    path for path in sorted([*SCRIPTS.glob("*.py"), *SCRIPTS.glob("job/*.py")]) if "__main__" in path.read_text()
]


def pins(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", "-r"))]


def test_pip_and_conda_install_the_same_pins():
    requirements = pins((REPOSITORY / "requirements.txt").read_text().splitlines())
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    (by_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert by_pip == requirements
    assert environment["name"] == "deepspeed-finetune"


def test_every_requirement_is_pinned_and_the_stack_complete():
    development = pins((REPOSITORY / "requirements-dev.txt").read_text().splitlines())
    requirements = pins((REPOSITORY / "requirements.txt").read_text().splitlines())
    for line in requirements + development:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", line), line
    names = {line.split("==")[0] for line in requirements}
    assert names >= {"torch", "transformers", "accelerate", "deepspeed", "datasets", "torchmetrics", "psrecord"}


def test_python_of_the_environment_is_one_that_the_project_takes():
    required = re.search(r'requires-python = ">=3\.(\d+)"', (REPOSITORY / "pyproject.toml").read_text())
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    (python,) = [d for d in environment["dependencies"] if isinstance(d, str) and d.startswith("python")]
    assert int(python.split(".")[1]) >= int(required[1]) >= 11


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_commands_in_the_help_name_flags_and_files_that_exist(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    for name in re.findall(r"(?<!\S)((?:scripts|ds_configs|data|experiments|fsdp_configs)/[\w./-]+\.\w+)", text):
        assert (REPOSITORY / name).exists(), name
