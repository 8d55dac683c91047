"""The report over checked-in runs, its tables against awk and the documented one-liners, and its command line."""

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import report
from report_files import REPOSITORY, RUNS, add_run, gpu_log
from reporting.memory_logs import logs_of
from reporting.metrics import METRICS
from reporting.runs import find_runs, read_run
from reporting.tables import build_tables, load_definitions

GOLDEN = REPOSITORY / "tests" / "data" / "report"
DEFINITIONS = load_definitions(report.DEFINITIONS)


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    """The report over the checked-in runs."""
    output = tmp_path_factory.mktemp("report") / "report"
    report.write_report([RUNS], output, all_runs=False)
    return output


def table(runs_below: Path, name: str, all_runs: bool = False):
    tables = build_tables(DEFINITIONS, find_runs([runs_below]), all_runs)
    return next(table for table in tables if table.name == name)


def cell(table, label: str, metric: str):
    row = next(row for row in table.rows if row.label == label)
    return row.cells[table.columns.index(metric)]


# --- golden report


def rows_of(path: Path) -> dict[tuple[str, str], str]:
    """(row and job, column) -> value, of a CSV table."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(f"{row['row']} job {row['job_id']}", name): value for row in rows for name, value in row.items()}


def test_golden_report(written):
    assert sorted(p.name for p in written.glob("*.csv")) == sorted(p.name for p in GOLDEN.glob("*.csv"))
    different = []
    for path in sorted(GOLDEN.glob("*.csv")):
        expected, found = rows_of(path), rows_of(written / path.name)
        for key in expected | found:
            if expected.get(key) != (value := (found.get(key) or "").replace(f"{RUNS}/", "")):
                different.append(f"{path.name}, {key[0]}, {key[1]}: {expected.get(key)!r} expected, {value!r} found")
    way = "python scripts/report.py tests/data/runs -o NEW, look at it, then copy its .csv files to tests/data/report"
    assert not different, "\n".join([*different, f"If this is intended: {way}"])


def test_records_tell_nothing_of_the_machine():
    for path in RUNS.rglob("*.*"):
        assert not re.search(rb"/(tmp|home|root|work)\b", path.read_bytes()), path


def test_page_holds_all_it_needs(written):
    page = (written / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(list(written.glob("*.png"))) > 5
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "Stage 3 (job 108): failed: exit code 137" in page


# --- agreement with other readings of the same files

ALL_RECORDS = sorted(RUNS.rglob("results/*.json"))


def shell(command: str, folder: Path, **variables: str) -> list[float]:
    done = subprocess.run(["bash", "-c", command], cwd=folder, env={"PATH": "/usr/bin:/bin"} | variables,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert not done.stderr, done.stderr
    return [float(word) for word in done.stdout.split()]


def one_liners() -> dict[str, str]:
    """The line above each command in docs/one-liners.md -> the command."""
    text = (REPOSITORY / "docs" / "one-liners.md").read_text()
    return dict(re.findall(r"^(\S.*):\n\n```bash\n(.*)\n```$", text, re.MULTILINE))


LINES_OF_METRICS = {
    "Peak of any GPU (MiB)": "peak_gpu",
    "Minimum of any GPU (MiB)": "low_gpu",
    "Mean over time and GPUs (MiB)": "mean_gpu",
    "Peak (MiB)": "peak_cpu",
    "Mean (MiB)": "mean_cpu",
    "Train loss (mean over all steps)": "train_loss",
    "Eval loss, one line per epoch": "eval_loss",
    "Train samples per second, with evaluation and saving": "samples_per_second",
    "Train steps per second": "steps_per_second",
    "Train runtime (s)": "runtime",
    "Eval samples per second, of the last epoch": "eval_samples_per_second",
}


def test_every_one_liner_is_tested():
    assert set(one_liners()) == {*LINES_OF_METRICS, "Peak of each GPU (MiB)"}


@pytest.mark.parametrize("record", ALL_RECORDS, ids=lambda path: path.stem)
@pytest.mark.parametrize("title", LINES_OF_METRICS)
def test_one_liner_gives_the_value_of_the_report(record, title):
    run = read_run(record)
    found = shell(one_liners()[title], run.folder, JOB=run.job_id)
    expected = METRICS[LINES_OF_METRICS[title]].read(run).value
    if expected is None:
        assert not found
    else:
        assert math.isclose(found[-1], expected, rel_tol=1e-3), (found, expected)
    if title.startswith("Eval loss"):
        assert len(found) == len(run.get("eval") or [])


@pytest.mark.parametrize("record", ALL_RECORDS, ids=lambda path: path.stem)
def test_one_liner_per_gpu_gives_what_the_job_prints(record):
    run = read_run(record)
    numbers = shell(one_liners()["Peak of each GPU (MiB)"], run.folder, JOB=run.job_id)
    printed = report.memory_rows(run)
    assert numbers[1::2] == [float(value) for name, value, _ in printed if re.match(r"GPU \d+ memory, peak", name)]


@pytest.mark.parametrize("record", ALL_RECORDS, ids=lambda path: path.stem)
def test_memory_agrees_with_awk(record):
    """A reading that shares nothing with the report's: other tools, other order."""
    run = read_run(record)
    (gpu,), (cpu,) = logs_of(run.folder, run.job_id)
    gpu_numbers = shell(f"sed 1d {gpu.name} | cut -d, -f4 | sort -n | awk '{{s+=$1; v[NR]=$1}} "
                        "END {print v[1], v[NR], s/NR}'", gpu.parent)  # fmt: skip
    assert gpu_numbers == pytest.approx([run.gpu.minimum, run.gpu.peak, run.gpu.mean], rel=1e-5)
    cpu_numbers = shell(f"sed 1d {cpu.name} | awk '{{s+=$3; if ($3>m) m=$3}} END {{print m, s/NR}}'", cpu.parent)
    assert cpu_numbers == pytest.approx([run.cpu.peak, run.cpu.mean], rel=1e-5)


