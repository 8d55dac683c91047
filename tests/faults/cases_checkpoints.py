"""Runs that are killed at a moment, and what the next one goes on from."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bench import Bench
from cases_files import complete, same_training, same_weights
from table import case, refused

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# A function of which the call number `call` is replaced by `lines`, which may call `original`
MOMENT = """
import {module}
original, calls = {module}.{name}, []
def replaced(*args, **kwargs):
    calls.append(args)
    if len(calls) == {call}:
        {lines}
    return original(*args, **kwargs)
{module}.{name} = replaced
"""
KEPT = ("--save_total_limit", 2)


def moment(target: str, call: int = 1, lines: str = KILL) -> str:
    """The patch that does something as the `call`-th call of a function or method begins: ``json_files.write_json``."""
    *modules, name = target.split(".")
    if modules[-1][0].isupper():  # a class
        name = f"{modules.pop()}.{name}"
    return MOMENT.format(module=".".join(modules), name=name, call=call, lines=lines)


# The training saves after its steps 2 and 4, and keeps the last two. What is done -> patch, checkpoints that are
# complete afterwards
MOMENTS = {
    "before the record is there": (moment("training.record.RunRecord.write"), set()),
    "while the record is replaced": (moment("pathlib.Path.replace"), set()),
    "in the first step": (moment("transformers.Trainer.training_step"), set()),
    "between two checkpoints": (moment("transformers.Trainer.training_step", 4), {"checkpoint-2"}),
    "before the first file of a checkpoint": (
        moment("transformers.Trainer._save_checkpoint", 2),
        {"checkpoint-2"},
    ),
    "in the middle of a checkpoint, before its optimizer": (
        moment("transformers.Trainer._save_optimizer_and_scheduler", 2),
        {"checkpoint-2"},
    ),
    "in the middle of a file of a checkpoint": (
        moment("torch.save", 6, f"open(args[1], 'wb').write(b'torn'); {KILL}"),
        {"checkpoint-2"},
    ),
    "with all its files there, before they are marked": (
        moment("training.checkpoints.CheckpointCallback.on_save", 2),
        {"checkpoint-2"},
    ),
    "while it is marked": (moment("training.checkpoints.write_json", 2), {"checkpoint-2"}),
    "before the older one is removed": (
        moment("training.checkpoints.CheckpointCallback.remove_older", 2),
        {"checkpoint-2", "checkpoint-4"},
    ),
    "while the model is saved": (
        moment("transformers.modeling_utils.safe_save_file", 3),
        {"checkpoint-2", "checkpoint-4"},
    ),
    "as the run ends": (moment("training.record.RunRecord.__exit__"), {"checkpoint-2", "checkpoint-4"}),
}


def killed(name: str, patch: str, expected: set[str]) -> None:
    def act(bench: Bench) -> None:
        reference = bench.reference(*KEPT)
        dead = bench.run(*KEPT, script=bench.patched(patch), code=-signal.SIGKILL)
        there = complete(dead.output)
        assert {name for name, marked in there.items() if marked} == expected, there
        if dead.record_path.exists():
            assert dead.record["status"] == "running", "SIGKILL leaves no time to say otherwise"
        again = bench.run(*KEPT, *(["--resume_from_checkpoint"] if expected else []))
        assert again.record["status"] == "completed"
        # a run that goes on from the end of the training has none to evaluate
        same = same_weights if "checkpoint-4" in expected else same_training
        assert same(again, reference)

    seen = f"goes on from {max(expected)}" if expected else "can be started again"
    case("kill", name, f"kill -9 {name}", f"{seen}, to the same weights and losses")(act)


for name, (patch, expected) in MOMENTS.items():
    killed(name, patch, expected)


@case(
    "kill",
    "while the older one is removed",
    "kill -9 in the middle of removing the older checkpoint",
    "the new one is complete and resumed from, what is left of the older one is not",
)
def killed_while_removing(bench: Bench):
    reference = bench.reference()
    patch = moment("shutil.rmtree", 1, f"os.remove(os.path.join(args[0], 'optimizer.pt')); {KILL}")
    bench.run(script=bench.patched(patch), code=-signal.SIGKILL)
    assert same_weights(bench.run("--resume_from_checkpoint"), reference)


@case("kill", "while the data is tokenised", "kill -9 while the cache of tokens is written", "the next run is as ever")
def killed_while_tokenising(bench: Bench):
    reference = bench.reference()
    script = bench.patched(moment("data_loader.tokenise_batch"))
    # another data set to the cache, the same to the training: its name is not in it
    content = (bench.folder / "data/squad_sample.json").read_text()
    bench.write("new.json", f"{content}\n")
    bench.run("--dataset", "new.json", script=script, code=-signal.SIGKILL)
    assert same_training(bench.run("--dataset", "new.json"), reference)


# Several ranks: each writes a part, and all are killed

RANKS = {
    "DDP": ((), 2, ""),
    "FSDP": (("--fsdp",), 2, ""),
    "ZeRO-1": (("--deepspeed", "ds_configs/zero1.json"), 1, "DeepSpeed's start takes seconds"),
    "ZeRO-2": (("--deepspeed", "ds_configs/zero2.json"), 2, "DeepSpeed's start takes seconds"),
    "ZeRO-3": (("--deepspeed", "ds_configs/zero3.json"), 2, "DeepSpeed's start takes seconds"),
}


def ranks_killed(name: str, flags: tuple, ranks: int, slow: str) -> None:
    def act(bench: Bench) -> None:
        how = {"ranks": ranks, "BATCH_SIZE": 2 // ranks}
        reference = bench.reference(*flags, *KEPT, **how)
        script = bench.patched(moment("training.checkpoints.CheckpointCallback.on_save", 2))
        dead = bench.run(*flags, *KEPT, script=script, code=-signal.SIGKILL, **how)
        assert complete(dead.output) == {"checkpoint-2": True, "checkpoint-4": False}
        again = bench.run(*flags, *KEPT, "--resume_from_checkpoint", **how)
        assert again.record["resumed_from"] == "output/7/checkpoint-2"
        if name in ("DDP", "FSDP"):
            assert same_training(again, reference)
        else:
            assert again.losses == pytest.approx(reference.losses, abs=1e-5, rel=0)

    seen = "goes on from checkpoint-2, to the same losses"
    done = f"kill -9 of every rank of {ranks} with {name}, their second checkpoint written and not marked"
    case("kill", f"{name}, {ranks} rank(s)", done, seen, slow)(act)


for name, (flags, ranks, slow) in RANKS.items():
    ranks_killed(name, flags, ranks, slow)


# What is resumed from

RESUME = ("--resume_from_checkpoint",)
SECOND = "output/7/checkpoint-4"
checkpoint = partial(refused, "checkpoint")
checkpoint(
    "none",
    "--resume_from_checkpoint where there is none",
    "--resume_from_checkpoint: no complete checkpoint in output/7; leave the flag out to start anew",
    *RESUME,
    code=4,
)
checkpoint(
    "folder that is not there",
    "--resume_from_checkpoint of another folder's name",
    "--resume_from_checkpoint: no complete checkpoint in nowhere; leave the flag out to start anew",
    *(*RESUME, "nowhere"),
    code=4,
)


def torn(name: str, done: str, damage: Callable[[Path], object]) -> None:
    """A case that damages the last checkpoint of a run that had ended: the one before is taken."""

    def act(bench: Bench) -> None:
        reference = bench.reference(*KEPT)
        output = bench.trained(*KEPT).output
        (output / "config.json").unlink()  # as if it had been killed before it saved its model
        damage(output / "checkpoint-4")
        again = bench.run(*KEPT, *RESUME)
        assert again.record["resumed_from"] == "output/7/checkpoint-2", again
        assert same_training(again, reference)

    case("checkpoint", name, done, "the one before is resumed from, to the same weights and losses")(act)


torn("file cut off", "the optimizer's file is cut off", lambda folder: os.truncate(folder / "optimizer.pt", 1000))
torn("file missing", "the state of the random numbers is gone", lambda folder: (folder / "rng_state.pth").unlink())
torn("file empty", "the weights are an empty file", lambda folder: os.truncate(folder / "model.safetensors", 0))
torn("marker missing", "complete.json is gone", lambda folder: (folder / "complete.json").unlink())
torn("marker cut off", "complete.json is cut off", lambda folder: os.truncate(folder / "complete.json", 30))
torn("marker of another kind", "complete.json holds a list", lambda folder: (folder / "complete.json").write_text("[]"))
torn("foreign marker", "complete.json holds bytes", lambda f: (f / "complete.json").write_bytes(b"\xff\xfe"))


@case(
    "checkpoint",
    "named and torn",
    "--resume_from_checkpoint of a checkpoint whose file is cut off",
    "exit 4, nothing written",
)
def named_and_torn(bench: Bench):
    output = bench.trained(*KEPT).output
    os.truncate(output / "checkpoint-4/optimizer.pt", 1000)
    line = f"{SECOND}: is no complete checkpoint; ..."
    bench.refuses(line, *RESUME, SECOND, code=4, JOB_ID=8)


def saved_by(bench: Bench, **changes: object) -> None:
    path = bench.trained(*KEPT).output / "checkpoint-4/complete.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@case("checkpoint", "of other ranks", "a ZeRO-2 checkpoint of 2 ranks, resumed by one", "exit 4, both named")
def of_other_ranks(bench: Bench):
    saved_by(bench, strategy="DeepSpeed ZeRO-2", world_size=2)
    line = f"{SECOND}: is of another training: ranks was 2, is 1, strategy was DeepSpeed ZeRO-2, is plain; ..."
    bench.refuses(line, *RESUME, SECOND, code=4, JOB_ID=8)


@case("checkpoint", "fewer ranks", "a checkpoint of DDP on 2 ranks, resumed by one", "goes on: each rank holds all")
def fewer_ranks(bench: Bench):
    bench.trained(*KEPT, ranks=2, BATCH_SIZE=1)
    assert bench.run(*KEPT, *RESUME, SECOND, JOB_ID=8, NUM_EPOCHS=3).record["status"] == "completed"


@case("checkpoint", "more epochs", "a finished run, resumed with one more epoch", "trains that epoch")
def more_epochs(bench: Bench):
    bench.trained(*KEPT)
    ended = bench.run(*KEPT, *RESUME, SECOND, JOB_ID=8, NUM_EPOCHS=3)
    assert [entry["step"] for entry in ended.record["eval"]] == [2, 4, 6]


@case("checkpoint", "nothing left to do", "a finished run, resumed", "says that it has finished")
def nothing_left(bench: Bench):
    bench.trained(*KEPT)
    ended = bench.run(*KEPT, *RESUME, SECOND, JOB_ID=8)
    assert "step 4 was the last one, nothing is left to train" in ended.out, ended


OTHER = {
    "learning rate": ("learning_rate", {"LEARNING_RATE": "1e-3"}, ()),
    "seed": ("seed", {}, ("--seed", 1)),
    "train size": ("train_size", {"TRAIN_SIZE": 6}, ()),
    "labels": ("labels", {"LABELS": "answer"}, ()),
    "dataset": ("dataset", {"DATASET": "other.json"}, ()),
    "length": ("max_length", {"MAX_LENGTH": 180}, ()),
}


def other_setting(name: str, flag: str, variables: dict, words: tuple) -> None:
    def act(bench: Bench) -> None:
        bench.trained(*KEPT)
        bench.write("other.json", (bench.folder / "data/squad_sample.json").read_text().replace("GPU", "CPU"))
        bench.refuses(line, *KEPT, *RESUME, SECOND, *words, code=4, JOB_ID=8, **variables)

    line = f"{SECOND}: is of another training: ...{flag} was ..., is ...; ..."
    done = f"resumed with another {name} than the checkpoint's"
    case("checkpoint", f"another {name}", done, f"exit 4: {line}")(act)


for name, (flag, variables, words) in OTHER.items():
    other_setting(name, flag, variables, words)


@case(
    "checkpoint",
    "of another model",
    "a checkpoint of tiny-bloom, resumed by custom-gpt",
    "exit 4, which names model_name, nothing written",
)
def of_another_model(bench: Bench):
    bench.trained(*KEPT)
    sizes = {"VOCAB_SIZE": 1024, "HIDDEN_SIZE": 64, "NUM_LAYERS": 2, "NUM_HEADS": 4, "FF_DIM": 128}
    line = f"{SECOND}: is of another training: ...model_name was tiny-bloom, is custom-gpt...; ..."
    bench.refuses(line, *KEPT, *RESUME, SECOND, code=4, JOB_ID=8, MODEL_NAME="custom-gpt", **sizes)


# Writes a pickle that runs code, and a marker that says the file is whole
EVIL = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, "scripts")
import torch
class Canary:
    def __reduce__(self):
        return os.mkdir, ("canary",)
folder, name = Path(sys.argv[1]), sys.argv[2]
torch.save(Canary(), folder / name)
marker = json.loads((folder / "complete.json").read_text())
marker["files"][name] = (folder / name).stat().st_size
(folder / "complete.json").write_text(json.dumps(marker))
"""


def code_in(name: str, flags: tuple, slow: str = "") -> None:
    def act(bench: Bench) -> None:
        folder = bench.trained(*flags, *KEPT).output / "checkpoint-4"
        (file,) = folder.glob(name)
        bench.write("evil.py", EVIL)
        bench.run(folder, file.relative_to(folder), script="evil.py")
        ended = bench.run(*flags, *KEPT, *RESUME, SECOND, code=4, JOB_ID=8)
        assert file.name in ended.error, ended
        assert not (bench.folder / "canary").exists()

    done = f"{name} holds a pickle that runs code, and the marker agrees"
    seen = "the code does not run; exit 4, which names the file"
    case("checkpoint", f"code in {name}", done, seen, slow)(act)


ZERO = ("--deepspeed", "ds_configs/zero1.json")
for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
    code_in(name, ())
code_in("global_step4/mp_rank_00_model_states.pt", ZERO, "DeepSpeed's start takes seconds")
code_in("global_step4/*optim_states.pt", ZERO, "DeepSpeed's start takes seconds")
