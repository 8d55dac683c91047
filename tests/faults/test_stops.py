"""Tests of runs that are killed or stopped at a given call, and of runs that resume from their checkpoints.

A run of 4 steps saves a checkpoint after steps 2 and 4. `make test` tries a few cases, `make test-faults` the others.
"""

import signal
import socket

import pytest
import torch

from helpers import REPOSITORY, Finished
from workbench import STEP, Bench, complete_marks, patch_call, same_training, same_weights

KEPT = ("--save_total_limit", 2)
RESUME = "--resume_from_checkpoint"
PAUSE = "signal.pause()"
TEST_FAULTS_ONLY = pytest.mark.faults


def complete_checkpoints(ended: Finished) -> set[str]:
    return {name for name, marked in complete_marks(ended.output).items() if marked}


# Killed

TORN_FILE = "open(args[1], 'wb').write(b'torn'); os.kill(os.getpid(), signal.SIGKILL)"
TORN_FOLDER = "os.remove(os.path.join(args[0], 'optimizer.pt')); os.kill(os.getpid(), signal.SIGKILL)"
FIRST, BOTH = {"checkpoint-2"}, {"checkpoint-2", "checkpoint-4"}
REMOVE_OLDER = "training.checkpoints.CheckpointCallback.remove_older"
KILLED = {  # the patch that kills the run at this moment, and the checkpoints that are complete at this moment
    "before the first record": (patch_call("records.writer.RunRecord.write"), set()),
    "while the record is replaced": (patch_call("pathlib.Path.replace"), set()),
    "in the first step": (patch_call(STEP), set()),
    "between two checkpoints": (patch_call(STEP, 4), FIRST),
    "before a checkpoint's first file": (patch_call("transformers.Trainer._save_checkpoint", 2), FIRST),
    "before a checkpoint's optimizer": (
        patch_call("transformers.Trainer._save_optimizer_and_scheduler", 2),
        FIRST,
    ),
    "in the middle of a file": (patch_call("torch.save", 6, TORN_FILE), FIRST),
    "before a checkpoint is marked": (patch_call("training.checkpoints.CheckpointCallback.on_save", 2), FIRST),
    "while a checkpoint is marked": (patch_call("training.checkpoints.write_json", 2), FIRST),
    "before the older checkpoint is removed": (patch_call(REMOVE_OLDER, 2), BOTH),
    "while the model is saved": (patch_call("transformers.modeling_utils.safe_save_file", 3), BOTH),
    "as the run ends": (patch_call("records.writer.RunRecord.__exit__"), BOTH),
}
IN_MAKE_TEST = (
    "in the first step",
    "in the middle of a file",
    "before a checkpoint is marked",
    "while the model is saved",
)


@pytest.mark.promise("reliability 4")
@pytest.mark.parametrize(
    "when", [pytest.param(each, marks=[] if each in IN_MAKE_TEST else TEST_FAULTS_ONLY) for each in KILLED]
)
def test_a_killed_run_can_be_started_again(bench: Bench, when):
    patch, expected = KILLED[when]
    dead = bench.run(*KEPT, script=bench.patched(patch), code=-signal.SIGKILL)
    assert complete_checkpoints(dead) == expected
    if dead.record_path.exists():
        assert dead.record["status"] == "running", "SIGKILL leaves no time to change the status"
    again = bench.run(*KEPT, *([RESUME] if expected else []))
    assert again.record["status"] == "completed"
    # A run that resumes from the last step has no epoch left to evaluate
    same = same_weights if "checkpoint-4" in expected else same_training
    assert same(again, bench.reference(*KEPT))


def test_run_killed_while_it_removes_the_older_checkpoint_resumes(bench: Bench):
    """The run does not resume from the remains of the checkpoint."""
    # The first call removes the folder in which train.py has tried to save the model's small files
    bench.run(script=bench.patched(patch_call("shutil.rmtree", 2, TORN_FOLDER)), code=-signal.SIGKILL)
    assert same_weights(bench.run(RESUME), bench.reference())


# Stopped by a signal


def signal_patch(target: str, call: int, *numbers: signal.Signals, rank: int = 0, then: str = "pass") -> str:
    """A patch in which `rank` sends signals to itself when the `call`-th call of a function begins."""
    signals = "; ".join(f"os.kill(os.getpid(), {number.value})" for number in numbers)
    return patch_call(target, call, f"if int(os.environ.get('RANK', 0)) == {rank}: {signals}; {then}")


