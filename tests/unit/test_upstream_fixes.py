"""Check the table of workarounds: the pinned version has the behaviour of each row, and its place exists."""

import ast

import pytest

from helpers import REPOSITORY
from training.upstream_fixes import FIXES, UpstreamFixes

PINNED = (REPOSITORY / "requirements.txt").read_text().splitlines()


def conditions_to_check(pinned: list[str]) -> list[str]:
    """Return a line for each workaround that names another version than the pinned one."""
    versions = {line.partition("==")[0]: line for line in pinned}
    return [
        f"{versions.get(fix.seen_in.partition('==')[0])} is pinned, and {fix.place} was seen in {fix.seen_in}. "
        f"Check whether it can go: {fix.removable_when}"
        for fix in FIXES
        if fix.seen_in not in pinned
    ]


def test_each_fix_was_seen_in_the_pinned_version():
    lines = conditions_to_check(PINNED)
    if lines:
        heading = f"{len(lines)} rows of FIXES in scripts/training/upstream_fixes.py name another version:"
        end = "Remove a workaround whose condition holds. Otherwise write the pinned version into its row."
        pytest.fail("\n".join([heading, *lines, end]), pytrace=False)


def test_a_raised_version_lists_the_conditions_of_its_library():
    raised = ["deepspeed==99.0" if line.startswith("deepspeed==") else line for line in PINNED]
    lines = [line for line in conditions_to_check(raised) if line.startswith("deepspeed==99.0 is pinned, and ")]
    deepspeed_fixes = [fix for fix in FIXES if fix.seen_in.startswith("deepspeed==")]
    assert len(lines) == len(deepspeed_fixes) > 1
    for line, fix in zip(lines, deepspeed_fixes, strict=True):
        assert line.endswith(f"{fix.place} was seen in {fix.seen_in}. Check whether it can go: {fix.removable_when}")


@pytest.mark.parametrize("place", sorted({fix.place for fix in FIXES}))
def test_each_row_names_an_existing_function_or_class(place: str):
    file, _, name = place.partition("::")
    module = ast.parse((REPOSITORY / "scripts" / file).read_text())
    defined = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assigned = [ast.unparse(node.targets[0]) for node in module.body if isinstance(node, ast.Assign)]
    assert name in defined + assigned, f"FIXES names {place}, which does not exist: correct the row or remove it"


def test_each_repair_of_the_trainer_has_a_row_and_is_in_use():
    rows = {fix.place.partition("::")[2] for fix in FIXES if fix.place.startswith("training/upstream_fixes.py")}
    in_use = {repair.__name__ for repair in UpstreamFixes.__bases__}
    assert rows - in_use == {"GroupScaler"}
    assert in_use - rows == {"ScalerOfTensorParallelism"}, (
        "ScalerOfTensorParallelism only uses the GroupScaler, so it needs no row"
    )
