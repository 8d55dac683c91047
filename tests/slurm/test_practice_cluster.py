"""Tests of `make cluster` as people use it: they start it, submit jobs, crash a node and end it, and nothing is left.

This user is `nobody`, in a copy of the repository of its own.
"""

import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from breakable_cluster import remains, unavailable
from helpers import RUN_TIMEOUT, inherited, until
from jobs import SYSTEM, copy_repository

USER = pwd.getpwnam("nobody")
SMALL = "TRAIN_SIZE=32 EVAL_SIZE=8 BATCH_SIZE=4 EM_F1=False OMP_NUM_THREADS=1"
ENDLESS = f"{SMALL} NUM_EPOCHS=100000 SAVE_STRATEGY=no"


def open_folders(needed: list[str], spare: Path) -> str:
    """Return commands that let other users reach these folders, in the mount namespace in which they run.

    The Python of the tests may be in root's home, which other users cannot enter. There, a temporary file system that
    holds only these folders takes the place of that home. spare: an empty folder for the time of the change.
    """
    closed = {}
    for folder in needed:
        ancestors = [each for each in reversed(Path(folder).parents) if not each.stat().st_mode & 0o001]
        if ancestors:
            closed[folder] = ancestors[0]
    saved = {folder: spare / str(number) for number, folder in enumerate(closed)}
    lines = [f"mkdir -p {saved[folder]}; mount --bind {shlex.quote(folder)} {saved[folder]}" for folder in closed]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(top))}" for top in sorted(set(closed.values()))]
    lines += [
        f"mkdir -p {shlex.quote(folder)}; mount --bind {saved[folder]} {shlex.quote(folder)}" for folder in closed
    ]
    return "\n".join(["set -e", "umask 022", *lines])


class User:
    """An ordinary user with a copy of the repository, who types commands."""

    def __init__(self, folder: Path):
        self.root, self.state = copy_repository(folder / "workshop"), folder / "slurm"
        (folder / "spare").mkdir()
        self.open_folders = open_folders([sys.base_prefix, sys.prefix], folder / "spare")
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, USER.pw_uid, USER.pw_gid, follow_symlinks=False)
        path = ":".join([str(Path(sys.executable).parent), *SYSTEM])
        self.environment = inherited() | {"PATH": path, "HOME": str(folder), "HF_HOME": f"{folder}/hf"}
        self.environment.pop("TMPDIR", None)  # this user may not write into a folder of root

    def cluster(self, verb: str, typed: str = "", sudo: bool = False) -> subprocess.CompletedProcess[str]:
        """Run ``cluster.py VERB`` with these lines as input."""
        user = [f"--reuid={USER.pw_uid}", f"--regid={USER.pw_gid}", "--clear-groups"]
        become = ["env", f"SUDO_UID={USER.pw_uid}"] if sudo else ["setpriv", *user]
        command = [*become, sys.executable, "scripts/cluster.py", verb, "--folder", str(self.state)]
        opened = ["unshare", "--mount", "sh", "-c", f'{self.open_folders}\nexec "$@"', "sh"]
        return subprocess.run(
            [*opened, *command], cwd=self.root, env=self.environment, input=typed, capture_output=True, text=True
        )

    def shell(self, typed: str) -> str:
        """Output of a command in the cluster's shell."""
        done = self.cluster("shell", f"set -euo pipefail\n{typed}")
        assert done.returncode == 0, f"{typed}\n{done}"
        return done.stdout.strip()

    def state_of(self, job: str) -> str:
        """Return a job's state and its reason, such as "PENDING Resources"."""
        return self.shell(f"squeue --noheader --states=all --job={job} --format='%T %r'")


@pytest.fixture
def user() -> Iterator[User]:
    if reason := unavailable():
        pytest.skip(f"no Slurm cluster here: {reason}")
    # In a folder of pytest, the names of sockets would be too long, and this user could not enter it
    folder = Path(tempfile.mkdtemp(prefix="practice-", dir="/tmp"))
    folder.chmod(0o755)
    user = User(folder)
    yield user
    user.cluster("stop", sudo=True)
    shutil.rmtree(folder)


@pytest.mark.promise("a cluster of your own: started by an ordinary user, a node that fails, nothing left")
def test_an_ordinary_user_practises_and_leaves_nothing(user):
    started = user.cluster("start")
    if "does not permit namespaces" in started.stderr:
        pytest.skip(f"for an ordinary user: {started.stderr}")
    assert started.returncode == 0, started
    assert len(remains(user.state)) > 5
    again = user.cluster("start")
    assert (again.returncode, again.stdout) == (0, "Slurm is already running, with 2 node(s)\n")
    inside = user.shell("python scripts/cluster.py start 2>&1 || echo $?").splitlines()
    assert inside == ["error: cluster: this shell is already in the cluster; to leave the shell, type exit", "2"]

    train = user.shell(f"cd experiments/deepspeed-multi-node/2_nodes; {SMALL} sbatch --parsable *.slurm")
    until(lambda: user.state_of(train).startswith("COMPLETED"), RUN_TIMEOUT, pause=1)
    record = user.root / "experiments/deepspeed-multi-node/2_nodes/results" / f"{train}.json"
    assert record.stat().st_uid == USER.pw_uid
    assert json.loads(record.read_text())["nodes"] == ["node1", "node2"]

    job = user.shell("sbatch --parsable --nodes=2 --gpus-per-node=4 --output=/dev/null --wrap='srun sleep 1000'")
    until(lambda: user.state_of(job).startswith("RUNNING"))
    waiting = user.shell("sbatch --parsable --nodes=2 --gpus-per-node=1 --wrap=true")
    until(lambda: user.state_of(waiting) == "PENDING Resources")
    user.shell("kill -KILL $(cat $CLUSTER/pid/node2)")
    until(lambda: "Restarts=1 " in user.shell(f"scontrol show job {job}"))
    until(lambda: user.state_of(job).startswith("RUNNING"))
    user.shell(f"scancel {job}")
    until(lambda: user.state_of(waiting).startswith("COMPLETED"))

    last = user.shell(f"cd experiments/baseline; {ENDLESS} sbatch --parsable baseline.slurm")
    record = user.root / "experiments/baseline/results" / f"{last}.json"
    until(record.exists, RUN_TIMEOUT)
    stopped = user.cluster("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert json.loads(record.read_text())["status"] == "stopped"
    assert remains(user.state) == []
    assert user.cluster("stop").stdout == "no cluster is running\n"

    # A second cluster never writes into the files of the first one's jobs
    user.cluster("start")
    assert int(user.shell("sbatch --parsable --wrap=true")) > int(last)


@pytest.mark.promise("a cluster of your own: started by an ordinary user, a node that fails, nothing left")
def test_with_sudo_only_the_daemons_belong_to_root(user):
    assert user.cluster("start", sudo=True).returncode == 0
    shown = user.cluster("shell", "id -un; sbatch --parsable --output=out --wrap='id -un'", sudo=True).stdout.split()
    assert shown[0] == "nobody"
    until(lambda: user.state_of(shown[1]).startswith("COMPLETED"))
    output = user.root / "out"
    assert (output.read_text(), output.stat().st_uid) == ("nobody\n", USER.pw_uid)
    refused = user.cluster("stop")
    assert refused.returncode == 2
    assert refused.stderr == "error: cluster: root has started it; end it: sudo make cluster-down\n"
    assert user.cluster("stop", sudo=True).returncode == 0
    assert remains(user.state) == []