def run_until_stop(bench: Bench, patch: str, step: int, *words: object, **options: object) -> Finished:
    """Start a run that must end with exit code 75 and leave a complete checkpoint of `step`."""
    ended = bench.run(*KEPT, *words, script=bench.patched(patch), code=75, **options)
    assert (ended.record["status"], ended.record["exit_code"]) == ("stopped", 75)
    assert ended.record["stop"]["step"] == step
    assert f"checkpoint-{step}" in complete_checkpoints(ended), ended
    assert "Traceback" not in ended.log
    return ended


STOPPED = {  # the patch that sends the signal at this moment, and the step of the checkpoint
    "in a step": (signal_patch(STEP, 3, signal.SIGTERM), 3),
    "in a step, USR1": (signal_patch(STEP, 3, signal.SIGUSR1), 3),
    "in an evaluation": (signal_patch("training.trainer.WorkshopTrainer.prediction_step", 1, signal.SIGTERM), 2),
    "in a save": (signal_patch("transformers.Trainer._save_checkpoint", 1, signal.SIGTERM), 2),
}
MORE_STOPPED = {
    "in the last step": (signal_patch(STEP, 4, signal.SIGTERM), 4),
    "as a checkpoint is marked": (signal_patch("training.checkpoints.mark_complete", 1, signal.SIGTERM), 2),
    "in a step, HUP": (signal_patch(STEP, 3, signal.SIGHUP), 3),
    "in a step, INT": (signal_patch(STEP, 3, signal.SIGINT), 3),
    "in a step, twice": (signal_patch(STEP, 3, signal.SIGTERM, signal.SIGTERM), 3),
}
STOP_CASES = [pytest.param(*row, id=when) for when, row in STOPPED.items()]
STOP_CASES += [pytest.param(*row, id=when, marks=TEST_FAULTS_ONLY) for when, row in MORE_STOPPED.items()]


@pytest.mark.promise("reliability 1", "reliability 2", "reliability 5", "reliability 6")
@pytest.mark.parametrize(("patch", "step"), STOP_CASES)
def test_a_stopped_run_resumes_exactly(bench: Bench, patch, step):
    reference = bench.reference(*KEPT)
    run_until_stop(bench, patch, step)
    again = bench.run(*KEPT, RESUME)
    assert same_training(again, reference)
    assert again.record["train"]["loss_mean"] == reference.record["train"]["loss_mean"]
    assert (again.record["attempt"], again.record["restarts"][0]["step"]) == (2, step)


@pytest.mark.promise("reliability 5", "reliability 6")
def test_a_run_that_is_requeued_twice_resumes_exactly(bench: Bench):
    run_until_stop(bench, signal_patch(STEP, 1, signal.SIGTERM), 1)
    run_until_stop(bench, signal_patch(STEP, 2, signal.SIGTERM), 3, SLURM_RESTART_COUNT=1)
    again = bench.run(*KEPT, SLURM_RESTART_COUNT=2)
    assert same_training(again, bench.reference(*KEPT))
    assert [entry["step"] for entry in again.record["restarts"]] == [1, 3]
    assert again.record["train"]["steps"] == 4


@pytest.mark.promise("reliability 3")
def test_run_stopped_before_the_first_step(bench: Bench):
    """The run ends at once, because it has nothing to save."""
    ended = bench.run(script=bench.patched(signal_patch("train.load_data", 1, signal.SIGTERM, then=PAUSE)), code=143)
    assert not ended.output.exists()
    assert bench.run().record["status"] == "completed"


@pytest.mark.promise("reliability 3")
def test_run_stopped_while_it_generates_answers(bench: Bench):
    script = bench.patched(signal_patch("training.exact_match.answer_questions", 1, signal.SIGTERM))
    ended = bench.run(*KEPT, script=script, code=143, EM_F1=True)
    assert (ended.record["status"], ended.record["exit_code"]) == ("stopped", 143)
    again = bench.run(*KEPT, RESUME, EM_F1=True)
    reference = bench.reference(*KEPT, EM_F1=True)
    assert same_weights(again, reference)
    assert again.record["f1"] == reference.record["f1"]


