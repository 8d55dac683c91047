"""gpu_check.py: its rows, its table from the figures of a GPU, and a second call that goes on from the first."""

import json
import os
from pathlib import Path

import pytest

import gpu_check
from errors import WorkshopError
from helpers import REPOSITORY

V100 = {"torch": "2.13.0+cu126", "cuda": "12.6", "profile": "gpu", "gpu": "Tesla V100-SXM2-32GB"}
V100 |= {"gpu_memory_mib": 32501, "cpu": "Xeon", "cpus": 8, "compute_capability": "7.0", "driver": "535.1"}


def test_all_configs_and_strategies_of_one_gpu_are_rows():
    names = {row.name for row in gpu_check.ROWS}
    assert len(names) == len(gpu_check.ROWS)
    assert {path.stem for path in (REPOSITORY / "ds_configs").glob("*.json")} < names
    strategies = {"full_shard", "shard_grad_op", "full_shard_activation_checkpointing", "full_shard_cpu_offload"}
    assert {"plain", "ddp"} | strategies < names
    for row in gpu_check.ROWS:
        assert all((REPOSITORY / flag).is_file() for flag in row.flags if flag.endswith(".json")), row


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--cpu", "--rows", "zero9"], "error: --rows zero9: there is no such row here; choose from plain, zero2, "),
        (["--cpu", "--rows", "bloom-560m-plain"], "error: --rows bloom-560m-plain: there is no such row here"),
        (["--cpu", "--timeout", "0"], "error: --timeout: 0 is too small; give seconds"),
        (["--gpu"], "error: command line: unrecognized arguments: --gpu; see --help"),
    ],
)
def test_mistakes_are_one_line(words, found, refusal):
    assert refusal(gpu_check.parse, words).startswith(found)


def test_other_packages_end_it_unless_it_is_told_to_go_on(monkeypatch, refusal, capsys):
    monkeypatch.setattr(gpu_check, "wrong_pins", lambda text: ["torch 2.11.0 instead of 2.13.0"])
    line = refusal(gpu_check.check_packages, False, code=3)
    assert line.startswith("error: packages: torch 2.11.0 instead of 2.13.0; ")
    assert line.endswith("or go on with --any_version")
    gpu_check.check_packages(gpu_check.parse(["--cpu", "--any_version"]).any_version)
    assert capsys.readouterr().out == "packages: torch 2.11.0 instead of 2.13.0\n"


# The table


def full(samples_per_second: float, **others: float) -> dict:
    return {"status": "completed", "samples_per_second": samples_per_second, "peak_gpu_gib": 9.5, **others}


def test_the_table_shows_what_was_measured_and_leaves_the_rest_empty():
    rows = {
        "plain": {"status": "completed", "train_loss": 7.31, "reloaded_loss": 7.2, "f1": 0.0, "seconds": 12.4},
        "bloom-560m-zero2_cpu_offload": full(8.0, estimated_gib=10.1, matmul_peak_tflops=95.2),
        "bloom-560m-zero2_cpu_offload_pinned_memory": full(10.0, pinned_gib=8.25),
        "zero3": {"status": "failed", "reason": "error: nvcc: not found; load it; read x.log"},
    }
    text = gpu_check.results_markdown({"machine": V100, "rows": rows})
    assert text.startswith("[Tesla V100-SXM2-32GB, 32 GiB, driver 535.1, torch 2.13.0+cu126, 8 CPU cores, Xeon, "
                           "peak 95 TFLOP/s]\n")  # fmt: skip
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
             for line in text.splitlines() if line.startswith("|")}  # fmt: skip
    titles = ["Status", "Train loss", "Reloaded", "F1", "Samples/s", "Peak GPU (GiB)", "Estimate (GiB)"]
    assert cells["Run"] == [*titles, "Pinned (GiB)", "Time (s)"]
    assert cells["plain"] == ["completed", "7.310", "7.200", "0.0", "", "", "", "", "12"]
    assert cells["bloom-560m-zero2_cpu_offload"] == ["completed", "", "", "", "8.00", "9.50", "10.10", "", ""]
    assert cells["zero3"] == ["failed", *[""] * 8]
    assert "- zero3: error: nvcc: not found; load it; read x.log\n" in text
    assert "- ZeRO-2 with offload: 10.00 samples/s pinned, 8.00 not pinned: +25 %\n" in text
    assert "- 4 rows in 0.2 minutes\n" in text


# Calls one after another


@pytest.fixture
def calls(monkeypatch, capsys):
    """Runs the script on a pretended V100, with results by row; gives exit code, rows that ran, what was printed."""

    def call(results: dict, *words: str) -> tuple[int, list[str], str]:
        ran = []

        def run_row(row, folder: Path, log: Path, environment: dict, arguments) -> dict:
            ran.append(row.name)
            result = results.get(row.name, {})
            if isinstance(result, Exception):
                raise result
            return {"status": "completed"} | result

        monkeypatch.setattr(gpu_check, "run_row", run_row)
        monkeypatch.setattr(gpu_check, "check_packages", lambda any_version: None)
        monkeypatch.setattr(gpu_check, "machine", lambda environment, cpu: results.get("machine", V100))
        monkeypatch.setattr(gpu_check, "compile_optimizers", lambda environment: None)
        monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
        monkeypatch.setattr(gpu_check.sys, "argv", ["gpu_check.py", *words])
        with pytest.raises(SystemExit) as ended:
            gpu_check.main()
        return ended.value.code, ran, capsys.readouterr().out

    return call


