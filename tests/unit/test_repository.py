"""What holds in the whole repository: its pins, the help of its scripts, who imports whom, and how a script ends."""

import ast
import graphlib
import json
import re

import pytest
import yaml

from helpers import REPOSITORY
from names import PROMISED, names
from shared.paths import workshop_version

SCRIPTS = REPOSITORY / "scripts"


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


def test_no_promised_name_is_gone():
    now = names()
    for kind, promised in json.loads(PROMISED.read_text()).items():
        gone = set(promised) - set(now[kind])
        assert not gone, "keep the name, or the next version is 2.0.0: docs/instructor/own-copy.md"


def test_the_changelog_begins_with_this_version():
    _to_come, latest, *_ = re.findall(r"^## (.*)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest.startswith(f"{workshop_version()} (")


def test_the_key_file_is_ignored_by_git():
    assert "experiments/wandb_key" in (REPOSITORY / ".gitignore").read_text().splitlines()


# The modules of scripts/


MODULES = {
    ".".join(path.relative_to(SCRIPTS).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SCRIPTS.rglob("*.py"))
}
ENDS = {"run_program(main)", "run_and_exit(main)"}

each_module = pytest.mark.parametrize("name", MODULES)


def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports_of(name: str) -> set[str]:
    """The modules of scripts/ that this one imports, in functions too."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write the whole name of {node.module}"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def test_no_module_imports_itself_through_others():
    try:
        graphlib.TopologicalSorter({name: imports_of(name) for name in MODULES}).prepare()
    except graphlib.CycleError as error:
        circle = " <- ".join(error.args[1])
        pytest.fail(f"{circle}: move what both sides need into a module of its own")


@each_module
def test_a_command_ends_in_the_one_way(name):
    """So that a WorkshopError is one line and an exit code, whatever the script."""
    body = tree_of(name).body
    has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in body)
    guards = [node for node in body if is_main_guard(node)]
    assert has_main == bool(guards), f'{MODULES[name]}: a main() and `if __name__ == "__main__":` go together'
    for guard in guards:
        assert guard is body[-1], f'{MODULES[name]}: let `if __name__ == "__main__":` be the end of the file'
        calls = [ast.unparse(node) for node in guard.body]
        if name in ("job.with_parent", "job.on_node", "config"):  # they have the standard library only
            continue
        assert len(calls) == 1 and calls[0] in ENDS, f"{MODULES[name]}: end with run_program(main), of errors.py"


@each_module
def test_the_help_names_files_that_exist(name):
    text = ast.get_docstring(tree_of(name)) or ""
    for path in re.findall(r"(?<!\S)((?:scripts|ds_configs|data|experiments|fsdp_configs)/[\w./-]+\.\w+)", text):
        assert (REPOSITORY / path).exists(), path
