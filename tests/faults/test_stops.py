"""Runs that are killed or asked to end at a moment, and what the next one goes on from.

A training of 4 steps saves behind its steps 2 and 4. The families of moments are tried whole by `make test-faults`.
"""

import os
import signal
import socket

import pytest
import torch

from bench import STEP, Bench, complete, moment, same_training, same_weights
from helpers import REPOSITORY, Finished

KEPT = ("--save_total_limit", 2)
RESUME = "--resume_from_checkpoint"
PAUSE = "signal.pause()"
WIDER = pytest.mark.faults


def saved(ended: Finished) -> set[str]:
    return {name for name, marked in complete(ended.output).items() if marked}


# Killed

TORN_FILE = "open(args[1], 'wb').write(b'torn'); os.kill(os.getpid(), signal.SIGKILL)"
TORN_FOLDER = "os.remove(os.path.join(args[0], 'optimizer.pt')); os.kill(os.getpid(), signal.SIGKILL)"
TWO, BOTH = {"checkpoint-2"}, {"checkpoint-2", "checkpoint-4"}
KILLED = {  # when -> patch, checkpoints that are complete then
    "before the record is there": (moment("records.writer.RunRecord.write"), set()),
    "while the record is replaced": (moment("pathlib.Path.replace"), set()),
    "in the first step": (moment(STEP), set()),
    "between two checkpoints": (moment(STEP, 4), TWO),
    "before a checkpoint's first file": (moment("transformers.Trainer._save_checkpoint", 2), TWO),
    "before its optimizer": (moment("transformers.Trainer._save_optimizer_and_scheduler", 2), TWO),
    "in the middle of a file": (moment("torch.save", 6, TORN_FILE), TWO),
    "before it is marked": (moment("training.save_checkpoints.CheckpointCallback.on_save", 2), TWO),
    "while it is marked": (moment("training.save_checkpoints.write_json", 2), TWO),
    "before the older one is removed": (moment("training.save_checkpoints.CheckpointCallback.remove_older", 2), BOTH),
    "while the model is saved": (moment("transformers.modeling_utils.safe_save_file", 3), BOTH),
    "as the run ends": (moment("records.writer.RunRecord.__exit__"), BOTH),
}
SHORT = ("in the first step", "in the middle of a file", "before it is marked", "while the model is saved")


@pytest.mark.parametrize("when", [pytest.param(each, marks=[] if each in SHORT else WIDER) for each in KILLED])
def test_a_killed_run_can_be_started_again(bench: Bench, when):
    patch, expected = KILLED[when]
    dead = bench.run(*KEPT, script=bench.patched(patch), code=-signal.SIGKILL)
    assert saved(dead) == expected
    if dead.record_path.exists():
        assert dead.record["status"] == "running", "SIGKILL leaves no time to say otherwise"
    again = bench.run(*KEPT, *([RESUME] if expected else []))
    assert again.record["status"] == "completed"
    # a run that goes on from the end of the training has none to evaluate
    same = same_weights if "checkpoint-4" in expected else same_training
    assert same(again, bench.reference(*KEPT))


def test_killed_while_the_older_checkpoint_is_removed(bench: Bench):
    """What is left of it is not resumed from."""
    bench.run(script=bench.patched(moment("shutil.rmtree", 1, TORN_FOLDER)), code=-signal.SIGKILL)
    assert same_weights(bench.run(RESUME), bench.reference())


@WIDER
def test_killed_while_the_tokens_are_cached(bench: Bench):
    script = bench.patched(moment("data_loader.tokenise_batch"))
    # another data set to the cache, the same to the training: its name is not in it
    bench.write("new.json", (bench.folder / "data/squad_sample.json").read_text() + "\n")
    bench.run("--dataset", "new.json", script=script, code=-signal.SIGKILL)
    assert same_training(bench.run("--dataset", "new.json"), bench.reference())


# Asked to end


def sent(target: str, call: int, *numbers: signal.Signals, rank: int = 0, then: str = "pass") -> str:
    """The patch that sends signals to this rank's process as the `call`-th call of a function begins."""
    signals = "; ".join(f"os.kill(os.getpid(), {number.value})" for number in numbers)
    return moment(target, call, f"if int(os.environ.get('RANK', 0)) == {rank}: {signals}; {then}")


def stopped(bench: Bench, patch: str, step: int, *words: object, **options: object) -> Finished:
    """A run that must end with 75 and a complete checkpoint of this step."""
    ended = bench.run(*KEPT, *words, script=bench.patched(patch), code=75, **options)
    assert (ended.record["status"], ended.record["exit_code"]) == ("stopped", 75)
    assert ended.record["stop"]["step"] == step
    assert f"checkpoint-{step}" in saved(ended), ended
    assert "Traceback" not in ended.log
    return ended


