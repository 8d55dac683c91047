"""Make the exercises from their solutions: cut the body of each function whose docstring begins with "Gap".

    python exercises/make.py    # after a change of a .py file directly in exercises/solution

The comment "# The exercise begins with: <code>" in such a body names the code that the gap keeps. Commit a solution
together with its exercise. The command never overwrites a file that differs from the committed one, such as an exercise
that you have solved.
"""

import argparse
import ast
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for solution in sorted((HERE / "solution").glob("*.py")):
        exercise = HERE / solution.name
        text = cut_gaps(solution.read_text())
        if exercise.exists() and exercise.read_text() != text and (problem := unsaved(exercise)):
            parser.exit(2, f"error: exercises/{exercise.name}: {problem}\n")
        exercise.write_text(text)


def cut_gaps(solution: str) -> str:
    lines = solution.splitlines(keepends=True)
    functions = [node for node in ast.walk(ast.parse(solution)) if isinstance(node, ast.FunctionDef)]
    for function in sorted(functions, key=lambda each: -each.lineno):  # the last first, so line numbers stay right
        if gap := re.match(r"Gap (\d)", ast.get_docstring(function) or ""):
            first, last = function.body[0].end_lineno, function.end_lineno
            kept = re.findall(r"# The exercise begins with: (.*\n)", "".join(lines[first:last]))
            indent = " " * function.body[0].col_offset
            lines[first:last] = [indent + (kept or [f'raise NotImplementedError("gap {gap[1]}")\n'])[0]]
    return "".join(lines)


def unsaved(exercise: Path) -> str:
    """Return why a change of the exercise could be lost, and what to do; "" if git has the same file."""
    try:
        show = ["git", "show", f"HEAD:./{exercise.name}"]
        committed = subprocess.run(show, cwd=exercise.parent, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "git has no committed file to compare with; run this command in a git clone, or remove the file first"
    if committed == exercise.read_bytes():
        return ""
    return "differs from the committed file; commit your changes, or undo them with git restore"


if __name__ == "__main__":
    main()
