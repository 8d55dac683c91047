"""Check that the documented one-liners agree with the report on the test runs.

tests/slurm checks the one-liners on the files of a real job.
"""

import pytest

from one_liners import check_one_liners
from report_files import RUNS


@pytest.mark.parametrize("record", sorted(RUNS.rglob("results/*.json")), ids=lambda path: path.stem)
def test_one_liners_give_the_values_of_the_report(record):
    check_one_liners(record)
