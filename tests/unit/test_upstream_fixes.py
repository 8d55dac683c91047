"""Check the table of workarounds: the pinned version has the behaviour of each row, and its place exists."""

import ast

import pytest

from helpers import REPOSITORY
from training.upstream_fixes import FIXES

PINNED = (REPOSITORY / "requirements.txt").read_text().splitlines()


@pytest.mark.promise("when a library is updated, a test lists the workarounds to check again")
def test_each_fix_was_seen_in_the_pinned_version():
    versions = {line.partition("==")[0]: line for line in PINNED}
    lines = [
        f"{versions.get(fix.seen_in.partition('==')[0])} is pinned, and {fix.place} was seen in {fix.seen_in}. "
        f"Check whether it can go: {fix.removable_when}"
        for fix in FIXES
        if fix.seen_in not in PINNED
    ]
    if lines:
        heading = f"{len(lines)} rows of FIXES in scripts/training/upstream_fixes.py name another version:"
        end = "Remove a workaround whose condition holds. Otherwise write the pinned version into its row."
        pytest.fail("\n".join([heading, *lines, end]), pytrace=False)


@pytest.mark.parametrize("place", sorted({fix.place for fix in FIXES}))
def test_each_row_names_an_existing_function_or_class(place: str):
    file, _, name = place.partition("::")
    module = ast.parse((REPOSITORY / "scripts" / file).read_text())
    defined = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assigned = [ast.unparse(node.targets[0]) for node in module.body if isinstance(node, ast.Assign)]
    assert name in defined + assigned, f"FIXES names {place}, which does not exist: correct the row or remove it"
