"""Every launcher, and what a run writes into its log and its record."""

import re
import signal
import socket

import pytest

from helpers import LAUNCHERS, Finished, free_port, patched, snapshot
from runs import STRATEGIES, uses


@uses("zero1-1", "zero2_cpu_offload_pinned_memory-2")
def test_documented_commands_work_as_printed(run: Finished):
    command = run.command.split("EM_F1=False ")[-1]
    python, torchrun = (LAUNCHERS[name](1)[0] for name in ("python", "torchrun"))
    assert command.endswith(
        {
            "zero1-1": f" {python} scripts/train.py --deepspeed ds_configs/zero1.json",
            "zero2_cpu_offload_pinned_memory-2": f" {torchrun} --nproc_per_node=2"
            " scripts/train.py --deepspeed ds_configs/zero2_cpu_offload_pinned_memory.json",
        }[run.job_id]
    ), command
    assert run.record["status"] == "completed"
    assert run.record["settings"]["model_name"] == "tiny-bloom"


@uses("ddp-2", "zero3-2")
def test_start_up_lines_of_each_rank(run: Finished):
    for rank in range(2):
        assert f"Initializing process group for rank {rank}\n" in run.log
        assert f"torch.distributed initialized: rank {rank} / world size 2\n" in run.log
    assert len(re.findall(r"^MASTER_ADDR: 127\.0\.0\.1$", run.log, re.MULTILINE)) == 2, run
    ports = re.findall(r"^MASTER_PORT: (\d+)$", run.log, re.MULTILINE)
    assert len(ports) == 2
    assert len(set(ports)) == 1


def test_bare_srun_variables(background, table):
    """Two processes as srun starts them: no torchrun, ranks only in Slurm's names."""
    port = free_port()
    slurm = {"SLURM_JOB_ID": 4711, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2}
    slurm |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port, "BATCH_SIZE": 2, "JOB_ID": ""}
    ranks = [background("4711", SLURM_PROCID=i, SLURM_LOCALID=i, launcher="python", **slurm) for i in range(2)]
    runs = [process.wait() for process in ranks]
    assert [run.code for run in runs] == [0, 0], "\n".join(map(str, runs))
    for rank, run in enumerate(runs):
        assert f"Initializing process group for rank {rank}\n" in run.log
        assert f"MASTER_ADDR: localhost\nMASTER_PORT: {port}\n" in run.log
        assert f"torch.distributed initialized: rank {rank} / world size 2\n" in run.log
    record = runs[0].record
    assert (record["job_id"], record["world_size"], record["status"]) == ("4711", 2, "completed")
    assert runs[0].effective("strategy") == "DDP"
    assert runs[0].losses == pytest.approx(table("plain").losses, abs=1e-4, rel=0)
    assert "eval_loss" not in runs[1].log, "only rank 0 reports"


@uses("plain", "ddp-2", "zero3-2")
def test_log_has_the_trainers_own_lines(run: Finished):
    """The workshop's shell one-liners search for these."""
    logged = [float(loss) for loss in re.findall(r"\{'eval_loss': '([\d.]+)', 'eval_runtime': '[\d.]+',", run.log)]
    assert logged == pytest.approx(run.losses, rel=1e-3)  # four digits are printed
    assert len(re.findall(r"\{'train_runtime': '[\d.]+', 'train_samples_per_second': '", run.log)) == 1
    assert len(re.findall(r"\{'loss': '", run.log)) == 4  # 16 steps: every 5th, and the last
    assert f"Run record: results/{run.job_id}.json\n" in run.log
    assert f"Model saved to output/{run.job_id}\n" in run.log


@uses(*(name for name in STRATEGIES if name.startswith("zero3") or name == "plain"))
def test_log_is_not_flooded_with_warnings(run: Finished):
    assert len([line for line in run.log.splitlines() if "Warning" in line]) < 10