FAILED = {"status": "failed", "reason": "error: x: y; z; read x.log"}


def test_a_second_call_runs_what_failed_or_was_not_reached(calls):
    code, ran, printed = calls({"zero2": FAILED}, "--rows", "plain", "zero2")
    assert (code, ran) == (3, ["plain", "zero2"])
    assert "zero2: failed (error: x: y; z; read x.log)" in printed
    code, ran, _ = calls({}, "--rows", "plain", "zero2", "zero3")
    assert (code, ran) == (0, ["zero2", "zero3"])
    content = json.loads(Path("results/gpu_check/gpu_check.json").read_text())
    assert list(content["rows"]) == ["plain", "zero2", "zero3"]
    assert Path("results/gpu_check/gpu_check.md").read_text().count("| completed |") == 3


def test_a_row_fails_that_ends_with_another_loss_than_the_plain_trainer(calls):
    losses = {"plain": {"eval_loss": 7.32}, "zero2": {"eval_loss": 7.35}, "zero0": {"eval_loss": 7.5}}
    losses |= {"bloom-560m-plain": {"train_loss": 12.4}, "bloom-560m-zero2": {"train_loss": 12.8}}
    code, _, printed = calls(losses, "--rows", *losses)
    assert code == 3
    assert "zero0: failed (the loss is 7.500, that of plain 7.320)" in printed
    assert "bloom-560m-zero2: failed (the loss is 12.800, that of bloom-560m-plain 12.400)" in printed
    assert printed.count(": failed (") == 2


def test_a_row_that_was_not_compiled_says_why(monkeypatch):
    """bloom-560m-compiled where nothing can be compiled: the training ran eagerly, and is no figure for that row."""
    train = {"loss_mean": 12.4, "steady_samples_per_second": 8.0, "steady_tokens_per_second": 900.0}
    train |= {"mfu_percent": 30.0, "matmul_peak_tflops": 90.0}
    knobs = {"precision": {"effective": "fp16"}, "compiled": {"requested": True, "effective": False}}
    record = {
        "train": train,
        "knobs": knobs,
        "missing": {"knobs.compiled": "inductor cannot compile on gpu01 (no g++)"},
    }
    record |= {"peak_gpu_memory": None, "peak_pinned_memory": None}

    def train_once(words, variables, folder: Path, log, timeout) -> bool:
        (folder / "results").mkdir()
        (folder / "results" / f"{variables['JOB_ID']}.json").write_text(json.dumps(record))
        return True

    monkeypatch.setattr(gpu_check, "train_once", train_once)
    (row,) = [row for row in gpu_check.ROWS if row.name == "bloom-560m-compiled"]
    result = gpu_check.run_row(row, Path(), Path("x.log"), {}, gpu_check.parse([]))
    assert result["status"] == "not compiled"
    assert result["reason"] == "inductor cannot compile on gpu01 (no g++); read x.log"


def test_a_saved_model_that_cannot_be_loaded_is_a_failed_row(calls):
    results = {"zero2": WorkshopError("--model_name", "cannot be loaded", "give another"), "zero3": KeyError("eval")}
    code, ran, printed = calls(results, "--rows", "zero2", "zero3", "plain")
    assert (code, ran) == (3, ["plain", "zero2", "zero3"])
    assert "zero2: failed (--model_name: cannot be loaded; give another; read " in printed
    assert "zero3: failed (KeyError: 'eval'; read " in printed
    assert calls({}, "--rows", "zero2", "zero3")[:2] == (0, ["zero2", "zero3"])


@pytest.mark.parametrize(("visible", "chosen"), [("2,3", "2"), ("GPU-1,GPU-2", "GPU-1"), (None, "0")])
def test_the_rows_see_one_gpu_and_this_process_none(calls, monkeypatch, visible, chosen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_check.environment_of_rows(cpu=False)["CUDA_VISIBLE_DEVICES"] == chosen
    without = gpu_check.environment_of_rows(cpu=True)
    assert (without["CUDA_VISIBLE_DEVICES"], without["REQUIRE_GPU"]) == ("", "0")
    calls({}, "--rows", "plain")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_each_row_is_kept_as_it_ends(calls, monkeypatch):
    def interrupted(row, *arguments):
        if row.name == "ddp":
            raise KeyboardInterrupt
        return {"status": "completed"}

    monkeypatch.setattr(gpu_check, "one_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calls({}, "--rows", "plain", "ddp")
    assert list(json.loads(Path("results/gpu_check/gpu_check.json").read_text())["rows"]) == ["plain"]


def test_results_of_another_machine_are_not_mixed(calls, refusal):
    calls({}, "--rows", "plain")
    line = refusal(gpu_check.load_results, Path("results/gpu_check/gpu_check.json"), V100 | {"gpu": "H100"})
    assert "is of another machine or version (gpu Tesla V100-SXM2-32GB); move it away, or give another --output" in line
    Path("broken.json").write_text("[]")
    assert "is no result of this script" in refusal(gpu_check.load_results, Path("broken.json"), V100)


def test_what_cannot_fit_is_left_out_with_its_reason(calls):
    code, ran, printed = calls({"machine": V100 | {"gpu_memory_mib": 16384}}, "--rows", "bloom-560m-plain", "plain")
    assert (code, ran) == (0, ["plain"])
    assert "bloom-560m-plain: left out (18.1 GiB needed by the estimate, the GPU has 16.0)" in printed
