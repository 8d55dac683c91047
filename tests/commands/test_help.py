"""The --help of every command, called from another directory, and what makes a flag a knob."""

import ast
import re
import subprocess
import sys

from helpers import REPOSITORY, inherited

SCRIPTS = REPOSITORY / "scripts"
# Each program is a fork of a process that has imported libraries, but none of our modules. A program with --help shows
# its docstring. One without is only imported
START_ALL = """
import multiprocessing, os, runpy, sys
import datasets, deepspeed, matplotlib.pyplot, torch, transformers.trainer
def start(path, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.argv[:] = [path, "--help"]
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name="__main__" if "__doc__" in open(path).read() else "imported")
programs = sys.argv[1:]
for path in programs:
    process = multiprocessing.get_context("fork").Process(target=start, args=(path, path.replace("/", "-")))
    process.start()
    process.join()
    print(f"{path} ended with {process.exitcode}")
"""
PROGRAMS = [
    path
    for folder in ("scripts/*.py", "benchmarks/**/*.py", "exercises/**/*.py", "docs/**/*.py")
    for path in sorted(REPOSITORY.glob(folder))
    if '__name__ == "__main__"' in path.read_text()
]


def test_every_program_finds_our_modules_itself_and_a_command_opens_with_its_purpose(tmp_path):
    """Without PYTHONPATH, only a program itself can add folders to the path."""
    environment = inherited() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", START_ALL, *map(str, PROGRAMS)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    for path in PROGRAMS:
        log = (tmp_path / str(path).replace("/", "-")).read_text()
        assert f"{path} ended with 0" in done.stdout, log
        code = path.read_text()
        purpose = ast.get_docstring(ast.parse(code)).splitlines()[0]
        assert (purpose in log) == ("__doc__" in code), log
        if path.parent == SCRIPTS:
            beginning = log.split("options:")[0].splitlines()[:30]
            assert beginning.index(purpose) < 8, f"{path}: the purpose must be among the first lines\n{log}"
            command = rf"\s*(((PYTHONPATH=\S+ )?python|torchrun|srun) .*{path.name}|experiments/{path.stem}\.sh )"
            assert [line for line in beginning if re.match(command, line)], f"{path}: no command to copy\n{log}"


USE_KNOB = """
import json
import generated
from settings.command_line import parse_command_line
for words in ([], ["--lr_scheduler_type", "constant"]):
    settings = parse_command_line("", words, environment={"LR_SCHEDULE": "cosine"})
    print(json.dumps(settings.recorded()["lr_scheduler_type"]), *settings.knob_lines()[1:2])
generated.knobs("trainer")
parse_command_line("", [], environment={"LR_SCHEDULE": "cosin"})
"""


def test_a_row_with_a_variable_is_a_knob(command, tmp_path):
    """It is read, recorded, shown, and explained on the page."""
    source, row = (SCRIPTS / "config.py").read_text(), 'Knob("", "lr_scheduler_type", "linear"'
    assert source.count(row) == 1, "this row has a variable now; take another row without one"
    knob = 'Knob("LR_SCHEDULE", "lr_scheduler_type", "linear", "How the learning rate falls."'
    (tmp_path / "config.py").write_text(source.replace(row, knob))
    (tmp_path / "use_knob.py").write_text(USE_KNOB)
    done = command(tmp_path / "use_knob.py", PYTHONPATH=f"{SCRIPTS}:{REPOSITORY / 'docs'}")
    assert done.out.splitlines()[:2] == [
        '"cosine"   variable    LR_SCHEDULE=cosine',
        '"constant"   flag        LR_SCHEDULE=constant',
    ]
    assert "| `LR_SCHEDULE` | `--lr_scheduler_type` | `linear` | How the learning rate falls. | no |" in done.out
    assert "LR_SCHEDULE: invalid choice: 'cosin' (choose from 'linear', 'cosine'" in done.err
