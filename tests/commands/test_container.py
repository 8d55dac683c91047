"""Tests of a job whose site has a CONTAINER, without Slurm. tests/slurm and tests/image.sh use a real container."""

import sys
import venv

import pytest

from shell import program
from test_dry_run import dry_run


@pytest.mark.promise("a container: outside, a job needs two packages")
def test_a_job_trains_inside_and_measures_outside(stub, contained):
    done, _ = stub("import sys, time; print('>', sys.prefix); time.sleep(1)", **contained)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert f"> {sys.prefix}\n" in done.stdout
    assert f"\ncontainer: {contained['CONTAINER']}\nCPU memory: peak " in done.stdout


@pytest.mark.promise("a container: outside, a job needs two packages")
def test_a_missing_package_an_older_python_and_a_mistyped_runtime_are_one_line(workshop, tmp_path, contained):
    bare = tmp_path / "bare/bin"
    venv.create(bare.parent)
    old = f'exec \'{sys.executable}\' -c "import sys; sys.version_info = (3, 9)\n$2" "$3"'
    program(tmp_path / "old", "python", old)
    error = "requirements-host.txt: {} does not have: {}; install this file with Python 3.11 or newer, and activate "
    wrong = {
        error.format(bare / "python", "pydantic, psrecord"): {"PATH": f"{bare}:/usr/bin:/bin"},
        error.format(tmp_path / "old/python", "Python 3.11 or newer"): {"PATH": f"{tmp_path}/old:{contained['PATH']}"},
        "CONTAINER: there is no program aptainer; correct it ": {"CONTAINER": "aptainer exec"},
    }
    for line, variables in wrong.items():
        done = dry_run(workshop / "experiments/baseline", **contained | variables)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert done.stderr.startswith(f"error: {line}")
