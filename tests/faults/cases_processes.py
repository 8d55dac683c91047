"""Signals, several ranks, trainings that go wrong by themselves, the run record, and secrets."""

import json
import os
import signal
import socket
from functools import partial

import pytest

from bench import Bench, Ended
from cases_checkpoints import KEPT, moment
from cases_files import complete, same_training, same_weights
from table import case, refused

PAUSE = "signal.pause()"
STEP = "transformers.Trainer.training_step"


def sent(target: str, call: int, *numbers: signal.Signals, rank: int = 0, then: str = "pass") -> str:
    """The patch that sends signals to this rank's process as the `call`-th call of a function begins."""
    lines = "; ".join(f"os.kill(os.getpid(), {number.value})" for number in numbers)
    patch = f"if int(os.environ.get('RANK', 0)) == {rank}: {lines}; {then}"
    return moment(target, call, patch)


def stopped(bench: Bench, step: int, *words: object, code: int = 75, **options: object) -> Ended:
    """A run that must end in this way, with a complete checkpoint of this step."""
    ended = bench.run(*KEPT, *words, code=code, **options)
    assert ended.record["status"] == "stopped"
    assert ended.record["exit_code"] == 75
    assert ended.record["stop"]["step"] == step
    assert complete(ended.output)[f"checkpoint-{step}"], ended
    assert "Traceback" not in ended.log
    return ended


# 1. A signal asks for an end

GOES_ON = "exit 75, record stopped, a checkpoint; the same job goes on from it to the same weights and losses"
MOMENTS = {
    "in a step": (sent(STEP, 3, signal.SIGTERM), 3),
    "in the last step": (sent(STEP, 4, signal.SIGTERM), 4),
    "in an evaluation": (sent("training.trainer.WorkshopTrainer.prediction_step", 1, signal.SIGTERM), 2),
    "in a save": (sent("transformers.Trainer._save_checkpoint", 1, signal.SIGTERM), 2),
    "while a checkpoint is marked": (sent("training.checkpoints.mark_complete", 1, signal.SIGTERM), 2),
}
for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    MOMENTS[f"in a step, {number.name}"] = (sent(STEP, 3, number), 3)
MOMENTS["in a step, twice at once"] = (sent(STEP, 3, signal.SIGTERM, signal.SIGTERM), 3)


def stop(name: str, patch: str, step: int) -> None:
    def act(bench: Bench) -> None:
        reference = bench.reference(*KEPT)
        stopped(bench, step, script=bench.patched(patch))
        again = bench.run(*KEPT, "--resume_from_checkpoint")
        assert same_training(again, reference)
        assert again.record["train"]["loss_mean"] == reference.record["train"]["loss_mean"]
        assert (again.record["attempt"], again.record["restarts"][0]["step"]) == (2, step)

    signals = "" if "SIG" in name else ", SIGTERM"
    case("stop", name, f"{name}{signals}", GOES_ON)(act)


for name, (patch, step) in MOMENTS.items():
    stop(name, patch, step)


@case("stop", "in EM and F1", "SIGTERM while the questions are answered", "143 at once; later the same EM and F1")
def stop_in_em_and_f1(bench: Bench):
    reference = bench.reference(*KEPT, EM_F1=True)
    ended = bench.run(script=bench.patched(sent("evaluate.answer_questions", 1, signal.SIGTERM)), code=143, EM_F1=True)
    assert (ended.record["status"], ended.record["exit_code"]) == ("stopped", 143)
    again = bench.run(*KEPT, "--resume_from_checkpoint", EM_F1=True)
    assert same_weights(again, reference)
    assert again.record["f1"] == reference.record["f1"]


@case("stop", "at the start", "SIGTERM while the data is read", "143 at once: nothing to save; it can be started again")
def stop_at_the_start(bench: Bench):
    ended = bench.run(script=bench.patched(sent("train.load_squad", 1, signal.SIGTERM, then=PAUSE)), code=143)
    assert not ended.output.exists()
    assert bench.run().record["status"] == "completed"


@case("stop", "twice", "Ctrl-C, and again while the step goes on", "ended at once; the run can go on")
def stop_twice(bench: Bench):
    patch = sent(STEP, 3, signal.SIGINT, signal.SIGINT, then=PAUSE)
    ended = bench.run(script=bench.patched(patch), code=-signal.SIGINT)
    assert complete(ended.output) == {"checkpoint-2": True}


@case(
    "stop",
    "again and again",
    "SIGTERM after steps 1 and 3, each time requeued by Slurm",
    "goes on by itself to the same weights and losses; the record tells of both",
)
def stop_again_and_again(bench: Bench):
    reference = bench.reference(*KEPT)
    script = bench.patched(sent(STEP, 1, signal.SIGTERM))
    stopped(bench, 1, script=script)
    script = bench.patched(sent(STEP, 2, signal.SIGTERM))
    stopped(bench, 3, script=script, SLURM_RESTART_COUNT=1)
    again = bench.run(*KEPT, SLURM_RESTART_COUNT=2)
    assert same_training(again, reference)
    assert [entry["step"] for entry in again.record["restarts"]] == [1, 3]
    assert again.record["train"]["steps"] == 4