STOPPED = {  # when -> patch, step
    "in a step": (sent(STEP, 3, signal.SIGTERM), 3),
    "in a step, USR1": (sent(STEP, 3, signal.SIGUSR1), 3),
    "in an evaluation": (sent("training.trainer.WorkshopTrainer.prediction_step", 1, signal.SIGTERM), 2),
    "in a save": (sent("transformers.Trainer._save_checkpoint", 1, signal.SIGTERM), 2),
}
WIDELY_STOPPED = {
    "in the last step": (sent(STEP, 4, signal.SIGTERM), 4),
    "as a checkpoint is marked": (sent("training.save_checkpoints.mark_complete", 1, signal.SIGTERM), 2),
    "in a step, HUP": (sent(STEP, 3, signal.SIGHUP), 3),
    "in a step, INT": (sent(STEP, 3, signal.SIGINT), 3),
    "in a step, twice": (sent(STEP, 3, signal.SIGTERM, signal.SIGTERM), 3),
}
MOMENTS = [pytest.param(*row, id=when) for when, row in STOPPED.items()]
MOMENTS += [pytest.param(*row, id=when, marks=WIDER) for when, row in WIDELY_STOPPED.items()]


@pytest.mark.parametrize(("patch", "step"), MOMENTS)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(bench: Bench, patch, step):
    reference = bench.reference(*KEPT)
    stopped(bench, patch, step)
    again = bench.run(*KEPT, RESUME)
    assert same_training(again, reference)
    assert again.record["train"]["loss_mean"] == reference.record["train"]["loss_mean"]
    assert (again.record["attempt"], again.record["restarts"][0]["step"]) == (2, step)


def test_a_run_that_slurm_starts_again_twice(bench: Bench):
    stopped(bench, sent(STEP, 1, signal.SIGTERM), 1)
    stopped(bench, sent(STEP, 2, signal.SIGTERM), 3, SLURM_RESTART_COUNT=1)
    again = bench.run(*KEPT, SLURM_RESTART_COUNT=2)
    assert same_training(again, bench.reference(*KEPT))
    assert [entry["step"] for entry in again.record["restarts"]] == [1, 3]
    assert again.record["train"]["steps"] == 4


def test_stopped_before_the_first_step(bench: Bench):
    """There is nothing to save, so it ends at once."""
    ended = bench.run(script=bench.patched(sent("train.load_squad", 1, signal.SIGTERM, then=PAUSE)), code=143)
    assert not ended.output.exists()
    assert bench.run().record["status"] == "completed"


def test_stopped_while_the_questions_are_answered(bench: Bench):
    script = bench.patched(sent("training.exact_match.answer_questions", 1, signal.SIGTERM))
    ended = bench.run(*KEPT, script=script, code=143, EM_F1=True)
    assert (ended.record["status"], ended.record["exit_code"]) == ("stopped", 143)
    again = bench.run(*KEPT, RESUME, EM_F1=True)
    reference = bench.reference(*KEPT, EM_F1=True)
    assert same_weights(again, reference)
    assert again.record["f1"] == reference.record["f1"]


def test_a_model_cut_over_its_ranks_ends_at_once_and_saves_nothing(bench: Bench):
    sizes = ("--vocab_size", 1024, "--hidden_size", 32, "--num_heads", 2, "--ff_dim", 64)
    cut = ("--model_name", "custom-gpt", *sizes, "--tensor_parallel", 2, "--save_strategy", "no")
    script = bench.patched(sent(STEP, 2, signal.SIGTERM))
    ended = bench.run(*cut, ranks=2, script=script, code=143)
    assert (ended.record["status"], ended.record["exit_code"]) == ("stopped", 143)
    assert not list(ended.output.iterdir())


def test_a_second_ctrl_c_ends_at_once(bench: Bench):
    patch = sent(STEP, 3, signal.SIGINT, signal.SIGINT, then=PAUSE)
    ended = bench.run(script=bench.patched(patch), code=-signal.SIGINT)
    assert saved(ended) == TWO


def test_a_run_that_saves_nothing_keeps_one_checkpoint_until_its_end(bench: Bench):
    script = bench.patched(sent(STEP, 3, signal.SIGTERM))
    ended = bench.run(script=script, code=75, SAVE_STRATEGY="no")
    assert complete(ended.output) == {"checkpoint-3": True}
    again = bench.run(RESUME, SAVE_STRATEGY="no")
    assert again.record["status"] == "completed"
    assert not again.output.exists()


