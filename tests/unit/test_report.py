"""The report of the checked-in runs, its command line, and the summary of one run."""

import csv
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import report
from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS, REPOSITORY
from report_files import RUNS, add_run, cell, table, write
from reporting.definitions import load_definitions
from reporting.report_folder import write_report

WAY_OUT = "see the comment at its top"
GOLDEN = REPOSITORY / "tests" / "data" / "report"
DEFINITIONS = load_definitions()
STAGE = "deepspeed-single-gpu/zero_1"
BASELINE = RUNS / "experiments" / "baseline"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The folder of a report of the checked-in runs."""
    output = tmp_path_factory.mktemp("report") / "report"
    write_report([RUNS], output, all_runs=False)
    return output


def read_rows(path: Path) -> dict[tuple[str, str], str]:
    """Return the values of a CSV table: (row and job, column) -> value."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(f"{row['row']} job {row['job_id']}", name): value for row in rows for name, value in row.items()}


@pytest.mark.promise("the report fills the tables")
def test_golden_report(written):
    names = {path.name for path in GOLDEN.glob("*.csv")} ^ {path.name for path in written.glob("*.csv")}
    different = [f"{name} is only in one of the two reports" for name in sorted(names)]
    for path in sorted(GOLDEN.glob("*.csv")):
        if path.name in names:
            continue
        expected, found = read_rows(path), read_rows(written / path.name)
        for key in expected | found:
            if expected.get(key) != (value := (found.get(key) or "").replace(f"{RUNS}/", "")):
                different.append(f"{path.name}, {key[0]}, {key[1]}: {expected.get(key)!r} expected, {value!r} found")
    way = "python scripts/report.py tests/data/runs -o NEW, look at it, then copy its .csv files to tests/data/report"
    assert not different, "\n".join([*different, f"If this is intended: {way}"])


def test_markdown_has_the_table_with_equal_decimals(written):
    lines = (written / "runs.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert len({len(line) for line in lines if line.startswith("|")}) == 1
    assert [line[cells[0].index("Peak CPU memory (MiB)")] for line in cells[2:5]] == ["1,033.9", "992.9", "1,022.7"]
    assert "Hardware: AMD EPYC (2 cores), no GPU · torch 2.13.0+cpu · " in lines[4]
    killed = "exit code 137 (killed, most often by the kernel for want of memory: see --mem)"
    assert f"- deepspeed-single-gpu/zero_3 (job 108): failed: {killed}" in lines


def test_records_contain_no_paths_of_the_machine():
    paths = [
        path
        for folder in (*RUNS.parent.glob("runs*"), REPOSITORY / "docs" / "figures" / "demo")
        for path in folder.rglob("*.*")
        if path.is_file()
    ]
    assert len(paths) > 40
    for path in paths:
        assert not re.search(rb"/(tmp|home|root|work)\b", path.read_bytes()), path


# --- tables.yaml


def test_every_experiment_has_a_table():
    known = {row.experiment for definition in DEFINITIONS for row in definition.rows}
    folders = {str(path.parent.relative_to(EXPERIMENTS)) for path in EXPERIMENT_SCRIPTS}
    # gpu_check.py writes a table of its own, and own-model is made to be copied
    assert folders - {"gpu-check", "own-model/train", "own-model/chat"} <= known


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("- [1}", ": is not YAML (while parsing"),
        ("tables: 3", f": is not a list of tables; {WAY_OUT}"),
        ("- 3", f": is not a list of tables; {WAY_OUT}"),
        ('[{"id": "x"}]', f": table x, title: Field required; {WAY_OUT}"),
        ('[{"label": "x"}]', f": table 1, label: Extra inputs are not permitted; {WAY_OUT}"),
        ({"columns": ["x" * 9]}, f": table baseline, columns.0: unknown column xxxxxxxxx; {WAY_OUT}"),
        ({"columns": ["gpus", "efficency.runtime"]},
         ": table baseline, columns.1: unknown column efficency.runtime; did you mean efficiency.runtime?"),
        ({"names": {"runtme": "Time"}},
         ": table baseline, names.runtme.[key]: unknown column runtme; did you mean runtime?"),
        ({"plots": ["looss"]}, ": table baseline, plots.0: unknown plot looss; did you mean loss?"),
        ({"needs": "profil"},
         ": table baseline, needs: unknown field of the run record profil; did you mean profile?"),
        ({"rows": [{"label": "x"}]}, f": table baseline, rows.0.experiment: Field required; {WAY_OUT}"),
        ({"rows": [{"label": "x", "experimnt": "x"}]},
         f": table baseline, rows.0.experimnt: Extra inputs are not permitted; {WAY_OUT}"),
        ({"rows": [{"label": 16, "experiment": "x"}]},
         f": table baseline, rows.0.label: Input should be a valid string; {WAY_OUT}"),
        ({"questoin": "What?"}, f": table baseline, questoin: Extra inputs are not permitted; {WAY_OUT}"),
    ],
)  # fmt: skip
def test_an_error_in_tables_yaml_is_one_line(tmp_path, refusal, change, error):
    path = tmp_path / "tables.yaml"
    baseline = DEFINITIONS[0].model_dump(exclude_unset=True)
    path.write_text(change if isinstance(change, str) else yaml.safe_dump([baseline | change]))
    assert refusal(load_definitions, path).startswith(f"error: {os.path.relpath(path)}{error}")


