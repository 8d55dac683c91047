"""Check the imports of scripts/: modules import no command, and not each other in a cycle.

A command is a file of scripts/ itself that ends in `if __name__ == "__main__":`. config.py is a library that
only job.sh calls as a command.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

from text_checks.common import SCRIPTS, TREES, name_of

LIBRARIES = ("config",)


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


MODULES = {".".join(path.relative_to(SCRIPTS).with_suffix("").parts).removesuffix(".__init__"): path for path in TREES}
COMMANDS = {
    name
    for name, path in MODULES.items()
    if path.parent == SCRIPTS and name not in LIBRARIES and any(map(is_main_guard, TREES[path].body))
}


def imports_of(path: Path) -> set[str]:
    """The modules of scripts/ that this one imports, in functions too."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def findings() -> Iterator[str]:
    imports = {name: imports_of(path) for name, path in MODULES.items()}
    for name, path in MODULES.items():
        for command in sorted(imports[name] & COMMANDS):
            yield f"{name_of(path)}: imports the command {command}.py; move what both need into a folder of scripts/"
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        circle = " <- ".join(error.args[1])
        yield f"scripts/: modules import each other: {circle}; move what both sides need into a module of its own"
