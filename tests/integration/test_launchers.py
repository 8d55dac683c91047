"""Tests of every launcher as a command, and of the content of a run's log and record.

The run "bf16_ddp" of the table uses `python -m torch.distributed.run`. Runs without a launcher fork from the server.
"""

import gzip
import json
import re

import pytest

from helpers import LAUNCHERS, Finished, free_port
from measure.profiling import PHASES, PROFILED_STEPS
from records.schema import read_record
from runs import PYTHON, TORCHRUN, uses
from workbench import SMALL, Bench


@pytest.mark.promise("commands work as printed")
@uses(PYTHON, TORCHRUN)
def test_documented_commands_work_as_printed(run: Finished):
    python, torchrun = (LAUNCHERS[name](1)[0] for name in ("python", "torchrun"))
    config = f"ds_configs/{TORCHRUN}.json"
    expected = {
        PYTHON: f" {python} scripts/train.py --deepspeed ds_configs/zero1.json",
        TORCHRUN: f" {torchrun} --nproc_per_node=2 scripts/train.py --deepspeed {config}",
    }
    assert run.command.endswith(expected[run.job_id]), run.command
    assert run.record["status"] == "completed"
    assert run.record["settings"]["model_name"] == "tiny-bloom"


def test_ranks_of_bare_srun_read_its_variables(bench: Bench, table):
    """Start two processes with only Slurm's variables, as srun does without torchrun."""
    port = free_port()
    slurm = {"SLURM_JOB_ID": 4711, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2}
    slurm |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port, "BATCH_SIZE": 2}
    ranks = [bench.start(SLURM_PROCID=i, SLURM_LOCALID=i, launcher="python", **slurm) for i in range(2)]
    ended = [process.wait() for process in ranks]
    assert [each.code for each in ended] == [0, 0], "\n".join(map(str, ended))
    for rank, each in enumerate(ended):
        assert f"Initializing process group for rank {rank}\n" in each.log
        assert f"MASTER_ADDR: localhost\nMASTER_PORT: {port}\n" in each.log
        assert f"torch.distributed initialized: rank {rank} / world size 2\n" in each.log
    record = ended[0].record
    assert (record["job_id"], record["world_size"], record["status"]) == ("4711", 2, "completed")
    assert ended[0].effective("strategy") == "DDP"
    assert ended[0].losses == pytest.approx(table("plain").losses, abs=1e-4, rel=0)
    assert "eval_loss" not in ended[1].log, "only rank 0 logs the loss"


def test_ranks_agree_on_the_id_that_they_make_up(server, tmp_path):
    """Without JOB_ID, as in README, the parts of all ranks are in one folder, and the run resumes from it."""
    bench = Bench(server, tmp_path / "work", SMALL | {"JOB_ID": "unset"})
    zero2 = ("--deepspeed", "ds_configs/zero2.json")
    bench.run(*zero2, ranks=2)
    (output,) = (bench.folder / "output").iterdir()
    (record,) = (bench.folder / "results").glob("*.json")
    assert re.fullmatch(r"local-\d{8}-\d{6}-\d+", output.name) and record.stem == output.name
    resumed = bench.run(*zero2, "--resume_from_checkpoint", "--num_train_epochs", 3, ranks=2, JOB_ID=output.name)
    assert "resuming from step 2: " in resumed.log