# --- relations and predictions


@pytest.mark.promise("the report fills the tables")
def test_relations(tmp_path):
    """The expected values are computed by hand.

    2 GPUs take 100 s at 10 samples/s, and 4 GPUs take 125 s at 16 samples/s. Offloading changes 3000 MiB to 1200 MiB,
    and 100 s to 150 s.
    """
    for gpus, runtime, rate in ((2, 100, 10), (4, 125, 16)):
        changes = {"world_size": gpus, "train__runtime_s": runtime, "train__steady_samples_per_second": rate}
        add_run(tmp_path, f"deepspeed-multi-gpu/{gpus}_gpus", str(gpus), **changes)
    weak = table(tmp_path, "multi-gpu-weak-scaling")
    assert cell(weak, "2 GPUs", "weak_efficiency.runtime").value == 100
    assert cell(weak, "4 GPUs", "weak_efficiency.runtime").value == 80
    assert cell(weak, "4 GPUs", "efficiency.steady_samples_per_second").value == 80
    stages = "deepspeed-multi-gpu/2_gpus_stages_comparison"
    for job, name, peak, runtime in (("11", "zero_1", 3000, 100), ("12", "cpu_offloading/zero_1", 1200, 150)):
        add_run(tmp_path, f"{stages}/{name}", job, (100, peak), train__runtime_s=runtime)
    trade = table(tmp_path, "offload-trade-off")
    assert [each.value for each in trade.rows[0].cells] == [3000, 1200, 60, 100, 150, 50]
    assert trade.definition.headers[:3] == ["Peak GPU memory (MiB), no offload", "Peak GPU memory (MiB)",
                                 "Peak GPU memory: saving (%)"]  # fmt: skip
    strong = ("fsdp-single-gpu/full_shard", 1, 100, 10), ("fsdp-multi-gpu/2_gpus", 2, 50, 18)
    for job, (name, gpus, runtime, rate) in enumerate(strong, 21):
        changes = {"world_size": gpus, "train__runtime_s": runtime, "train__steady_samples_per_second": rate}
        add_run(tmp_path, name, str(job), **changes)
    fsdp = table(tmp_path, "fsdp-multi-gpu")
    assert cell(fsdp, "Single node, 2 GPUs", "factor.steady_samples_per_second").value == 1.8
    assert cell(fsdp, "Single node, 2 GPUs", "speedup.runtime").value == 2
    assert cell(fsdp, "Single node, 2 GPUs", "efficiency.steady_samples_per_second").value == 90


