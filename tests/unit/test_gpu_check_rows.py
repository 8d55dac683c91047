"""Tests of the rows and the table of gpu_check.py, with invented records. tests/integration trains a row."""

from pathlib import Path

import pytest

import gpu_check
from estimate.memory import MemoryPart
from helpers import REPOSITORY

V100 = {"gpu": "Tesla V100-SXM2-32GB", "gpu_memory_mib": 32501, "cpu": "Xeon", "cpus": 8, "torch": "2.13.0+cu126"}
FAILED = {"status": "failed", "reason": "error: x: y; z; read x.log"}


def record(loss: float, **others: object) -> dict:
    """Return the fields of a run record that the table reads."""
    training = {"loss_mean": 7.31, "steady_samples_per_second": 8.0, "steady_tokens_per_second": 1900.0}
    training |= {"mfu_percent": None, "matmul_peak_tflops": None}
    knobs = {"precision": {"effective": "fp16"}, "compiled": {"requested": False, "effective": False}}
    content = {"status": "completed", "output_dir": "output/x", "eval": [{"loss": 7.6}, {"loss": loss}]}
    content |= {"train": training, "knobs": knobs, "missing": {}, "peak_gpu_memory": [{"allocated_mib": 512.0}]}
    return content | {"peak_pinned_memory": None, "f1": None} | others


@pytest.fixture
def run_script(monkeypatch, main_of, capsys):
    """Return a function that runs the script on a simulated V100 and returns the exit code and the output.

    records: the run record of each job id.
    """

    def run(records: dict[str, dict], *words: str, machine: dict = V100) -> tuple[int, str]:
        monkeypatch.setattr(gpu_check, "run_training", lambda job_id, *_: records.get(job_id, record(7.3)))
        monkeypatch.setattr(gpu_check, "machine", lambda environment, cpu: machine)
        code = 0
        try:
            main_of(gpu_check, *([] if "--rows" in words else ["--rows"]), *words)
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().out

    return run


def test_all_configs_and_strategies_of_one_gpu_are_rows():
    names = {row.name for row in gpu_check.ROWS}
    assert len(names) == len(gpu_check.ROWS)
    assert {path.stem for path in (REPOSITORY / "ds_configs").glob("*.json")} < names
    strategies = {"full_shard", "shard_grad_op", "full_shard_activation_checkpointing", "full_shard_cpu_offload"}
    assert {"plain", "ddp", "lora", "lora_zero3", "lora_full_shard"} | strategies < names
    for row in gpu_check.ROWS:
        files = [Path(word) for word in gpu_check.training_command(row) if word.endswith((".py", ".json"))]
        assert files and all(file.is_file() for file in files), row


def test_the_table_shows_measured_values_and_leaves_other_cells_empty(run_script):
    records = {"plain": record(7.3, f1=0.5), "zero2": FAILED}
    _, printed = run_script(records, "plain", "bloom-560m-plain", "zero2")
    text = Path("results/gpu_check/gpu_check.md").read_text()
    assert text in printed
    assert text.startswith("[gpu Tesla V100-SXM2-32GB, gpu_memory_mib 32501, cpu Xeon, cpus 8, torch 2.13.0+cu126]\n")
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
             for line in text.splitlines() if line.startswith("|")}  # fmt: skip
    losses = ["Train loss", "Eval loss", "Reloaded", "F1"]
    sizes = ["Samples/s", "Real tokens/s", "Peak GPU (GiB)", "Estimate (GiB)", "Time (s)"]
    assert cells["Run"] == ["Status", "Precision", *losses, *sizes]
    assert cells["plain"][:-1] == [
        "completed",
        "fp16",
        "7.310",
        "7.300000",
        "7.300",
        "0.5",
        "8.00",
        "1,900",
        "0.50",
        "",
    ]
    assert float(cells["bloom-560m-plain"][-2]) == pytest.approx(19.1, abs=0.1), "column Estimate (GiB)"
    assert cells["zero2"] == ["failed", *[""] * 9, "0"]
    assert "- zero2: error: x: y; z; read x.log\n" in text


