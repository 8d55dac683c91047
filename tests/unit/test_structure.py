"""What each module of scripts/ may do: import, but not in a circle; define, but not act; end in the one way."""

import ast
import functools
import graphlib

import pytest

from helpers import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
MODULES = {
    ".".join(path.relative_to(SCRIPTS).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SCRIPTS.rglob("*.py"))
}
ENDS = {"run_program(main)", "run_and_exit(main)"}

each_module = pytest.mark.parametrize("name", MODULES)


@functools.cache
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


DEFINES = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign)
DEFINES += (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def acts(node: ast.stmt) -> bool:
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    # transformers' documented way to make a model known
    registers = isinstance(node, ast.Expr) and ast.unparse(node).startswith(
        ("AutoConfig.register(", "AutoModelForCausalLM.register(")
    )
    return not (isinstance(node, DEFINES) or text or is_main_guard(node) or registers)


@each_module
def test_importing_a_module_does_nothing(name):
    lines = [f"line {node.lineno}: {ast.unparse(node)[:80]}" for node in tree_of(name).body if acts(node)]
    assert not lines, f"{MODULES[name]}: {lines} runs when somebody imports it; move it into a function"


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
        if name == "job.with_parent":  # becomes another program
            continue
        assert len(calls) == 1 and calls[0] in ENDS, f"{MODULES[name]}: end with run_program(main), of errors.py"
