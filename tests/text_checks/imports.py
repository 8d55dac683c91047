"""Check that no module of scripts/ imports a command, and that modules do not import each other in a cycle.

A command is a file directly in scripts/ that ends in `if __name__ == "__main__":`. config.py is a library, which
only prints the knobs as a command.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

from text_checks.common import SCRIPTS, TREES, relative_name

LIBRARIES = ("config",)


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


MODULES = {".".join(path.relative_to(SCRIPTS).with_suffix("").parts).removesuffix(".__init__"): path for path in TREES}
COMMANDS = {
    name
    for name, path in MODULES.items()
    if path.parent == SCRIPTS and name not in LIBRARIES and any(map(is_main_guard, TREES[path].body))
}


def imported_modules(path: Path) -> set[str]:
    """The modules of scripts/ that a module imports, including imports in functions."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def findings() -> Iterator[str]:
    imports = {name: imported_modules(path) for name, path in MODULES.items()}
    for name, path in MODULES.items():
        for command in sorted(imports[name] & COMMANDS):
            yield f"{relative_name(path)}: imports the command {command}.py; move shared code into a folder of scripts/"
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        cycle = " <- ".join(error.args[1])
        remedy = "import from the module that has the name, or move shared code into one of its own"
        yield f"scripts/: modules import each other: {cycle}; {remedy}"
