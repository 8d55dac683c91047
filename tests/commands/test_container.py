"""Tests of a job whose site has a CONTAINER, without Slurm. The container here is another PATH.

tests/slurm runs jobs in a real container.
"""

import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from helpers import REPOSITORY
from shell import program, shell_environment
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


def test_preflight_starts_outside_and_checks_the_packages_inside(workshop, host):
    """A wrong value ends the dry runs at once, which would take most of the time."""
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(REPOSITORY / name, workshop)
    environment = shell_environment(CONTAINER=CONTAINER, PATH=f"{host}:{SYSTEM}", RANKS_PER_GPU="none")
    command = [host / "python3", workshop / "scripts/preflight.py", "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = {line[6:24].strip(): line[:5].strip() for line in done.stdout.splitlines()}
    passed = {"site": "ok", "packages": "ok", "GPUs": "skip", "cache": "skip", "NCCL_SOCKET_IFNAME": "ok"}
    assert found == found | passed | {"experiments": "fail"}, done
    assert done.stdout.endswith("\npreflight: 4 ok, 0 warn, 1 fail, 3 skip\n") and done.returncode == 3
    environment["CONTAINER"] = "false"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "\nfail  container          no output; correct CONTAINER in the site file\n" in done.stdout
