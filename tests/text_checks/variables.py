"""Compare scripts/job/variables.py with the code that sets and reads variables of the environment."""

import ast
import re
from collections.abc import Iterator

from config import KNOBS
from job.variables import VARIABLES
from text_checks.common import SCRIPTS, TREES, differences, read

NAME = "'([A-Z][A-Z_]+)'"
# The names of variables that hold an environment. ast.unparse writes a statement in one line, and a string in '
ENVIRONMENT = r"\b(?:environ|env|environment|variables|caller)"
SETS = rf"{ENVIRONMENT}(?:\.setdefault\(|\.pop\(|\[){NAME}(?:[,)]|\] = )|{NAME}: "
READS = rf"{ENVIRONMENT}(?:\.get\(|\[| = \[){NAME}(?!\] = )|whole_number\({NAME}|{NAME} (?:not )?in [\w.]*{ENVIRONMENT}"
SHELL_SETS = r"""(?m)^ *#.*|(?:^|[ {"])([A-Z_]+)[+:]?=(?!['(])"""  # without arrays and IFS


def names(pattern: str, text: str) -> set[str]:
    found = {name for match in re.finditer(pattern, text) for name in match.groups() if name}
    return found - {knob.variable for knob in KNOBS}


def findings() -> Iterator[str]:
    found = set()
    for path in TREES.keys() - {SCRIPTS / "job/variables.py", SCRIPTS / "settings/hints.py"}:
        file, code = path.relative_to(SCRIPTS), ast.unparse(TREES[path])
        found |= {f"{file} sets {name}" for name in names(SETS, code)}
        found |= {f"{file} reads {name}" for name in names(READS, code)}
    for file in ("job.sh", "load_site.sh", "submit.sh"):
        found |= {f"{file} sets {name}" for name in names(SHELL_SETS, read(f"experiments/{file}"))}
    stated = {
        f"{file} {does} {name}"
        for name, row in VARIABLES.items()
        for does, files in zip(("sets", "reads"), row.split(" -> "), strict=True)
        for file in files.split()
        if file.endswith(".py") or (file.endswith(".sh") and does == "sets")
    }
    table = "scripts/job/variables.py"
    yield from differences(table, "the code", dict.fromkeys(stated, "so"), dict.fromkeys(found, "so"))
