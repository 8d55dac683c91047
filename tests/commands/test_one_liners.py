"""Check that the documented one-liners agree with the report on the test runs.

The GPU log of run 111 has five columns, as version 1.0.0 wrote it. The other GPU logs have seven.
tests/slurm checks the one-liners on the files of a real job.
"""

import pandas
import pytest

from job.memory_logs import read_gpu_log
from one_liners import check_one_liners, shell
from report_files import OLD_GPU_HEADER, RUNS

# The exercises of the original documents, in "Understanding GPU memory tracking output". Only the $ was escaped there
ORIGINAL_LINES = (
    "tail -n +2 {} | cut -d',' -f4 | sort -n | tail -1",
    "tail -n +2 {} | cut -d',' -f4 | sort -n | head -1",
    "tail -n +2 {} | cut -d',' -f4 | awk '{{sum+=$1}} END {{print sum/NR}}'",
)


@pytest.mark.parametrize("record", sorted(RUNS.rglob("results/*.json")), ids=lambda path: path.stem)
def test_one_liners_give_the_values_of_the_report(record):
    check_one_liners(record)


@pytest.mark.promise("the documents' one-liners work on GPU logs of five and of seven columns")
@pytest.mark.parametrize("log", sorted(RUNS.rglob("gpu_memory/*.csv")), ids=lambda path: path.stem)
def test_the_lines_of_the_original_documents_and_of_pandas_read_the_log(log):
    expected = read_gpu_log(log)
    samples = [mib for name in expected.names() for mib in expected.mib(name)]
    found = [shell(line.format(log.name), log.parent)[0] for line in ORIGINAL_LINES]
    assert found == [max(samples), min(samples), pytest.approx(sum(samples) / len(samples), rel=1e-5)]
    table = pandas.read_csv(log, skipinitialspace=True)
    assert list(table.columns[:5]) == OLD_GPU_HEADER.split(", ")
    assert table["memory.used [MiB]"].tolist() == table.iloc[:, 3].tolist()
    assert sorted(table["memory.used [MiB]"]) == sorted(samples)
