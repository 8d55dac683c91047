"""The report over checked-in runs, its tables, and its command line."""

import base64
import csv
import hashlib
import re
from pathlib import Path

import pytest
import yaml

import report
from helpers import REPOSITORY
from report_files import RUNS, add_run, gpu_log
from reporting import plots
from reporting.runs import find_runs
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
    names = {path.name for path in GOLDEN.glob("*.csv")} ^ {path.name for path in written.glob("*.csv")}
    different = [f"{name} is in one of the two reports alone" for name in sorted(names)]
    for path in sorted(GOLDEN.glob("*.csv")):
        if path.name in names:
            continue
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
    assert re.search(r"Stage 3 <a [^>]*>#\d+<span [^>]*> \(job 108\)</span></a>: failed: exit code 137", page)


def test_page_may_do_nothing_but_be_seen(written):
    """No script, no request; the style is the one that stands in it, and no other text of the page can become one."""
    page = (written / "index.html").read_text()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    own = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert parts == own | {"style-src": f"'sha256-{digest}'", "img-src": "data:"}
    assert not re.search(r"<script|\sstyle=|\son\w+=", page)


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
        changes = {"world_size": gpus, "train__runtime_s": runtime, "train__steady_samples_per_second": rate}
        add_run(tmp_path, f"{scaling}/{gpus}_gpus", str(gpus), **changes)
    weak = table(tmp_path, "multi-gpu-weak-scaling")
    assert cell(weak, "2 GPUs", "weak_efficiency.runtime").value == 100
    assert cell(weak, "4 GPUs", "weak_efficiency.runtime").value == 80
    assert cell(weak, "4 GPUs", "efficiency.steady_samples_per_second").value == 80
    stages = "deepspeed-multi-gpu/2_gpus_stages_comparison"
    add_run(tmp_path, f"{stages}/zero_1", "11", gpu_log(100, 3000), train__runtime_s=100)
    add_run(tmp_path, f"{stages}/cpu_offloading/zero_1", "12", gpu_log(100, 1200), train__runtime_s=150)
    trade = table(tmp_path, "offload-trade-off")
    assert [c.value for c in trade.rows[0].cells] == [3000, 1200, 60, 100, 150, 50]
    assert trade.headers[:3] == ["Peak GPU memory (MiB), no offload", "Peak GPU memory (MiB)",
                                 "Peak GPU memory: saving (%)"]  # fmt: skip
    strong = ("fsdp-single-gpu/full_shard", 1, 100, 10), ("fsdp-multi-gpu/2_gpus", 2, 50, 18)
    for job, (name, gpus, runtime, rate) in enumerate(strong, 21):
        changes = {"world_size": gpus, "train__runtime_s": runtime, "train__steady_samples_per_second": rate}
        add_run(tmp_path, name, str(job), **changes)
    fsdp = table(tmp_path, "fsdp-multi-gpu")
    assert cell(fsdp, "Single node, 2 GPUs", "factor.steady_samples_per_second").value == 1.8
    assert cell(fsdp, "Single node, 2 GPUs", "speedup.runtime").value == 2
    assert cell(fsdp, "Single node, 2 GPUs", "efficiency.steady_samples_per_second").value == 90


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"settings__num_train_epochs": 1.0}, "num_train_epochs 1.0 instead of 3.0"),
        ({"overrides": ["nodes: 3 instead of 2"]}, "nodes: 3 instead of 2"),
    ],
)
def test_a_run_that_does_not_compare_has_no_relations(tmp_path, change, cause):
    """Its rate is four times that of the first row with twice the GPUs: an efficiency of 200 %, which is none."""
    scaling = "deepspeed-multi-gpu"
    add_run(tmp_path, f"{scaling}/2_gpus", "2", world_size=2, train__steady_samples_per_second=10.0)
    add_run(tmp_path, f"{scaling}/4_gpus", "4", world_size=4, train__steady_samples_per_second=40.0, **change)
    add_run(tmp_path, f"{scaling}/8_gpus", "8", world_size=8, train__steady_samples_per_second=36.0)
    weak = table(tmp_path, "multi-gpu-weak-scaling")
    assert [row.status for row in weak.rows if row.run] == ["completed", "completed, does not compare", "completed"]
    efficiency = cell(weak, "4 GPUs", "efficiency.steady_samples_per_second")
    assert efficiency.value is None
    assert efficiency.note == f"does not compare with job 2 ({scaling}/2_gpus): {cause}"
    assert cell(weak, "4 GPUs", "steady_samples_per_second").value == 40
    assert cell(weak, "8 GPUs", "efficiency.steady_samples_per_second").value == 90