@pytest.mark.promise("Tensor parallelism: the same losses, also in fp16; what it refuses; a stop")
def test_tensor_parallel_run_stops_at_once_and_saves_nothing(bench: Bench):
    sizes = ("--vocab_size", 1024, "--hidden_size", 32, "--num_heads", 2, "--ff_dim", 64)
    cut = ("--model_name", "custom-gpt", *sizes, "--tensor_parallel", 2, "--save_strategy", "no")
    script = bench.patched(signal_patch(STEP, 2, signal.SIGTERM))
    ended = bench.run(*cut, ranks=2, script=script, code=143)
    assert (ended.record["status"], ended.record["exit_code"]) == ("stopped", 143)
    assert not ended.output.exists()


@pytest.mark.promise("reliability 3")
def test_a_second_ctrl_c_ends_at_once(bench: Bench):
    patch = signal_patch(STEP, 3, signal.SIGINT, signal.SIGINT, then=PAUSE)
    ended = bench.run(script=bench.patched(patch), code=-signal.SIGINT)
    assert complete_checkpoints(ended) == FIRST


def test_a_run_that_saves_nothing_keeps_one_checkpoint_until_its_end(bench: Bench):
    script = bench.patched(signal_patch(STEP, 3, signal.SIGTERM))
    ended = bench.run(script=script, code=75, SAVE_STRATEGY="no")
    assert complete_marks(ended.output) == {"checkpoint-3": True}
    again = bench.run(RESUME, SAVE_STRATEGY="no")
    assert again.record["status"] == "completed"
    assert not again.output.exists()


# Several ranks

METHODS = {
    "DDP": (),
    "FSDP": ("--fsdp",),
    "ZeRO-0": ("--deepspeed", "ds_configs/zero0.json"),
    "ZeRO-1": ("--deepspeed", "ds_configs/zero1.json"),
    "ZeRO-2": ("--deepspeed", "ds_configs/zero2.json"),
    "ZeRO-2 with offload": ("--deepspeed", "ds_configs/zero2_cpu_offload.json"),
    "ZeRO-3": ("--deepspeed", "ds_configs/zero3.json"),
}
DEEPSPEED = [pytest.param(name, marks=TEST_FAULTS_ONLY) for name in METHODS if "ZeRO" in name]
PAIR = {"ranks": 2, "BATCH_SIZE": 1}
# Lines for `bench.patched` that train in fp16, the default on GPUs. The loss scale doubles after 2 steps, not 2,000.
FIRST_SCALE = 2.0**16
FP16 = (REPOSITORY / "tests/integration/fp16_on_cpu.py").read_text().removesuffix("train.run_and_exit(train.main)\n")
FP16 += f"torch.amp.GradScaler.__init__.__defaults__ = ('cuda', {FIRST_SCALE}, 2.0, 0.5, 2, True)\n"


@pytest.mark.promise("reliability 1", "reliability 2")
@pytest.mark.parametrize("method", ["DDP", "FSDP", *DEEPSPEED])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(bench: Bench, method):
    how = PAIR | {"NUM_EPOCHS": 3}
    flags = METHODS[method]
    run_until_stop(bench, signal_patch(STEP, 5, signal.SIGTERM, rank=1), 5, *flags, **how)
    again = bench.run(*flags, *KEPT, RESUME, **how)
    assert same_training(again, bench.reference(*flags, *KEPT, **how))


@pytest.mark.promise("reliability 5", "reliability 6")
@pytest.mark.parametrize("method", [pytest.param("DDP", marks=TEST_FAULTS_ONLY), "FSDP", *DEEPSPEED])
def test_fp16_resumes_with_its_loss_scale(bench: Bench, method):
    how = PAIR | {"NUM_EPOCHS": 3}
    flags = METHODS[method]
    run_until_stop(bench, FP16 + signal_patch(STEP, 5, signal.SIGTERM, rank=1), 5, *flags, **how)
    script = bench.patched(FP16)
    again = bench.run(*flags, *KEPT, RESUME, script=script, **how)
    assert again.effective("precision") == "fp16"
    reference = bench.reference(*flags, *KEPT, script=script, **how)
    assert same_training(again, reference)
    if "ZeRO" not in method:  # DeepSpeed stores its loss scale elsewhere
        scales = [torch.load(ended.output / "checkpoint-6" / "scaler.pt")["scale"] for ended in (again, reference)]
        assert scales[0] == scales[1] > FIRST_SCALE