@case("stop", "not saving", "SIGTERM in a step, SAVE_STRATEGY=no", "exit 75, the one checkpoint; gone after the end")
def stop_without_saving(bench: Bench):
    script = bench.patched(sent(STEP, 3, signal.SIGTERM))
    ended = bench.run(script=script, code=75, SAVE_STRATEGY="no")
    assert complete(ended.output) == {"checkpoint-3": True}
    again = bench.run("--resume_from_checkpoint", SAVE_STRATEGY="no")
    assert again.record["status"] == "completed"
    assert not again.output.exists()


@case(
    "stop",
    "nohup",
    "SIGHUP to a run that was started with nohup",
    "goes on to its end",
    slow="a new interpreter",
)
def stop_with_nohup(bench: Bench):
    script = bench.patched(moment(STEP, 3, "os.kill(os.getpid(), signal.SIGHUP)"))
    words = ("-c", 'trap "" HUP; exec "$0" "$1"', "python", script)
    ended = bench.run(*words, script="bash", PATH=f"{bench.python.parent}:{os.environ['PATH']}")
    assert ended.record["status"] == "completed"


RANKS = {
    "DDP": ((), ""),
    "FSDP": (("--fsdp",), ""),
    "ZeRO-2": (("--deepspeed", "ds_configs/zero2.json"), "DeepSpeed's start takes seconds"),
    "ZeRO-2 with offload": (("--deepspeed", "ds_configs/zero2_cpu_offload.json"), "DeepSpeed's start takes seconds"),
    "ZeRO-3": (("--deepspeed", "ds_configs/zero3.json"), "DeepSpeed's start takes seconds"),
}


def stop_of_ranks(name: str, flags: tuple, slow: str) -> None:
    def act(bench: Bench) -> None:
        how = {"ranks": 2, "BATCH_SIZE": 1, "NUM_EPOCHS": 3}
        reference = bench.reference(*flags, *KEPT, **how)
        patch = sent(STEP, 5, signal.SIGTERM, rank=1)
        stopped(bench, 5, *flags, script=bench.patched(patch), **how)
        again = bench.run(*flags, *KEPT, "--resume_from_checkpoint", **how)
        if name in ("DDP", "FSDP"):
            assert same_training(again, reference)
        else:  # DeepSpeed's Adam on the CPU multiplies the powers of its betas on, and no checkpoint holds them
            assert again.losses == pytest.approx(reference.losses, abs=1e-5, rel=0)

    case("stop", f"{name} on 2 ranks", f"SIGTERM to one of two ranks of {name}, in a step", GOES_ON, slow)(act)


for name, (flags, slow) in RANKS.items():
    stop_of_ranks(name, flags, slow)


# 2. Ranks


@case("ranks", "one dies", "kill -9 of one of two ranks in a step", "the other is ended, and the run can go on")
def one_rank_dies(bench: Bench):
    how = {"ranks": 2, "BATCH_SIZE": 1}
    patch = moment(STEP, 3, "os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)")
    ended = bench.start(*KEPT, script=bench.patched(patch), **how).wait()
    assert ended.code, ended
    assert complete(ended.output) == {"checkpoint-2": True}
    assert bench.run(*KEPT, "--resume_from_checkpoint", **how).record["status"] == "completed"


@case("ranks", "port taken", "MASTER_PORT is another program's", "exit 3 and one line, nothing written")
def port_taken(bench: Bench):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        port = listener.getsockname()[1]
        bench.refuses("process group: ...; ...", "--fsdp", code=3, MASTER_PORT=port, **world)


# 3. A training that goes wrong by itself