def test_rows_with_the_same_override_have_no_relations_either(tmp_path):
    for gpus in (2, 4):
        changes = {
            "world_size": gpus,
            "train__steady_samples_per_second": 5.0 * gpus,
            "overrides": ["nodes: 1 instead of 2"],
        }
        add_run(tmp_path, f"deepspeed-multi-gpu/{gpus}_gpus", str(gpus), **changes)
    found = cell(table(tmp_path, "multi-gpu-weak-scaling"), "4 GPUs", "efficiency.steady_samples_per_second")
    assert (found.value, found.note.split(": ", 1)[1]) == (None, "nodes: 1 instead of 2")


# --- predicted and measured


STEP = {"seconds": 0.5, "samples_per_second": 20.0, "compute": 0.3, "optimizer": 0.1, "communication": 0.4,
        "hidden": 0.3}  # fmt: skip
ESTIMATE = {"gpu_mib": 600.0, "node_mib": 120.0, "step": STEP, "rates": {}}


def test_predicted_beside_measured(tmp_path):
    """20 samples/s predicted and 16 measured: a step of 0.5 s took 0.625 s, and 0.125 of these were not predicted.

    Of 0.4 s of communication 0.3 run beside the computing.
    """
    add_run(tmp_path, "baseline", "1", estimate=ESTIMATE, train__steady_samples_per_second=16.0)
    table = report.prediction_table(find_runs([tmp_path]))
    (row,) = table.rows
    found = {column: one.value for column, one in zip(table.columns, row.cells, strict=True)}
    assert (found["estimated_samples_per_second"], found["difference_samples_per_second"]) == (20, -20)
    parts = [found[f"step_{part}"] for part in ("compute", "optimizer", "communication", "rest")]
    assert parts == pytest.approx([48, 16, 16, 20])
    assert (found["estimated_gpu"], found["peak_gpu"], found["difference_gpu"]) == (600, 900, 50)
    assert (found["estimated_cpu"], found["peak_cpu"], found["difference_cpu"]) == (120, 90, -25)


def test_plot_of_predicted_and_measured(tmp_path):
    for job, rate in (("1", 16.0), ("2", 10.0), ("3", 24.0)):
        add_run(
            tmp_path, f"deepspeed-single-gpu/zero_{job}", job, estimate=ESTIMATE, train__steady_samples_per_second=rate
        )
    add_run(tmp_path, "baseline", "4", train__steady_samples_per_second=999.0)  # it predicted nothing
    table = report.prediction_table(find_runs([tmp_path]))
    ((_, seen),) = plots.draw(table, tmp_path)
    assert seen == ("Measured over predicted samples/s: 3 runs; measured is 50 % to 120 % of predicted, median 80 %.")


def test_a_run_without_a_prediction_says_so(tmp_path):
    add_run(tmp_path, "baseline", "1")
    add_run(tmp_path, "baseline", "2", estimate=None, missing={"estimate": "the model is too odd"})
    assert not report.prediction_table(find_runs([tmp_path])).has_runs
    memory = table(tmp_path, "gpu-memory")
    assert cell(memory, "Baseline", "estimated_cpu").note == "the model is too odd"
    assert cell(memory, "Baseline", "difference_cpu").note == "the model is too odd"


