"""Check that no script executes text, bytes or an unlisted file that it reads."""

import ast
import re
from collections.abc import Iterator

from helpers import EXPERIMENT_SCRIPTS, REPOSITORY
from text_checks.common import TREES, relative_name

RUNS_TEXT = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"}
RUNS_TEXT |= {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "marshal.loads", "numpy.load", "np.load"}
SHELL = sorted([*REPOSITORY.glob("experiments/**/*.sh"), *EXPERIMENT_SCRIPTS, *REPOSITORY.glob("scripts/*.sh")])
# job.sh and its parts, a site file, what a site file may source, and an experiment's knobs
SOURCED = re.compile(
    r'(\.\./)+job\.sh|"\$EXPERIMENTS_FOLDER/load_site\.sh"|"\$SNAPSHOT/experiments/job\.sh"|"\$SITE_FILE"'
    r'|"\$HOME/miniforge3/etc/profile\.d/conda\.sh"|"\$EXPERIMENTS_FOLDER/sites/laptop\.sh"'
    r'|"\$ROOT/\$EXPERIMENT/env_vars\.sh"'
)


def findings() -> Iterator[str]:
    for path, tree in TREES.items():
        for call in dangers(tree):
            yield f"{relative_name(path)}: line {call.lineno}: {ast.unparse(call)} executes its input; read it as data"
    for path in SHELL:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code = line.split("#")[0]
            sourced = re.match(r"\s*\(?(?:source\s|\.\s+(?=[\"$/\w]))\s*(\S+)", code)
            if re.search(r"(^|[;&|(]\s*|\s)(eval|bash -c|sh -c)\s", code):
                yield f"{relative_name(path)}: line {number}: executes text: {line.strip()}; call the command itself"
            if sourced and not SOURCED.fullmatch(sourced[1]):
                remedy = "add it to SOURCED in tests/text_checks/security.py if it may run code"
                yield f"{relative_name(path)}: line {number}: sources {sourced[1]}; {remedy}"


def dangers(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that execute text or bytes, or that start a shell."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe_load = name == "torch.load" and given.get("weights_only") != "True"
            trusts = given.get("trust_remote_code", "False") != "False"
            if name in RUNS_TEXT or unsafe_load or trusts or given.get("shell", "False") != "False":
                yield node