@pytest.mark.promise("LoRA is compared with the same method that trains all weights")
def test_rows_of_lora_are_compared_with_the_row_that_trains_all_weights(tmp_path):
    """Of 10 + 10 + 20 MiB, LoRA leaves 10 + 0 + 2 MiB. The rate rises from 10 to 15 samples/s."""
    (lora,) = (definition for definition in DEFINITIONS if definition.id == "lora")
    for full, row in zip(lora.rows[::2], lora.rows[1::2], strict=True):
        assert row.label == f"{full.label}, LoRA"
        assert row.reference == full.reference == full.experiment
    mib = 2**20
    for job, (name, rank, state, rate) in enumerate(
        (
            ("lora/zero1_full", 0, {"gradients": 10 * mib, "optimizer_state": 20 * mib}, 10),
            ("lora/zero1", 8, {"gradients": 0, "optimizer_state": 2 * mib}, 15),
        ),
        1,
    ):
        changes = {"settings__lora_rank": rank, "settings__learning_rate": 5e-5 if rank == 0 else 1e-3}
        changes |= {"held": [{"parameters": 10 * mib} | state], "train__steady_samples_per_second": rate}
        changes |= {"settings__em_f1": False, "exact_match": None, "f1": None}
        add_run(tmp_path, name, str(job), trainable_parameters=1000 - 100 * rank, **changes)
    found = table(tmp_path, "lora")
    assert [row.status for row in found.rows if row.run] == ["completed", "completed"]
    shown = ("trainable_parameters", "held_state", "saving.held_state", "factor.steady_samples_per_second")
    assert [cell(found, "ZeRO-1", column).value for column in shown] == [1000, 40, 0, 1]
    assert [cell(found, "ZeRO-1, LoRA", column).value for column in shown] == [200, 12, 70, 1.5]
    assert {cell(found, "ZeRO-1, LoRA", score).note for score in ("exact_match", "f1")} == {"the run had EM_F1=False"}


def test_predictions_are_next_to_measured_values(tmp_path, monkeypatch):
    """Runs with equal settings are predicted once, even on different nodes, and only if the record has the configs."""
    asked = []

    def predicted_memory(record: dict) -> SimpleNamespace | None:
        asked.append(record["world_size"])
        return SimpleNamespace(gpu_mib=600.0, node_mib=120.0) if record["configs"]["model"] else None

    monkeypatch.setitem(sys.modules, "estimate.predict_from_record", SimpleNamespace(predicted_memory=predicted_memory))
    kept = {"configs": {"model": {"n_layer": 2}, "deepspeed": None, "fsdp": None}, "hardware__gpus": 1}
    add_run(tmp_path, "baseline", "1", **kept)
    add_run(tmp_path, "efficiency/recipe", "2", **kept, nodes=["another"])
    add_run(tmp_path, "fsdp-baseline", "3")
    for shown, label in (("gpu-memory", "Baseline"), ("efficiency-tiny-bloom", "Recipe")):
        found = table(tmp_path, shown)
        for column, value in (("estimated_gpu", 600), ("difference_gpu", 50), ("difference_cpu", -25)):
            assert cell(found, label, column).value == value
    assert asked == [1]
    add_run(tmp_path, "baseline", "1", configs={"model": {}})
    assert cell(table(tmp_path, "gpu-memory"), "Baseline", "estimated_cpu").note == (
        "the memory of this training cannot be predicted"
    )


def test_the_breakdown_shows_only_profiled_runs(tmp_path):
    """The profiler slows a run down, so no other table shows a profiled run."""
    ranks = [{"seconds_per_step": 2.0, "data": 0.2, "forward": 0.4, "backward": 1.0, "optimizer": 0.2,
              "communication": 0.1, "other": 0.1, "hidden_communication": 0.5}] * 2  # fmt: skip
    add_run(tmp_path, "baseline", "1", profile=None, missing={"profile": "too few steps"})
    found = table(tmp_path, "step-breakdown")
    assert [row.status for row in found.rows[:2]] == ["no profile yet: too few steps", "not run yet"]
    add_run(tmp_path, "baseline", "2", profile=ranks)
    breakdown = table(tmp_path, "step-breakdown")
    assert breakdown.rows[0].jobs == "2"
    assert [each.value for each in breakdown.rows[0].cells][1:] == pytest.approx([2000, 10, 20, 50, 5, 10, 5, 25])
    row = table(tmp_path, "gpu-memory").rows[0]
    assert (row.jobs, row.remarks) == ("1", ["the newer job 2 is not shown: the profiler slowed it down"])


def test_one_table_per_model(tmp_path):
    """A table is named after its model without the owner. Models of one name share a table, but are not compared."""
    models = {"1": ("bigscience/bloom-560m", 1), "2": ("bigscience/bloom-3b", 3), "3": ("mine/bloom-3b", 4)}
    for job, (model, parameters) in models.items():
        add_run(tmp_path, STAGE, job, settings__model_name=model, parameters=parameters)
    write_report([tmp_path], tmp_path / "report", all_runs=False)
    names = {path.stem for path in (tmp_path / "report").glob("zero-stages*.csv")}
    assert names == {"zero-stages-bloom-560m", "zero-stages-bloom-3b"}


# --- one run