@pytest.mark.promise("reliability 4")
@pytest.mark.parametrize("method", [pytest.param("DDP", marks=TEST_FAULTS_ONLY), "FSDP", *DEEPSPEED])
def test_all_ranks_skip_a_checkpoint_that_is_not_marked(bench: Bench, method):
    flags = METHODS[method]
    script = bench.patched(patch_call("training.checkpoints.CheckpointCallback.on_save", 2))
    dead = bench.run(*flags, *KEPT, script=script, code=-signal.SIGKILL, **PAIR)
    assert complete_marks(dead.output) == {"checkpoint-2": True, "checkpoint-4": False}
    again = bench.run(*flags, *KEPT, RESUME, **PAIR)
    assert again.record["resumed_from"] == "output/7/checkpoint-2"
    assert same_training(again, bench.reference(*flags, *KEPT, **PAIR))


QUICK = ("DDP", "FSDP", "ZeRO-2")


@pytest.mark.promise("reliability 7")
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in QUICK else TEST_FAULTS_ONLY) for name in METHODS]
)
def test_more_epochs_continue_with_the_rates_of_the_new_schedule(bench: Bench, method):
    words = (*METHODS[method], "--logging_steps", 1, "--learning_rate", "6e-3")
    bench.trained(*words, **PAIR)
    again = bench.run(*words, RESUME, JOB_ID="8", NUM_EPOCHS=3, **PAIR)
    assert again.rates == [2e-3, 1e-3]
    line = "the schedule of the learning rate has 6 steps instead of 4: the next step has the rate 0.002\n"
    assert again.log.count(line) == 1, again


# Errors of the training itself


@pytest.mark.promise("reliability 12")
def test_an_evaluation_loss_that_is_not_finite_ends_the_run(bench: Bench):
    """tests/integration/test_silent_faults.py tests the losses of the training."""
    ended = bench.run("--learning_rate", "1e20", "--logging_steps", 1, code=1, NUM_EPOCHS=8, BATCH_SIZE=4)
    assert ended.error.startswith("evaluation loss: is nan after step 1; "), ended
    assert ended.record["status"] == "failed"
    assert "NaN" not in ended.record_path.read_text(), "JSON has no NaN"


# The loss of the second step's first micro batch is not a number, but its gradients are
ONE_BAD_LOSS = """
import math
import transformers
def training_step(self, *args, original=transformers.Trainer.training_step, **kwargs):
    loss = original(self, *args, **kwargs)
    return loss * math.nan if self.state.global_step == 1 and not self.accelerator.sync_gradients else loss
transformers.Trainer.training_step = training_step
"""


@pytest.mark.promise("reliability 12")
@pytest.mark.parametrize("stopped", [False, True])
def test_one_loss_that_is_not_finite_is_logged_and_left_out_of_the_mean(bench: Bench, stopped):
    how = {"BATCH_SIZE": 1, "GRAD_ACC": 2}
    expected = bench.reference("--logging_steps", 1, "--save_total_limit", 1, **how).step_losses
    words = ("--logging_steps", 3)
    if stopped:
        patch = ONE_BAD_LOSS + signal_patch("training.trainer.WorkshopTrainer.compute_loss", 4, signal.SIGTERM)
        run_until_stop(bench, patch, 2, *words, **how)
    ended = bench.run(*KEPT, *words, *[RESUME] * stopped, script=bench.patched(ONE_BAD_LOSS), **how)
    assert "{'loss': 'nan'" in ended.log, ended
    train = ended.record["train"]
    assert train["loss_last"] == pytest.approx(expected[3])
    assert train["loss_mean"] == pytest.approx((expected[0] + expected[2] + expected[3]) / 3)


def test_out_of_memory_is_one_error_line(bench: Bench):
    lines = "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.')"
    ended = bench.run(script=bench.patched(patch_call(STEP, 3, lines)), code=1)
    assert ended.error.startswith("memory: CUDA out of memory; lower "), ended
    assert (ended.record["status"], ended.record["exit_code"]) == ("oom", 1)


def test_a_bug_shows_its_traceback_and_the_run_can_resume(bench: Bench):
    ended = bench.run(script=bench.patched(patch_call(STEP, 3, "1 / 0")), code=1)
    assert "ZeroDivisionError" in ended.err
    assert (ended.record["status"], ended.record["exit_code"]) == ("failed", 1)
    assert bench.run(RESUME).record["status"] == "completed"


def test_a_port_in_use_is_one_error_line(bench: Bench):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        port = listener.getsockname()[1]
        bench.refuses("process group: ...; ...", "--fsdp", code=3, MASTER_PORT=port, **world)