def test_breakdown_shows_profiled_runs_alone(tmp_path):
    """A profiled run is slower, so that it stands for its experiment in no other table."""
    ranks = [{"seconds_per_step": 2.0, "data": 0.2, "forward": 0.4, "backward": 1.0, "optimizer": 0.2,
              "communication": 0.1, "other": 0.1, "hidden_communication": 0.5}] * 2  # fmt: skip
    add_run(tmp_path, "baseline", "1")
    assert table(tmp_path, "step-breakdown").rows[0].status == "no profile yet"
    add_run(tmp_path, "baseline", "0", profile=None, missing={"profile": "too few steps"})
    assert table(tmp_path, "step-breakdown").rows[0].status == "no profile yet (job 0: too few steps)"
    assert table(tmp_path, "step-breakdown").rows[1].status == "not run yet"
    add_run(tmp_path, "baseline", "2", profile=ranks)
    breakdown = table(tmp_path, "step-breakdown")
    assert breakdown.rows[0].jobs == "2"
    assert [c.value for c in breakdown.rows[0].cells][1:] == pytest.approx([2000, 10, 20, 50, 5, 10, 5, 25])
    add_run(tmp_path, "baseline", "3", settings__profile=True, profile=None)  # it had too few steps
    assert table(tmp_path, "gpu-memory").rows[0].jobs == "1"


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
    add_run(
        tmp_path,
        "deepspeed-single-gpu/zero_2",
        "2",
        settings__model_name="bigscience/bloom-3b",
        parameters=3_000_000_000,
    )
    tables = build_tables(DEFINITIONS, find_runs([tmp_path]))
    names = [t.name for t in tables if t.name.startswith("zero-stages")]
    assert names == ["zero-stages-bloom-560m", "zero-stages-bloom-3b"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("- [1}", "tables.yaml:1: is no YAML"),
        ("tables: 3", "is no list of tables"),
        ([{"id": "x"}], "table x: no columns"),
        ({"columns": ["speed"]}, "table baseline: unknown column speed"),
        ({"columns": ["twice.runtime"]}, "table baseline: unknown column twice.runtime"),
        ({"plots": ["pie"]}, "table baseline: unknown plot pie"),
        ({"needs": "luck"}, "table baseline: unknown field luck of the run record"),
        ({"rows": [{"label": "x"}]}, "has other keys than label, experiment and reference"),
        ({"colour": "red"}, "table baseline: unknown key colour"),
    ],
)
def test_wrong_tables_yaml_is_one_line(tmp_path, refusal, change, error):
    path = tmp_path / "tables.yaml"
    content = [DEFINITIONS[0] | change] if isinstance(change, dict) else change
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    assert error in refusal(load_definitions, path)


# --- command line


def test_command_writes_the_report(tmp_path, main_of, capsys):
    for _ in range(2):  # the second replaces the first
        main_of(report, RUNS / "experiments" / "baseline", "-o", tmp_path / "new")
        assert capsys.readouterr().out == f"1 runs, 4 tables: {tmp_path}/new/index.html\n"
    assert sorted(p.name for p in (tmp_path / "new").glob("*.md")) == [
        *("baseline.md", "gpu-memory.md", "predicted-memory.md", "runs.md")
    ]


def test_job_is_printed(main_of, capsys):
    main_of(report, "--job", RUNS / "experiments/deepspeed-multi-gpu/2_gpus/results/109.json")
    printed = capsys.readouterr().out
    for line in ("Train Loss (Final) ", "| GPU 1 memory, peak (MiB) ", "too few steps after the warm-up"):
        assert line in printed


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
def test_bad_input_is_one_line(arguments, error, main_of, refusal, capsys):
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/thesis.md").write_text("mine")
    assert refusal(main_of, report, *arguments).startswith(error)
    assert capsys.readouterr() == ("", "")


def test_help_opens_with_the_purpose(main_of, capsys):
    with pytest.raises(SystemExit) as ended:
        main_of(report, "--help")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("The workshop's tables and plots")
