"""Each case of the table is tried; what a case is: table.py."""

import pytest

from bench import Bench
from table import Case, load


def param(case: Case):
    marks = [pytest.mark.faults] if case.slow else []
    return pytest.param(case, id=f"{case.group}: {case.name}", marks=marks)


@pytest.mark.parametrize("case", [param(each) for each in load()])
def test_fault(case: Case, bench: Bench):
    case.act(bench)