def test_the_summary_of_a_job_is_printed(main_of, capsys):
    main_of(report, "--job", RUNS / "experiments/deepspeed-multi-gpu/2_gpus/results/109.json")
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|"]
    values = {name: (value, note) for name, value, note in rows}
    assert "Summary of 109: deepspeed-multi-gpu/2_gpus (completed, tiny-bloom)" in printed
    assert values["Train Loss (Final)"] == ("7.479", "")
    assert values["Training Speed, steps alone (samples/sec)"] == ("", "too few steps after the warm-up")
    assert values["Peak GPU memory (MiB)"] == ("901", "")
    assert values["Peak CPU memory of a rank (MiB)"] == ("708.9", "")
    assert not {"GPU-hours", "kWh"} & {*values} and "\nno GPU: 6 rows left out\n" in printed
    assert "Exact Match (%)" not in values
    assert printed.splitlines()[-2] == "model:      not saved"


def test_the_summary_of_a_job_shows_its_last_evaluations(tmp_path, main_of, capsys):
    evaluations = [{"epoch": n, "loss": n / 10} for n in range(1, 23)]
    folder = add_run(tmp_path, STAGE, "1", eval=evaluations, output_dir="output/1")
    write(folder / "output" / "1" / "adapter" / "adapter_config.json", "{}")  # of a run with SAVE_MERGED=False
    main_of(report, "--job", folder / "results/1.json")
    printed = capsys.readouterr().out
    assert printed.splitlines()[-2] == f"model:      {folder}/output/1/adapter"
    shown = [int(epoch) for epoch in re.findall(r"^\| Eval Loss \(Epoch (\d+)\)", printed, re.MULTILINE)]
    assert shown == list(range(3, 23)) and "\nearlier evaluations: 2 rows left out\n" in printed, printed


def test_the_summary_of_a_failed_job_keeps_its_measurements(tmp_path, main_of, capsys):
    folder = add_run(
        tmp_path,
        STAGE,
        "1",
        status="failed",
        exit_code=3,
        train=None,
        experiment=".",
        overrides=["nodes: 3 instead of 2"],
    )
    main_of(report, "--job", folder / "results" / "1.json")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Summary of 1: ZeRO-1, 1 rank (failed: exit code 3, tiny-bloom)" in printed
    assert "| Eval Loss (Epoch 2) | 7.096 | epoch 2 |" in printed
    assert "| Train Loss (Final) | | the run's status is failed |" in printed
    assert "not comparable: nodes: 3 instead of 2" in printed


# --- command line


def test_command_writes_the_report(tmp_path, main_of, capsys):
    for _ in range(2):  # the second report replaces the first
        main_of(report, BASELINE, "-o", tmp_path / "new")
        assert capsys.readouterr().out == f"1 run, 4 tables: {tmp_path}/new/index.html\n"
        (tmp_path / "new" / "zero-stages-old.csv").write_text("of an earlier report")
    main_of(report, BASELINE, "-o", tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        *("baseline.csv", "baseline.md", "gpu-memory.csv", "gpu-memory.md"),
        *("index.html", "predicted-memory.csv", "predicted-memory.md", "report.json", "runs.csv", "runs.md"),
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "error: nowhere: there is no such folder; give folders of experiments"),
        (["empty"], "error: empty: no runs found; run an experiment first, or give another folder"),
        (["empty", "-o", "full"], "error: full: contains files, but not a report; give a new folder with -o"),
        (["--job", "nowhere.json"], "error: nowhere.json: No such file or directory; give results/"),
        (["--job", "full/thesis.md"], "error: full/thesis.md: is not a valid run record (the file: Invalid JSON"),
        (["--jobs"], "error: command line: unrecognized arguments: --jobs; see --help"),
    ],
)
def test_bad_input_is_one_line(arguments, error, main_of, refusal, capsys):
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/thesis.md").write_text("mine")
    assert refusal(main_of, report, *arguments).startswith(error)
    assert capsys.readouterr() == ("", "")


def test_a_formula_is_text_in_a_spreadsheet(tmp_path):
    add_run(tmp_path, STAGE, "1", settings__model_name="=1|`x`<b>")
    write_report([tmp_path], tmp_path / "report", all_runs=False)
    (row,) = csv.DictReader((tmp_path / "report" / "runs.csv").open())
    assert row["Model"] == "'=1|`x`<b>"
    assert r"=1\|\`x\`\<b>" in (tmp_path / "report" / "runs.md").read_text()
