"""Check pins, promised names, the version, required lines of files, last lines of commands, and names of classes."""

import ast
import json
import re
from collections.abc import Iterator
from itertools import chain

from packaging.utils import canonicalize_name

from names import PROMISED, names
from shared.paths import workshop_version
from text_checks.common import SCRIPTS, TREES, differences, read, relative_name
from text_checks.imports import is_main_guard

GUARD = "if __name__ == '__main__':\n    "
ENDS = (f"{GUARD}run_program(main)", f"{GUARD}run_and_exit(main)")
# These programs import only the standard library: each node of a job waits for the imports of on_node.py
OTHER_ENDS = (SCRIPTS / "job" / "on_node.py", SCRIPTS / "config.py")


def findings() -> Iterator[str]:
    return chain(pins(), expected_lines(), promised_names(), ends_of_commands(), names_of_classes())


def read_pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", read(file), re.MULTILINE))


def pins() -> Iterator[str]:
    """Check that each package of the requirements is pinned, and has the same pin in constraints.txt."""
    constraints = read_pins("constraints.txt")
    for file in ("requirements.txt", "requirements-host.txt", "requirements-docs.txt", "requirements-dev.txt"):
        for line in re.findall(r"^\w.*", read(file), re.MULTILINE):
            name, _, pin = line.partition("==")
            if constraints.get(canonicalize_name(name)) != pin:
                yield f"{file}: {line}: not pinned in constraints.txt; write <package>==<version>, run make constraints"


def expected_lines() -> Iterator[str]:
    """Check that files have the lines that another file or a reader expects in them."""
    torch = read_pins("requirements.txt")["torch"]
    older_gpus = f"python -m pip install torch=={torch}+cu126 --index-url https://download.pytorch.org/whl/cu126"
    expected = {
        "CITATION.cff": f"\nversion: {workshop_version()}\n",
        ".gitignore": "\nexperiments/wandb_key\n",
        "docs/environment.md": older_gpus,
        "experiments/sites/example.sh": older_gpus,
        "scripts/checks/machine.py": older_gpus,
    }
    for name, line in expected.items():
        if line not in read(name):
            yield f"{name}: does not say `{line.strip()}`; write this line"
    _to_come, latest, *_ = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    yield from differences("CHANGELOG.md", "pyproject.toml", {"version": latest}, {"version": workshop_version()})


def promised_names() -> Iterator[str]:
    now = names()
    for kind, promised in json.loads(PROMISED.read_text()).items():
        for name in sorted({*promised} - {*now[kind]}):
            remedy = "keep the name, or the next version has another first number: docs/instructor/own-copy.md"
            yield f"{relative_name(PROMISED)}: promises {name} ({kind}), which is gone; {remedy}"


def ends_of_commands() -> Iterator[str]:
    """Check that a command ends with the call that turns a WorkshopError into one line and an exit code."""
    for path, tree in TREES.items():
        has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
        guards = [ast.unparse(node) for node in tree.body if is_main_guard(node)]
        end = ast.unparse(tree.body[-1:])
        if guards != [end] * has_main or (has_main and end not in ENDS and path not in OTHER_ENDS):
            one_way = 'main(), and at the end `if __name__ == "__main__":` with run_program(main) of shared/errors.py'
            yield f"{relative_name(path)}: is neither a command nor a library; write {one_way}, or remove both"


def names_of_classes() -> Iterator[str]:
    """Check that a name means one class in the whole of scripts/."""
    classes = [node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for name in sorted({name for name in classes if classes.count(name) > 1}):
        yield f"scripts/: {classes.count(name)} classes have the name {name}; give each its own name"