FAILURES = {  # records, flags before the names of the rows, and the lines of the rows that do not complete
    "other losses than the plain Trainer's": (
        {"plain": record(7.32), "plain_reloaded": record(7.33), "zero0": record(7.5), "zero1": record(7.3)}
        | {"zero2": record(7.35), "zero3": record(7.3), "zero3_reloaded": record(7.6), "zero1_reloaded": FAILED},
        (),
        [
            "zero0: failed (Eval loss is 7.500000, but Eval loss of plain is 7.320000)",
            "zero1: failed (error: x: y; z; read x.log)",
            "zero3: failed (Reloaded is 7.600000, but Eval loss of plain is 7.320000)",
        ],
    ),
    "nothing learned": (
        dict.fromkeys(("plain", "lora", "lora_reloaded"), record(7.6)),
        (),
        [f"{name}: failed (Eval loss is 7.600, and 7.600 after one epoch)" for name in ("plain", "lora")],
    ),
    # LoRA trains other weights than the plain Trainer, so its losses are others. Its merged model has its loss
    "LoRA": (
        {"plain": record(7.3), "lora": record(7.5), "lora_reloaded": record(7.51)}
        | dict.fromkeys(("lora_zero3", "lora_zero3_reloaded"), record(7.49))
        | {"lora_full_shard": record(7.52), "lora_full_shard_reloaded": record(7.8)},
        (),
        ["lora_full_shard: failed (Reloaded is 7.800000, but Eval loss of lora is 7.500000)"],
    ),
    # Without a row of its own, a base model that was saved without its adapters would pass
    "LoRA, not merged": (
        {"lora": record(7.5), "lora_reloaded": record(7.3)},
        (),
        ["lora: failed (Reloaded is 7.300000, but Eval loss of lora is 7.500000)"],
    ),
    "a stop and a hang that are not seen": (
        {"stop": record(7.3, exit_code=0), "hang": FAILED},
        ("--ranks", "2", "--rows"),
        ["stop: failed (exit code 0 after a stop)", "hang: failed (error: x: y; z; read x.log)"],
    ),
    "no room, which is not a failure": (
        {"bloom-560m-plain": {"status": "oom", "reason": "error: memory: CUDA out of memory; offload"}},
        (),
        ["bloom-560m-plain: oom (error: memory: CUDA out of memory; offload)"],
    ),
}


@pytest.mark.promise("LoRA is compared with the same method that trains all weights")
@pytest.mark.parametrize(("records", "flags", "expected"), FAILURES.values(), ids=FAILURES)
def test_a_row_that_fails_is_named_with_its_reason(run_script, records, flags, expected):
    Path("results/gpu_check_2_ranks").mkdir(parents=True)
    Path("results/gpu_check_2_ranks/hang.log").write_text("error: time: still running after 600 s; raise --timeout")
    code, printed = run_script(records, *flags, *(name for name in records if not name.endswith("_reloaded")))
    assert code == (3 if ": failed (" in printed else 0)
    lines = [line for line in printed.splitlines() if ": failed (" in line or ": oom (" in line]
    assert [line.rpartition(", ")[0] for line in lines] == expected


def test_rows_of_several_ranks_fail_by_loss_and_held_bytes(run_script, monkeypatch):
    held = [{"parameters": 100, "gradients": None, "optimizer_state": 200}] * 4
    records = {"one_rank": record(7.3, held=held), "zero2": record(7.3005, held=held), "ddp": record(7.302, held=held)}
    records |= {"zero3": record(7.3, held=[*held, {"parameters": 102, "gradients": None, "optimizer_state": 200}])}
    parts = [MemoryPart("parameters", 100), MemoryPart("gradients", 7), MemoryPart("optimizer state", 150, 50)]
    monkeypatch.setattr(gpu_check, "predicted_parts", lambda record, python: parts)
    code, printed = run_script(records, "--ranks", "4", "--rows", *records)
    assert code == 3
    assert "ddp: failed (Eval loss is 7.302000, but Eval loss of one_rank is 7.300000)" in printed
    assert "zero3: failed (parameters: 102 bytes held, 100 estimated)" in printed
    assert printed.count(": failed (") == 2


@pytest.mark.parametrize(("visible", "chosen"), [("2,3", "2"), ("GPU-1,GPU-2", "GPU-1")])
def test_the_rows_get_one_gpu_and_no_knob_of_the_job(monkeypatch, visible, chosen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("TRAIN_SIZE", "1")
    variables = gpu_check.training_environment(Path(), cpu=False)
    assert variables["CUDA_VISIBLE_DEVICES"] == chosen
    assert "TRAIN_SIZE" not in variables


def test_results_of_another_machine_are_not_mixed(run_script, refusal):
    run_script({}, "plain")
    line = refusal(lambda: run_script({}, "plain", machine=V100 | {"gpu": "H100"}))
    assert "has results of another machine or version: gpu Tesla V100-SXM2-32GB, " in line
    assert line.endswith("; move the file away, or give another --output")