# --- tables


def test_every_experiment_has_a_table_and_every_table_a_heading():
    known = {row["experiment"] for definition in DEFINITIONS for row in definition["rows"]}
    folders = {str(path.parent.relative_to(REPOSITORY / "experiments"))
               for path in (REPOSITORY / "experiments").rglob("*.slurm")}  # fmt: skip
    assert folders - {"gpu-check"} <= known, "gpu_check.py writes a table of its own"
    headings = re.findall(r"^## (.*)$", (REPOSITORY / "docs" / "results.md").read_text(), re.MULTILINE)
    assert {definition["title"] for definition in DEFINITIONS} <= set(headings)


def test_relations(tmp_path):
    """Each by hand: 2 GPUs 100 s 10/s, 4 GPUs 125 s 16/s; offload 3000 -> 1200 MiB and 100 -> 150 s."""
    scaling = "deepspeed-multi-gpu"
    for gpus, runtime, rate in ((2, 100, 10), (4, 125, 16)):
        changes = {"world_size": gpus, "train__runtime_s": runtime, "train__samples_per_second": rate}
        add_run(tmp_path, f"{scaling}/{gpus}_gpus", str(gpus), **changes)
    weak = table(tmp_path, "multi-gpu-weak-scaling")
    assert cell(weak, "2 GPUs", "weak_efficiency.runtime").value == 100
    assert cell(weak, "4 GPUs", "weak_efficiency.runtime").value == 80
    assert cell(weak, "4 GPUs", "efficiency.samples_per_second").value == 80
    stages = "deepspeed-multi-gpu/2_gpus_stages_comparison"
    add_run(tmp_path, f"{stages}/zero_1", "11", gpu_log(100, 3000), train__runtime_s=100)
    add_run(tmp_path, f"{stages}/cpu_offloading/zero_1", "12", gpu_log(100, 1200), train__runtime_s=150)
    trade = table(tmp_path, "offload-trade-off")
    assert [c.value for c in trade.rows[0].cells] == [3000, 1200, 60, 100, 150, 50]
    assert trade.headers[:3] == ["Peak GPU memory (MiB), no offload", "Peak GPU memory (MiB)",
                                 "Peak GPU memory: saving (%)"]  # fmt: skip
    strong = ("fsdp-single-gpu/full_shard", 1, 100, 10), ("fsdp-multi-gpu/2_gpus", 2, 50, 18)
    for job, (name, gpus, runtime, rate) in enumerate(strong, 21):
        add_run(tmp_path, name, str(job), world_size=gpus, train__runtime_s=runtime, train__samples_per_second=rate)
    fsdp = table(tmp_path, "fsdp-multi-gpu")
    assert cell(fsdp, "Single node, 2 GPUs", "factor.samples_per_second").value == 1.8
    assert cell(fsdp, "Single node, 2 GPUs", "speedup.runtime").value == 2
    assert cell(fsdp, "Single node, 2 GPUs", "efficiency.samples_per_second").value == 90


