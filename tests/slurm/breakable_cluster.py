"""The cluster of scripts/cluster.py for the tests: they wait for jobs, look into nodes and let nodes crash."""

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

from cluster import Cluster, ClusterError, check_machine, run
from shared.errors import WorkshopError

FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}


def unavailable() -> str | None:
    """Return in one line why the tests can start no cluster here, or None."""
    if os.geteuid() != 0:
        return "not root"
    try:
        check_machine()
    except WorkshopError as error:
        return str(error)
    return None


def remains(state):
    """List a cluster's processes, network interfaces, mounts and directory on this machine."""
    found = [str(path) for path in [Path(state)] if path.exists()]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{state}/" in line]
    links = subprocess.check_output(["ip", "-oneline", "link"], text=True)
    found += [line for line in links.splitlines() if Cluster(state)._mac in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + b"\0" + (process / "environ").read_bytes()
        except OSError:
            continue
        if f"{state}/".encode() in text:
            found.append(text.partition(b"\0\0")[0].decode())
    return found


class BreakableCluster(Cluster):
    """A cluster whose nodes have 8 GPUs and set CUDA_VISIBLE_DEVICES, as nodes with GPUs do.

    It runs in this machine's own network namespace, so only root can start it, and needs no shell of its own.
    """

    gpu_flags = ""

    def __init__(self, state_dir: str | Path, nodes: int = 2, owner: int | None = None):
        super().__init__(state_dir, nodes, gpus=8, owner=owner)

    def wait(self, job_id, timeout):
        """Wait at most timeout seconds until a job has ended and its nodes are clean. Return its state and exit code.

        Raises TimeoutError with Slurm's description of the job.
        """
        start = time.monotonic()
        while True:
            shown = run(["scontrol", "show", "job", job_id], env=self.env, check=False)  # a busy Slurm may not answer
            text = shown.stdout + shown.stderr
            found = re.search(r"(?ms)^ +JobState=(\S+) .*? ExitCode=(\d+):", text)
            if found and found[1] in FINAL:
                return found[1], int(found[2])
            waited = time.monotonic() - start
            if waited > timeout:
                text += run(["squeue"], env=self.env, check=False).stdout
                raise TimeoutError(f"job {job_id} has not ended after {timeout} s\n{text}")
            time.sleep(min(0.1 + waited / 20, 1))  # frequent requests would slow down the training

    def exec(self, node, argv, timeout=60):
        """Run argv on node in / with self.env, outside Slurm, for at most timeout seconds.

        Returns the CompletedProcess with text output for any exit code. Raises ClusterError if the node is not up or
        the command takes longer.
        """
        init = self.pid(node)
        if not init:
            raise ClusterError(f"{node} is not running")
        enter = ["nsenter", "-t", init, "--net", "--uts", "--mount", "--pid", "--"]
        return run([*enter, *argv], env=self.env, check=False, timeout=timeout)

    def processes(self, node, *contains):
        """Map pid to command line for processes on node whose command line or environment contains all these strings.

        The pid is the one outside the node's namespace. Each NAME=value of the environment ends with a NUL, so
        "SLURM_JOB_ID=7\\0" matches job 7 but not job 77. slurmd and slurmstepd are included. A node that is not up
        has no processes.
        """
        found = {}
        init = self.pid(node)
        space = init and os.readlink(f"/proc/{init}/ns/pid")
        for process in Path("/proc").glob("[0-9]*") if init else ():
            try:
                if os.readlink(process / "ns/pid") == space:
                    command = (process / "cmdline").read_bytes().decode(errors="replace")
                    text = command + (process / "environ").read_bytes().decode(errors="replace")
                    if command and all(word in text for word in contains):
                        found[int(process.name)] = command.replace("\0", " ").strip()
            except OSError:
                pass  # the process has ended, or cannot be read
        return found

    def kill(self, node, sent, *contains):
        """Send a signal to the processes on node that match all these strings, and return their number."""
        victims = self.processes(node, *contains)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        return len(victims)

    def crash(self, node):
        """Simulate a power loss: kill all processes on node, and return when they have ended."""
        self.end(node)
