"""Where a run writes: folders, disks, and its log."""

import shlex
import sys
from functools import partial
from pathlib import Path

from bench import Bench, Ended
from table import case, refused

output = partial(refused, "output")
output(
    "below a file",
    "--output_dir lies below a file",
    "...mine: cannot be written; give another --output_dir",
    code=3,
    files={"mine": ""},
    OUTPUT_DIR="mine/new",
)
output(
    "results is a file",
    "a file where the records' folder should be",
    "results/...: cannot be written (...); ...",
    code=3,
    files={"results": ""},
)


def same_weights(ended: Ended, reference: Ended) -> bool:
    """Whether both have saved the same model, to the last bit."""
    name = "model.safetensors"
    return (ended.output / name).read_bytes() == (reference.output / name).read_bytes()


def same_training(ended: Ended, reference: Ended) -> bool:
    return same_weights(ended, reference) and ended.losses == reference.losses


def complete(folder: Path) -> dict[str, bool]:
    """Name of each checkpoint, and whether it is marked as complete."""
    return {path.name: (path / "complete.json").exists() for path in sorted(folder.glob("checkpoint-*"))}


@case("output", "a finished run's folder", "OUTPUT_DIR of a run that has ended well", "exit 2, its model untouched")
def output_of_a_finished_run(bench: Bench):
    bench.trained()
    line = "output/7: holds the model of a finished run; give another --output_dir, ..."
    bench.refuses(line, JOB_ID=8, OUTPUT_DIR="output/7")


@case("output", "a finished run's record", "JOB_ID of a run that has ended well", "exit 2, its record untouched")
def record_of_a_finished_run(bench: Bench):
    bench.trained()
    line = "results/7.json: is the record of a finished run; set a new JOB_ID, or move the file away"
    bench.refuses(line, OUTPUT_DIR="elsewhere")


@case(
    "output",
    "no space for the record",
    "the disk of results/ is full",
    "exit 3 and one line",
)
def no_space_for_the_record(bench: Bench):
    with bench.small_disk("results", 4096):
        fill(bench.folder / "results/filler")
        ended = bench.run(code=3)
        assert ended.error.startswith("results/7.json: cannot be written ("), ended


def fill(path: Path) -> None:
    """Leave not a byte of the disk free."""
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


@case(
    "output",
    "no space from the start",
    "the disk of output/ has 64 KB",
    "exit 3 before the model is loaded, nothing written",
)
def no_space_from_the_start(bench: Bench):
    with bench.small_disk("output", 2**16):
        ended = bench.run(code=3)
        assert ended.error.startswith(f"{bench.folder}/output: "), ended
        assert not ended.record_path.exists()


@case(
    "output",
    "read-only",
    "output/ is mounted read-only",
    "exit 3 before the model is loaded, nothing written",
)
def read_only(bench: Bench):
    with bench.small_disk("output", 2**16, "ro"):
        ended = bench.run(code=3)
        assert ended.error.startswith(f"{bench.folder}/output: "), ended
        assert not ended.record_path.exists()


# As the third step begins, something else takes what is left
FILLED = """
from training.callbacks import TrainSpeedCallback
def fill(self, args, state, control, **kwargs):
    if state.global_step == 2:
        with open("output/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
TrainSpeedCallback.on_step_begin = fill
"""


@case(
    "output",
    "disk full during a save",
    "the disk is filled before the second checkpoint",
    "exit 3, the torn checkpoint named, the good one kept; with space again it is resumed from",
)
def disk_full_during_a_save(bench: Bench):
    reference = bench.reference()
    with bench.small_disk("output", 40 * 2**20):
        ended = bench.run(script=bench.patched(FILLED), code=3)
        assert "checkpoint-4" in ended.error, ended
        assert ended.record["status"] == "failed"
        assert complete(ended.output)["checkpoint-2"] and not complete(ended.output).get("checkpoint-4")
        (bench.folder / "output/filler").unlink()
        assert same_training(bench.run("--resume_from_checkpoint"), reference)


@case(
    "output",
    "quota",
    "no file may have more than 1 MB, and the optimizer's has more",
    "exit 3 and one line that names the checkpoint",
)
def quota(bench: Bench):
    ended = bench.run(code=3, limits={"FSIZE": 10**6})
    assert "checkpoint-2" in ended.error or ended.error.startswith(f"{bench.folder}/output: "), ended


HOSTILE = {
    "blanks and quotes": 'it\'s  a "shop"',
    "shell's characters": "$HOME; `id` & *|?",
    "line end": "one\ntwo",
    "no ASCII": "größe 文件夹 🎓",
    "flag": "--help",
    "percent": "%s {} %(x)s",
}


def hostile(name: str, folder: str) -> None:
    def act(bench: Bench) -> None:
        reference = bench.reference()
        place = Bench(bench.server, bench.folder / folder)
        assert same_training(place.run(), reference)
        assert place.run("--model_name", "output/7", JOB_ID=8, OUTPUT_DIR=f"{folder}/x").record["status"] == "completed"

    done = f"trained in a folder named {folder!r}, into one of that name, from the model that it saved"
    case("output", f"folder's name: {name}", done, "the same weights as elsewhere")(act)


for name, folder in HOSTILE.items():
    hostile(name, folder)


# The log

GOES_ON = "the training goes on to its end, with the same weights, and its record says completed"


def goes_on(bench: Bench, *words: object, **options: object) -> None:
    reference = bench.reference()
    ended = bench.run(*words, **options)
    assert same_training(ended, reference)
    assert (ended.record["status"], ended.record["exit_code"]) == ("completed", 0)


@case("stdout", "full", "stdout is /dev/full", GOES_ON)
def stdout_full(bench: Bench):
    goes_on(bench, stdout="/dev/full")


@case("stdout", "stderr full", "stderr is /dev/full", GOES_ON)
def stderr_full(bench: Bench):
    goes_on(bench, stderr="/dev/full")


def shell(name: str, command: str, slow: str = "") -> None:
    def act(bench: Bench) -> None:
        python = shlex.quote(sys.executable)
        script = f"set -o pipefail; {command.replace('python', python, 1)}"
        goes_on(bench, "-c", script, script="bash")

    case("stdout", name, command, GOES_ON, slow)(act)


shell("head", "python scripts/train.py | head -1")


@case("stdout", "refusal into a full one", "a misspelt flag, stdout is /dev/full", "exit 2, the line on stderr")
def refusal_into_a_full_stdout(bench: Bench):
    bench.refuses("--train_siz: unknown flag; did you mean --train_size?", "--train_siz", 3, stdout="/dev/full")