@WIDER
def test_nohup_lets_a_run_go_on_without_its_terminal(bench: Bench):
    script = bench.patched(moment(STEP, 3, "os.kill(os.getpid(), signal.SIGHUP)"))
    words = ("-c", 'trap "" HUP; exec "$0" "$1"', "python", script)
    ended = bench.run(*words, script="bash", PATH=f"{bench.python.parent}:{os.environ['PATH']}")
    assert ended.record["status"] == "completed"


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
DEEPSPEED = [pytest.param(name, marks=WIDER) for name in METHODS if "ZeRO" in name]
PAIR = {"ranks": 2, "BATCH_SIZE": 1}
# Lines for `bench.patched`: fp16 is the default on GPUs. The loss scale is doubled after each second step, not 2,000
FIRST_SCALE = 2.0**16
FP16 = (REPOSITORY / "tests/integration/fp16_on_cpu.py").read_text().removesuffix("train.run_and_exit(train.main)\n")
FP16 += f"torch.amp.GradScaler.__init__.__defaults__ = ('cuda', {FIRST_SCALE}, 2.0, 0.5, 2, True)\n"


@pytest.mark.parametrize("method", ["DDP", "FSDP", *DEEPSPEED])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(bench: Bench, method):
    how = PAIR | {"NUM_EPOCHS": 3}
    flags = METHODS[method]
    stopped(bench, sent(STEP, 5, signal.SIGTERM, rank=1), 5, *flags, **how)
    again = bench.run(*flags, *KEPT, RESUME, **how)
    assert same_training(again, bench.reference(*flags, *KEPT, **how))


@pytest.mark.parametrize("method", [pytest.param("DDP", marks=WIDER), "FSDP", *DEEPSPEED])
def test_fp16_goes_on_with_its_loss_scale(bench: Bench, method):
    how = PAIR | {"NUM_EPOCHS": 3}
    flags = METHODS[method]
    stopped(bench, FP16 + sent(STEP, 5, signal.SIGTERM, rank=1), 5, *flags, **how)
    script = bench.patched(FP16)
    again = bench.run(*flags, *KEPT, RESUME, script=script, **how)
    assert again.effective("precision") == "fp16"
    reference = bench.reference(*flags, *KEPT, script=script, **how)
    assert same_training(again, reference)
    if "ZeRO" not in method:  # whose scale is in a file of its own
        scales = [torch.load(ended.output / "checkpoint-6" / "scaler.pt")["scale"] for ended in (again, reference)]
        assert scales[0] == scales[1] > FIRST_SCALE


@pytest.mark.parametrize("method", [pytest.param("DDP", marks=WIDER), "FSDP", *DEEPSPEED])
def test_all_ranks_killed_behind_a_checkpoint_that_is_not_marked(bench: Bench, method):
    flags = METHODS[method]
    script = bench.patched(moment("training.save_checkpoints.CheckpointCallback.on_save", 2))
    dead = bench.run(*flags, *KEPT, script=script, code=-signal.SIGKILL, **PAIR)
    assert complete(dead.output) == {"checkpoint-2": True, "checkpoint-4": False}
    again = bench.run(*flags, *KEPT, RESUME, **PAIR)
    assert again.record["resumed_from"] == "output/7/checkpoint-2"
    assert same_training(again, bench.reference(*flags, *KEPT, **PAIR))


def test_one_rank_dies(bench: Bench):
    """The other ends too, and the run can go on."""
    patch = moment(STEP, 3, "os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)")
    ended = bench.start(*KEPT, script=bench.patched(patch), **PAIR).wait()
    assert ended.code, ended
    assert complete(ended.output) == {"checkpoint-2": True}
    assert bench.run(*KEPT, RESUME, **PAIR).record["status"] == "completed"


# What goes wrong by itself


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--eval_strategy", "no"), "loss: is not finite since step "),
        pytest.param((), "evaluation loss: is nan after step 2; ", marks=WIDER),
    ],
)
def test_a_loss_that_is_no_number_ends_the_run(bench: Bench, words, line):
    ended = bench.run("--learning_rate", "1e20", *words, code=1, NUM_EPOCHS=8)
    assert ended.error.startswith(line), ended
    assert ended.record["status"] == "failed"
    assert "NaN" not in ended.record_path.read_text(), "which is no JSON"


def test_no_memory_is_left(bench: Bench):
    lines = "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.')"
    ended = bench.run(script=bench.patched(moment(STEP, 3, lines)), code=1)
    assert ended.error.startswith("memory: CUDA out of memory; lower "), ended
    assert (ended.record["status"], ended.record["exit_code"]) == ("oom", 1)


def test_a_bug_shows_its_traceback_and_the_run_can_go_on(bench: Bench):
    ended = bench.run(script=bench.patched(moment(STEP, 3, "1 / 0")), code=1)
    assert "ZeroDivisionError" in ended.err
    assert (ended.record["status"], ended.record["exit_code"]) == ("failed", 1)
    assert bench.run(RESUME).record["status"] == "completed"


def test_the_port_is_another_programs(bench: Bench):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        port = listener.getsockname()[1]
        bench.refuses("process group: ...; ...", "--fsdp", code=3, MASTER_PORT=port, **world)