def test_launch_py_profiles_two_ranks(train):
    flags = ["--max_steps", 8, "--profile", "--save_strategy", "no", "--deepspeed", "ds_configs/zero1.json"]
    finished = train("profiled", *flags, ranks=2, launcher="launch.py", BATCH_SIZE=2)
    ranks = finished.record["profile"]
    assert len(ranks) == 2
    for number, found in enumerate(ranks):
        assert found["steps"] == PROFILED_STEPS
        parts = [found[name] for name in (*PHASES, "communication", "other")]
        assert sum(parts) == pytest.approx(found["seconds_per_step"], abs=1e-4)
        assert all(found[name] > 0 for name in ("forward", "backward", "optimizer", "communication"))
        trace = json.loads(gzip.decompress((finished.folder / found["trace"]).read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert found["trace"].endswith(f"rank_{number}.json.gz")
        assert {"forward", "backward", "aten::mm", "gloo:all_reduce"} <= names
    assert "profile of a step" in finished.log
    # The steady rate excludes the profiled steps 4 to 6
    assert finished.record["train"]["steady_steps"] == 2


def test_the_bandwidth_test_prints_and_writes_its_results_and_rejects_a_slow_network(train, workplace):
    script = {"script": "scripts/measure_bandwidth.py", "ranks": 2}
    done = train("bandwidth", "--sizes", "--output", "bandwidth.json", code=3, MIN_BANDWIDTH=1000, **script)
    result = json.loads((workplace / "bandwidth.json").read_text())
    expected = {"ranks": 2, "message_bytes": 4 * 2**20, "iterations": 5, "backend": "gloo"}
    assert {name: result[name] for name in expected} == expected
    figure = result["bus_bandwidth_gb_per_s"]
    assert f"bandwidth test: bus_bandwidth_gb_per_s {figure}, ranks 2, " in done.out
    line = f"error: bandwidth test: {figure} GB/s between 2 ranks, at least 1000 GB/s expected; if there"
    assert line in done.err
    assert [size["message_bytes"] for size in result["sizes"]] == [2**power for power in range(15, 27)]
    last = result["sizes"][-1]
    row = f"   64 MiB{last['seconds'] * 1000:12.3f}{last['bus_bandwidth_gb_per_s']:23.4g}\nfrom "
    assert row in done.out


# The log and the record


@uses("plain", TORCHRUN)
def test_log_has_the_trainers_lines(run: Finished):
    """The workshop's shell one-liners search for these lines."""
    logged = [float(loss) for loss in re.findall(r"\{'eval_loss': '([\d.]+)', 'eval_perplexity': '", run.log)]
    assert logged == pytest.approx(run.losses, rel=1e-3)  # the log shows four digits
    assert len(re.findall(r"\{'train_runtime': '[\d.]+', 'train_samples_per_second': '", run.log)) == 1
    assert len(re.findall(r"\{'loss': '", run.log)) == 2  # every 5th of the 8 steps, and the last step
    assert f"Run record: results/{run.job_id}.json\n" in run.log
    assert f"Model saved to output/{run.job_id}\n" in run.log


@uses("plain", "ddp", TORCHRUN, "zero3", "full_shard", "hybrid_shard_2x2")
def test_log_is_not_flooded_with_warnings(run: Finished):
    assert "Slicing a flattened dim" not in run.log
    assert "find_unused_parameters" not in run.log, "PyTorch's long advice on each rank must not appear"
    assert len([line for line in run.log.splitlines() if "Warning" in line]) < 10


@uses("plain", "ddp", "zero2")
def test_record_of_a_finished_run(run: Finished):
    record = run.record
    assert (record["schema"], record["status"], record["exit_code"]) == (1, "completed", 0)
    assert record["output_dir"] == f"output/{run.job_id}"
    assert [(entry["epoch"], entry["step"]) for entry in record["eval"]] == [(1, 4), (2, 8)]
    pauses = read_record(run.record_path).pauses
    assert [pause.what for pause in pauses] == [*["evaluation", "saving"] * 2, "saving"], "the last is the model"
    train = record["train"]
    assert record["eval"][-1]["loss"] - 0.5 < train["loss_mean"] < 7.63  # an untrained model has a loss of log(2048)
    assert train["steady_steps"] == 5, "3 of the 8 steps are warm-up"
    # On a busy machine either rate may be the larger. tests/unit checks that the steady one excludes the pauses
    assert min(train["steady_samples_per_second"], train["samples_per_second"]) > 0
    assert len(record["peak_process_mib"]) == record["world_size"]
    assert record["missing"]["peak_gpu_memory"] == "no GPU"


CRASH = """
from training.callbacks import MeasureCallback

def end(self, args, state, control, **kwargs):
    if state.global_step == 3 and os.environ["RANK"] == "1":
        raise ValueError("crash")

MeasureCallback.on_step_end = end
"""


def test_record_says_failed_when_another_rank_crashes(train):
    """Rank 0, which writes the record, is ended by the launcher or fails because its connection is closed."""
    crashed = train("crashed", patch=CRASH, ranks=2, BATCH_SIZE=2, code=1)
    assert (crashed.record["status"], crashed.record["exit_code"]) == ("failed", 1), crashed


@uses("tracked")
def test_offline_wandb_run_has_the_documented_metric_names(run: Finished):
    pytest.importorskip("wandb")
    (file,) = (run.folder / "wandb" / run.job_id / "wandb").glob("offline-run-*/*.wandb")  # only rank 0 creates a run
    assert f"wandb sync wandb/{run.job_id}/wandb/offline-run-*" in run.log
    means = run.record["callbacks"]
    # Without a GPU, the metrics are the process's memory and utilisation
    names = {"avg_cpu_util_%", "std_cpu_util_%", "avg_process_mem_MB"}
    assert set(means) == names | {"train/samples_per_second_mean", "train/steps_per_second_mean"}
    content = file.read_bytes()
    for name, value in means.items():
        assert name.encode() in content and json.dumps(value).encode() in content, name
    assert f"tracked-{run.job_id}".encode() in content
