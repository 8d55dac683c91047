"""The documented one-liners against the report's own reading of the same files; on a job's: tests/slurm."""

import pytest

from one_liners import check_one_liners
from report_files import RUNS


@pytest.mark.parametrize("record", sorted(RUNS.rglob("results/*.json")), ids=lambda path: path.stem)
def test_one_liners_give_the_values_of_the_report(record):
    check_one_liners(record)
