"""Tests of a run's output: its folders, full disks, its log, and files of other runs."""

import os
import shlex
import signal
import sys

import pytest

from workbench import STEP, Bench, Running, complete_marks, patch_call, same_training


def test_model_and_record_of_a_finished_run_are_not_overwritten(bench: Bench):
    bench.trained()
    line = "output/7: holds the model of a finished run; give another --output_dir, ..."
    bench.refuses(line, JOB_ID=8, OUTPUT_DIR="output/7")
    line = "results/7.json: is the record of a finished run; set a new JOB_ID, or move the file away"
    bench.refuses(line, OUTPUT_DIR="elsewhere")


def start_and_pause(bench: Bench, *words: object, **variables: object) -> Running:
    """Start a run that waits in its first step until somebody writes into the pipe `go`."""
    os.mkfifo(bench.folder / "go")
    lines = "open('here', 'w'); open('go').read()"
    first = bench.start(*words, script=bench.patched(patch_call(STEP, 1, lines)), **variables)
    first.until((bench.folder / "here").exists)
    return first


SAME_JOB = {"OUTPUT_DIR": "elsewhere"}
SAME_FOLDER = {"JOB_ID": "8", "OUTPUT_DIR": "output/7"}
ANOTHER_JOB = "JOB_ID: job 7 is running and has locked results/.7/.lock; give another JOB_ID, or wait ..."
ANOTHER_FOLDER = "--output_dir: job 7 is running and has locked output/7/.lock; give another --output_dir, or wait ..."


@pytest.mark.promise("reliability 10")
def test_two_runs_do_not_write_the_same_files(bench: Bench):
    """The second run is also refused if it would resume from a checkpoint of the first run."""
    bench.run(script=bench.patched(patch_call(STEP, 3)), code=-signal.SIGKILL)
    first = start_and_pause(bench, "--resume_from_checkpoint")
    for words in ((), ("--resume_from_checkpoint", "output/7")):
        bench.refuses(ANOTHER_FOLDER, *words, **SAME_FOLDER)
        bench.refuses(ANOTHER_JOB, *words, **SAME_JOB)
    (bench.folder / "go").write_text("")
    ended = first.wait()
    assert ended.code == 0, ended
    assert same_training(ended, bench.reference())
    assert not list(bench.folder.rglob(".lock"))


@pytest.mark.promise("reliability 10")
def test_a_later_attempt_takes_the_locks_of_a_frozen_process_over(bench: Bench):
    first = start_and_pause(bench)
    os.kill(first.pids[0], signal.SIGSTOP)
    ended = bench.run(SLURM_RESTART_COUNT=1)
    assert same_training(ended, bench.reference())
    os.kill(first.pids[0], signal.SIGCONT)
    first.kill()


@pytest.mark.promise("reliability 13")
def test_a_full_disk_is_found_before_the_model_is_loaded(bench: Bench):
    with bench.small_disk("output", 2**16):
        ended = bench.run(code=3)
        assert ended.error.startswith(f"{bench.folder}/output: "), ended
        assert not ended.record_path.exists()


# Another program fills the disk at the beginning of the third step
FILL = """
        with open("output/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass"""


@pytest.mark.promise("reliability 13")
def test_a_disk_that_fills_up_during_a_save(bench: Bench):
    """The error names the incomplete checkpoint, and the run can resume from the previous one."""
    with bench.small_disk("output", 40 * 2**20):
        ended = bench.run(script=bench.patched(patch_call(STEP, 3, FILL)), code=3)
        assert "checkpoint-4" in ended.error, ended
        assert ended.record["status"] == "failed"
        assert complete_marks(ended.output)["checkpoint-2"] and not complete_marks(ended.output).get("checkpoint-4")
        (bench.folder / "output/filler").unlink()
        assert same_training(bench.run("--resume_from_checkpoint"), bench.reference())


def test_a_limit_on_the_size_of_files_is_not_blamed_on_the_model(bench: Bench):
    """The data are in the cache, so the tokenizer is the first file that is too large."""
    bench.trained()
    line = f"ulimit -f 16; {shlex.quote(sys.executable)} scripts/train.py"
    ended = bench.run("-c", line, script="bash", JOB_ID=8, code=3)
    assert ended.error.startswith("TMPDIR: File too large; allow larger files (ulimit -f)"), ended


def test_a_folder_may_have_any_name(bench: Bench):
    name = 'it\'s  a "shop"; $HOME `id` & *|? %s größe 文件夹'
    place = Bench(bench.server, bench.folder / name)
    assert same_training(place.run(), bench.reference())
    assert place.run("--model_name", "output/7", JOB_ID=8, OUTPUT_DIR=f"{name}/x").record["status"] == "completed"


LOGS = {"full": {"stdout": "/dev/full", "stderr": "/dev/full"}, "head": {"script": "bash"}}


@pytest.mark.promise("reliability 14")
@pytest.mark.parametrize("name", LOGS)
def test_a_log_on_a_full_disk_does_not_end_the_training(bench: Bench, name):
    line = f"set -o pipefail; {shlex.quote(sys.executable)} scripts/train.py | head -1"
    words = ("-c", line) if name == "head" else ()
    ended = bench.run(*words, **LOGS[name])
    assert same_training(ended, bench.reference())
    assert (ended.record["status"], ended.record["exit_code"]) == ("completed", 0)
