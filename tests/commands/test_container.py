"""Tests of a job whose site has a CONTAINER, without Slurm. The container here is another PATH.

tests/slurm runs jobs in a real container.
"""

import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from helpers import REPOSITORY
from shell import program
from test_dry_run import dry_run

SYSTEM = f"{REPOSITORY}/tests/slurm/bin:/usr/bin:/bin"
CONTAINER = shlex.join(["env", f"PATH={Path(sys.executable).parent}:{SYSTEM}"])
ERROR = "error: requirements-host.txt: {}/python3 does not have: {}; install this file with Python 3.11 or newer, "


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Path:
    """A folder in which python3 has only requirements-host.txt, and nothing is called python."""
    folder = tmp_path_factory.mktemp("host")
    venv.create(folder)
    (folder / "bin/python").unlink()
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python3", "install", "--quiet"]
    done = subprocess.run([*pip, "-r", REPOSITORY / "requirements-host.txt"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip installs nothing here: {done.stderr}")
    return folder / "bin"


@pytest.mark.promise("a container: outside, a job needs two packages")
def test_only_what_trains_runs_in_the_container(workshop, stub, host):
    variables = {"CONTAINER": CONTAINER, "PATH": f"{host}:{SYSTEM}"}
    done = dry_run(workshop / "experiments/deepspeed-multi-node/2_nodes", **variables)
    assert (done.returncode, done.stderr) == (0, ""), done
    shown = f"srun --nodes=2 --ntasks-per-node=1 {CONTAINER} python "
    commands = [line.removeprefix(shown) for line in done.stdout.splitlines() if line.startswith(shown)]
    assert [shlex.split(line)[0].rpartition("/")[2] for line in commands] == ["measure_bandwidth.py", "launch.py"]
    assert "one node: " in done.stdout
    done, _ = stub("import sys, time; print('>', sys.prefix); time.sleep(1)", **variables)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert f"> {sys.prefix}\n" in done.stdout and f"\ncontainer: {CONTAINER}\nCPU memory: peak " in done.stdout


@pytest.mark.promise("a container: outside, a job needs two packages")
def test_a_host_without_its_packages_or_the_container_is_one_error_line(workshop, tmp_path, host):
    bare, old = tmp_path / "bare/bin", tmp_path / "old"
    venv.create(bare.parent)
    (bare / "python").unlink()
    program(old, "python3", f'exec \'{sys.executable}\' -c "import sys; sys.version_info = (3, 9)\n$2" "$3"')
    for folder, lacks in ((bare, "pydantic, psrecord"), (old, "Python 3.11 or newer, psrecord")):
        done = dry_run(workshop / "experiments/baseline", CONTAINER=CONTAINER, PATH=f"{folder}:/usr/bin:/bin")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert done.stderr.startswith(ERROR.format(folder, lacks))
    done = dry_run(workshop / "experiments/baseline", CONTAINER="aptainer exec", PATH=f"{host}:{SYSTEM}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("error: CONTAINER: there is no program aptainer; correct it in the site file, or ")