@uses("plain", "ddp-2", "zero2-2")
def test_record_of_a_finished_run(run: Finished):
    record = run.record
    assert (record["schema"], record["status"], record["exit_code"]) == (1, "completed", 0)
    assert record["started"] <= record["finished"]
    assert record["nodes"] == [socket.gethostname()]
    assert record["output_dir"] == f"output/{run.job_id}"
    assert record["resumed_from"] is None
    assert record["settings"]["learning_rate"] == 2e-3
    assert record["settings"]["num_train_epochs"] == 2
    assert [(entry["epoch"], entry["step"]) for entry in record["eval"]] == [(1, 8), (2, 16)]
    assert all(entry["samples_per_second"] > 0 for entry in record["eval"])
    train = record["train"]
    assert record["eval"][-1]["loss"] - 0.5 < train["loss_mean"] < 7.63  # log(2048), what an untrained model has
    assert train["steady_steps"] == 13, "16 steps, 3 of them to warm up"
    # the steps alone are faster than the steps with two evaluations and saves
    assert train["steady_samples_per_second"] > train["samples_per_second"] > 0
    assert len(record["peak_process_mib"]) == record["world_size"]
    assert record["peak_gpu_memory"] is None
    assert record["missing"]["peak_gpu_memory"] == "no GPU"
    assert not list(run.record_path.parent.glob("*.tmp"))


def test_record_while_the_run_runs_and_after_sigterm(background):
    process = background("stopped", NUM_EPOCHS=100000)
    unfinished = process.finished(None)
    process.until(lambda: unfinished.record_path.exists() and len(unfinished.record.get("eval", [])) > 1)
    record = unfinished.record
    assert (record["status"], record["exit_code"], record["finished"]) == ("running", None, None)
    assert record["knobs"]["strategy"]["effective"] == "plain"
    process.popen.send_signal(signal.SIGTERM)
    run = process.wait()
    assert run.code == 75, run
    assert (run.record["status"], run.record["exit_code"]) == ("stopped", 75)
    assert len(run.losses) > 1
    assert "Traceback" not in run.log


RANK_ENDS = """
import os
from training.callbacks import RecordCallback

def end(self, args, state, control, **kwargs):
    if state.global_step == 3 and os.environ["RANK"] == "{rank}":
        {how}

RecordCallback.on_step_end = end
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_record_says_failed_when_a_rank_crashes(workplace, background, rank: int):
    script = patched(workplace, f"rank_{rank}_crashes", RANK_ENDS.format(rank=rank, how='raise ValueError("crash")'))
    run = background(f"crashed_{rank}", processes=2, BATCH_SIZE=2, script=script).wait()
    assert run.code == 1, run
    assert (run.record["status"], run.record["exit_code"]) == ("failed", 1), run


def test_record_of_a_run_whose_rank_was_killed(workplace, background):
    script = patched(workplace, "rank_1_killed", RANK_ENDS.format(rank=1, how="os.kill(os.getpid(), 9)"))
    run = background("killed_rank", processes=2, BATCH_SIZE=2, script=script).wait()
    assert run.code == 1, run
    # rank 0 sees the broken connection or torchrun's SIGTERM, whichever comes first
    assert run.record["status"] in ("failed", "stopped"), run
    arguments = ("killed_rank", "--exit-code", "1")  # what job.sh does with torchrun's exit code
    finish = background("finish", *arguments, script="scripts/job/finish.py", PYTHONPATH="scripts").wait()
    assert finish.code == 1, finish
    assert (run.record["status"], run.record["exit_code"]) == ("failed", 1)


@uses("plain")
def test_a_finished_run_is_not_overwritten(run: Finished, background):
    before = snapshot(run.record_path, run.output)
    assert len(before) > 5
    again = background("plain").wait()
    assert again.code == 2, again
    assert again.error_lines == [
        "error: output/plain: holds the model of a finished run; "
        "give another --output_dir, a new JOB_ID, or --resume_from_checkpoint"
    ]
    elsewhere = background("intruder", OUTPUT_DIR="output/plain").wait()
    assert elsewhere.code == 2, elsewhere
    assert elsewhere.error_lines[0].startswith("error: output/plain: holds the model of a finished run;")
    assert snapshot(run.record_path, run.output) == before
    assert not elsewhere.record_path.exists()


@uses("unsaved")
def test_save_strategy_no_saves_nothing_and_keeps_its_record(run: Finished, background):
    assert not list(run.output.rglob("*"))
    assert "model not saved (SAVE_STRATEGY=no)\n" in run.log
    assert run.record["status"] == "completed"
    before = snapshot(run.record_path)
    again = background("unsaved", SAVE_STRATEGY="no").wait()
    assert again.code == 2, again
    assert again.error_lines == [
        "error: results/unsaved.json: is the record of a finished run; set a new JOB_ID, or move the file away"
    ]
    assert snapshot(run.record_path) == before