def strict(ended: Ended) -> dict:
    """The record, as a reader of JSON takes it, not one of Python's."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(ended.record_path.read_text(), parse_constant=refuse)


def not_finite(name: str, words: tuple, line: str) -> None:
    def act(bench: Bench) -> None:
        ended = bench.run("--learning_rate", "1e20", *words, code=1, NUM_EPOCHS=8)
        assert ended.error.startswith(line), ended
        assert strict(ended)["status"] == "failed"

    done = f"--learning_rate 1e20 {' '.join(words)}".strip()
    case("training", name, done, f"exit 1: {line}...; the record is strict JSON")(act)


not_finite("NaN", ("--eval_strategy", "no"), "loss: is not finite since step ")
not_finite("NaN in the evaluation", (), "evaluation loss: is nan after step 2; ")


@case("training", "no memory", "PyTorch finds no memory left in a step", "exit 1, one line, status oom")
def no_memory(bench: Bench):
    lines = "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.')"
    ended = bench.run(script=bench.patched(moment(STEP, 3, lines)), code=1)
    assert ended.error.startswith("memory: CUDA out of memory; lower "), ended
    assert (strict(ended)["status"], ended.record["exit_code"]) == ("oom", 1)


@case("training", "a bug", "an exception in a step", "exit 1, its traceback, status failed; the run can go on")
def bug(bench: Bench):
    ended = bench.run(script=bench.patched(moment(STEP, 3, "1 / 0")), code=1)
    assert "ZeroDivisionError" in ended.err
    assert (strict(ended)["status"], ended.record["exit_code"]) == ("failed", 1)
    assert bench.run("--resume_from_checkpoint").record["status"] == "completed"


# 4. The record

record = partial(refused, "record")
for name, job_id in (("path", "../../outside"), ("hidden", ".."), ("folder", "a/b"), ("over-long", "x" * 65)):
    record(f"JOB_ID: {name}", f"JOB_ID={job_id[:20]}", f"JOB_ID: '{job_id}' cannot name files; ...", JOB_ID=job_id)
record("JOB_ID: blank", "JOB_ID='a b'", "JOB_ID: 'a b' cannot name files; ...", JOB_ID="a b")
for name, content in (("cut off", '{"status": "comp'), ("list", "[]"), ("bytes", b"\xff\xfe"), ("empty", "")):
    line = "results/7.json: is no run record (...); ..."
    record(f"earlier one {name}", f"a record of this JOB_ID, {name}", line, files={"results/7.json": content})


@case(
    "record", "two at once", "two runs of one JOB_ID at the same time", "exit 2 for the second; the first is unharmed"
)
def two_at_once(bench: Bench):
    reference = bench.reference()
    lines = "open('here', 'w'); open('go').read()"
    os.mkfifo(bench.folder / "go")
    first = bench.start(script=bench.patched(moment(STEP, 1, lines)))
    first.until((bench.folder / "here").exists)
    second = bench.run(code=2)
    assert second.error.startswith("JOB_ID: another run of 7 is writing its files; "), second
    bench.write_pipe("go")
    ended = first.wait()
    assert ended.code == 0, ended
    assert same_training(ended, reference)


@case("record", "outlived", "the job was started again while a rank of it lived on", "the newer record stays as it is")
def outlived(bench: Bench):
    lines = (
        "import json, pathlib; path = pathlib.Path('results/7.json'); newer = json.loads(path.read_text()); "
        "newer['attempt'] = 2; path.write_text(json.dumps(newer)); path.with_name('newer').write_text(path.read_text())"
    )
    bench.run(script=bench.patched(moment(STEP, 3, lines)))
    results = bench.folder / "results"
    assert (results / "7.json").read_text() == (results / "newer").read_text()


@case("record", "left running", "a record of a job that was killed, then --sweep", "failed, with the time of its end")
def left_running(bench: Bench):
    bench.run(script=bench.patched(moment(STEP, 3, "os.kill(os.getpid(), signal.SIGKILL)")), code=-9)
    bench.write("results/8.json", "[]")
    words = ("-P", "-m", "job.finish", "--sweep")
    # PATH without squeue: one that does not answer leaves open whether the job is gone
    ended = bench.run(*words, script=bench.python, PYTHONPATH=bench.folder / "scripts", PATH=bench.python.parent)
    assert ended.out == "results/7.json: its job is gone, the record says failed now\n", ended
    assert ended.record["finished"]


# 5. Secrets

CANARIES = {
    "HF_TOKEN": "hf_canary-0123456789",
    "WANDB_API_KEY": ("canary1" * 6)[:40],
    "AWS_SECRET_ACCESS_KEY": "canary2",
    "MY_PASSWORD": "canary3",
    "SOME_SECRET": "canary4",
}


@case(
    "secrets",
    "variables",
    "keys in HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, *PASSWORD, *SECRET",
    "none is in any file or line that a run leaves",
)
def secrets_of_variables(bench: Bench):
    ended = bench.run(HF_TOKEN="unset", **{n: v for n, v in CANARIES.items() if n != "HF_TOKEN"})
    found = [path for path in bench.folder.rglob("*") if path.is_file() and b"canary" in path.read_bytes()]
    assert not found and "canary" not in ended.log


@case(
    "secrets",
    "HF_TOKEN",
    "a key in HF_TOKEN, and a training that then fails",
    "it is in no file, and not in the traceback",
    slow="a new interpreter",
)
def secret_of_the_hub(bench: Bench):
    ended = bench.run(script=bench.patched(moment(STEP, 3, "1 / 0")), code=1, HF_TOKEN=CANARIES["HF_TOKEN"])
    found = [path for path in bench.folder.rglob("*") if path.is_file() and b"canary" in path.read_bytes()]
    assert not found and "canary" not in ended.log


@case("secrets", "flag", "--hub_token hf_canary", "exit 2, and the line does not repeat it")
def secret_as_a_flag(bench: Bench):
    ended = bench.refuses("--hub_token: ...; ...", "--hub_token", CANARIES["HF_TOKEN"])
    assert "canary" not in ended.log