def test_custom_weak_scaling(tmp_path):
    for gpus, layers, batch, runtime in ((2, 3, 8, 100), (4, 6, 4, 110)):
        add_run(tmp_path, f"custom-model/weak_scaling/{gpus}_gpus", str(gpus), world_size=gpus,
                settings__num_layers=layers, settings__per_device_train_batch_size=batch,
                settings__per_device_eval_batch_size=batch, train__runtime_s=runtime,
                callbacks={"train/samples_per_second_mean": 5.0, "avg_mem_alloc_MB": 2048,
                           "avg_gpu_util_%": 88})  # fmt: skip
    weak = table(tmp_path, "custom-weak-scaling")
    assert [c.value for c in weak.rows[1].cells][:3] == [4, 6, 4]
    assert cell(weak, "4 GPUs", "callback_gpu_gib").value == 2
    assert cell(weak, "4 GPUs", "gpu_utilisation").value == 88
    assert cell(weak, "4 GPUs", "weak_efficiency.runtime").value == pytest.approx(100 / 110 * 100)
    assert not [remark for row in weak.rows for remark in row.remarks if "compare" in remark]
    assert "upside" in weak.note


def test_one_table_per_model(tmp_path):
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "1", settings__model_name="bigscience/bloom-560m")
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "2", settings__model_name="bigscience/bloom-3b", parameters=3e9)
    tables = build_tables(DEFINITIONS, find_runs([tmp_path]))
    names = [t.name for t in tables if t.name.startswith("zero-stages")]
    assert names == ["zero-stages-bloom-560m", "zero-stages-bloom-3b"]


# --- command line


def command(*arguments: object, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess:
    words = [sys.executable, str(REPOSITORY / "scripts" / "report.py"), *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_command_writes_the_report(tmp_path):
    for _ in range(2):  # the second replaces the first
        done = command(RUNS / "experiments" / "baseline", "-o", tmp_path / "new", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"1 runs, 3 tables: {tmp_path}/new/index.html\n"
    assert sorted(p.name for p in (tmp_path / "new").glob("*.md")) == ["baseline.md", "gpu-memory.md", "runs.md"]


def test_job_is_printed():
    done = command("--job", RUNS / "experiments/deepspeed-multi-gpu/2_gpus/results/109.json")
    assert done.returncode == 0, done.stderr
    for line in ("Train Loss (Final) ", "| GPU 1 memory, peak (MiB) ", "too few steps after the warm-up"):
        assert line in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "error: nowhere: there is no such folder; give folders of experiments"),
        (["empty"], "error: empty: no runs below it; run an experiment first, or give another folder"),
        (["empty", "-o", "full"], "error: full: holds files that are no report; give a new folder with -o"),
        (["--job", "nowhere.json"], "error: nowhere.json: No such file or directory; give results/"),
        (["--jobs"], "error: command line: unrecognized arguments: --jobs; see --help"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, error):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.md").write_text("mine")
    done = command(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("- [1}", "tables.yaml:1: is no YAML"),
        ("tables: 3", "is no list of tables"),
        ([{"id": "x"}], "table x: no columns"),
        ({"columns": ["speed"]}, "table baseline: unknown column speed"),
        ({"columns": ["twice.runtime"]}, "table baseline: unknown column twice.runtime"),
        ({"plots": ["pie"]}, "table baseline: unknown plot pie"),
        ({"rows": [{"label": "x"}]}, "has other keys than label, experiment and reference"),
        ({"colour": "red"}, "table baseline: unknown key colour"),
    ],
)
def test_wrong_tables_yaml_is_one_line(tmp_path, refusal, change, error):
    path = tmp_path / "tables.yaml"
    content = [DEFINITIONS[0] | change] if isinstance(change, dict) else change
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    assert error in refusal(load_definitions, path)


def test_help_opens_with_the_purpose():
    done = command("--help")
    assert done.returncode == 0 and done.stdout.startswith("The workshop's tables and plots")


def test_end_of_job_summary_imports_nothing_large():
    code = "import sys; sys.path.insert(0, 'scripts'); import job.finish; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert not {"torch", "numpy", "yaml", "matplotlib"} & set(json.loads(done.stdout))
