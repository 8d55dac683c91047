"""Start a practice cluster: a real Slurm of several nodes on this machine (docs/practice-cluster.md).

make cluster                               # = start, if it does not run, then shell
make cluster-down                          # = stop: removes everything
python scripts/cluster.py shell            # a shell on the cluster's login node

An ordinary user can start it, in a user namespace, if the kernel allows that; otherwise start it as root (sudo).

Each host is a set of Linux namespaces (network, host name, mounts, processes) under one `unshare`. `switch` holds the
network bridge and munged, `ctl` runs slurmctld, and `node1`, `node2`, ... run slurmd. All hosts share this machine's
files, including /tmp, as a cluster shares home directories. They can reach each other and the login node, but no other
machine. Slurm schedules by the configured GPUs, CPUs and memory, and nothing enforces the limits. Each node's
/etc/hosts is as Debian's installer writes it: the node's own name, with a domain that the other nodes do not know,
resolves to loopback. A node whose first process ends, as in a power failure, boots again.
"""

import fcntl
import hashlib
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from shared.numbers import Limits
from shared.paths import EXPERIMENTS, REPOSITORY

# The user who runs the jobs. With sudo, only the daemons belong to root
USER = int(os.environ.get("SUDO_UID", os.getuid()))
FOLDER = Path(f"/tmp/practice-cluster-{USER}")
RECORD = "slurm-cluster.json"  # the file that marks a cluster's directory and lists its processes
NODES = Limits(1, below=33)
# Resources in the configuration of each node
CPUS = 64
MEMORY_MB = 512000
DOMAIN = "workshop.test"  # the domain of a node's name in the node's own /etc/hosts
SERVER = "server"  # the process that starts the cluster and keeps it up
READY = "ready\n"
CANCEL_SECONDS = 60  # more than the 30 seconds after which Slurm kills a job that does not end (KillWait)
REBOOT_SECONDS = 10  # from the moment when Slurm has noticed that a node is down
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = ("slurm-wlm", "munge", "iproute2", "util-linux", "mount", "hostname")
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter", "mount", "hostname")
MUNGE_FILES = ("key-file", "seed-file", "pid-file", "log-file", "socket")
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
# In its own user namespace, an ordinary user may create all other namespaces
ROOTLESS = () if os.geteuid() == 0 else ("unshare", "--user", "--map-current-user", "--keep-caps", "--net")

# Process 1 of a host. Its arguments are host, hosts file, address, daemon and the folder of the GPUs. It reports that
# its namespaces exist and waits for its network cable. If this program dies before it records the host's pid, the pipe
# closes and process 1 ends. Process 1 outlives its daemon and reaps orphans, as on a real machine. slurmd counts only
# GPUs with a device file, so each GPU becomes a second /dev/null.
INIT = """
set -e
hostname "$0"; mount --bind "$1" /etc/hosts; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; ip link set lo up
for gpu in "$4"/*; do mount --bind /dev/null "$gpu"; done
if [ "$0" = switch ]; then ip link add bridge type bridge; ip link set bridge up; $3; fi
echo ready; read -r plugged_in; exec < /dev/null >&2
if [ "$0" != switch ]; then ip addr add "$2/24" dev eth0; ip link set eth0 up; $3 & fi
set +e; while :; do wait; sleep 1; done
"""

# Without cgroups, Slurm treats the descendants of slurmstepd as the processes of a step. An orphan would move to
# process 1, survive scancel and keep the job COMPLETING until the node drains. This wrapper makes slurmstepd a
# subreaper (prctl 36), which adopts orphans, so that they end with the step.
SLURMSTEPD = """#!/bin/sh
exec {python} -ISc 'import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
os.execvp("slurmstepd", ["slurmstepd", *sys.argv[1:]])' "$@"
"""

# FirstJobId: no job may write into the files of a job of an earlier cluster. cred_expire: seconds before a requeued job
# can start (120 by default). config_overrides: use the configured resources of the nodes, not the machine's. MinJobAge:
# `scontrol show job` shows finished jobs for a day.
SLURM_CONF = """
ClusterName=workshop
SlurmUser={user}
SlurmdUser={user}
SlurmctldHost=ctl({net}.253)
FirstJobId={first_job_id}
AuthInfo=socket={state}/munge/socket,cred_expire=5
StateSaveLocation={state}/ctl
SlurmdSpoolDir={state}/spool/%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/spool/%n.pid
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=6
MessageTimeout=5
MinJobAge=86400
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} Sockets=1 CoresPerSocket={cpus} RealMemory={memory} Gres=gpu:{gpus} Feature=v100,a100
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerCPU={memory_per_cpu}
"""


# For the shell on the login node, whose prompt also shows when the cluster has ended
BASHRC = """
[ ! -r ~/.bashrc ] || . ~/.bashrc
PS1='[practice cluster] \\w\\$ '
PROMPT_COMMAND='[ "$(cat $CLUSTER/pid/server 2>&1)" = $CLUSTER_PID ] || PS1="[this cluster has ended: type exit] "'
"""


class ClusterError(RuntimeError):
    """A failure of the cluster or of one of its commands. The message holds the command's output."""


def run(
    argv: Iterable[object],
    cwd: str | Path | None = None,
    env: dict[str, str] | None = None,
    check: bool = True,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run argv for at most timeout seconds and return the CompletedProcess with text output.

    Raises ClusterError if the command takes longer or, with check, if it fails.
    """
    words, env = [str(word) for word in argv], env or {**os.environ, "PATH": PATH}
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, timeout=timeout, check=False, capture_output=True, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired as late:
        raise ClusterError(f"still running after {timeout} s: {shlex.join(words)}") from late
    if check and done.returncode != 0:
        raise ClusterError(f"exit code {done.returncode}: {shlex.join(words)}\n{done.stderr}{done.stdout}")
    return done


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if the process has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def check_machine() -> None:
    """Raise WorkshopError if no cluster can run here: a program is missing, or namespaces are not permitted."""
    if missing := [program for program in TOOLS if not shutil.which(program, path=PATH)]:
        raise WorkshopError(
            "cluster",
            f"{', '.join(missing)}: not installed",
            f"on Debian or Ubuntu: sudo apt-get install {' '.join(PACKAGES)}",
            ENVIRONMENT,
        )
    # A host needs namespaces, both kinds of network device, and mounts
    probe = "ip link add v1 type veth && ip link add b1 type bridge && mount -t tmpfs tmpfs /dev/shm"
    tried = run([*ROOTLESS, *UNSHARE, "sh", "-c", probe], check=False)
    if tried.returncode:
        reason = " ".join(tried.stderr.split())
        remedy = "run: sudo make cluster" if ROOTLESS else "use a virtual machine, or a privileged container"
        raise WorkshopError("cluster", f"this machine does not permit namespaces ({reason})", remedy, ENVIRONMENT)


def first_unused_job_id() -> int:
    """Return a job id above those of all files that earlier jobs have left in this repository."""
    files = [path for kind in ("log/*", "results/*", "slurm-*") for path in EXPERIMENTS.glob(f"**/{kind}")]
    files += REPOSITORY.glob("slurm-*")
    ids = [
        int(found[1]) for path in files if (found := re.fullmatch(r"(?:slurm-|.*_)?(\d{1,7})\.(?:out|json)", path.name))
    ]
    return max(ids, default=0) + 1


class Cluster:
    """A Slurm cluster with all its files and logs in state_dir. Clusters with different directories are independent.

    Its GPUs are only names: jobs can ask for them, and run on the CPU. With owner (a pid), the cluster belongs to that
    process. After the process has ended, the next up() of a cluster in the same parent directory takes this cluster
    down. Raises ClusterError for a path that Slurm cannot use: the path is part of socket names (at most 107 bytes)
    and, without quotes, of configuration lines.
    """

    # Set no CUDA_VISIBLE_DEVICES. A job that sees it might use the machine's own GPU
    gpu_flags = "Flags=no_gpu_env"

    def __init__(self, state_dir: str | Path = FOLDER, nodes: int = 2, gpus: int = 4, owner: int | None = None):
        self.state = Path(state_dir).resolve()
        self.nodes = [f"node{number + 1}" for number in range(nodes)]
        self.gpus = gpus
        if not re.fullmatch(r"/[\w./-]{1,59}", str(self.state), re.ASCII):
            raise ClusterError(f"{self.state}: the path has over 60 or special characters; choose one like {FOLDER}")
        self.owner = owner and (owner, start_time(owner))
        self._children: dict[str, subprocess.Popen] = {}  # process 1 of each host, which must be reaped
        self._hash = hashlib.sha256(str(self.state).encode()).digest()
        self._mac = "02:" + self._hash[:5].hex(":")

    @property
    def env(self) -> dict[str, str]:
        """Environment of a login node's shell: this process's variables, but only this cluster's Slurm settings."""
        foreign = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "PATH": PATH, "SLURM_CONF": f"{self.state}/etc/slurm.conf"}

    @property
    def record(self) -> dict[str, Any]:
        """The cluster's record; {} if there is none, or if it belongs neither to root nor to this user."""
        try:
            path = self.state / RECORD
            return json.loads(path.read_text()) if path.stat().st_uid in (0, USER) else {}
        except (OSError, ValueError):
            return {}

    @property
    def is_roots(self) -> bool:
        return (self.state / RECORD).stat().st_uid == 0

    def up(self) -> None:
        """Start the cluster and return when every node accepts jobs.

        Before the start, end a cluster in this directory, which a killed run may have left, and clusters next to it
        whose owner has ended. Raises ClusterError with the ends of the logs if the cluster does not start.
        """
        for other in (Cluster(path.parent) for path in self.state.parent.glob(f"*/{RECORD}")):
            owner = other.record.get("owner")
            if owner and start_time(owner[0]) != owner[1] and (os.geteuid() == 0 or not other.is_roots):
                other.down()
        self.down()
        try:
            (self.state / f"{RECORD}.new").unlink(missing_ok=True)
            self.state.rmdir()  # an empty directory may belong to another user
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ClusterError(f"{self.state} holds other files; choose a new directory") from error
        try:
            self._up()
        except BaseException as error:
            ends = [f"{log}: {log.read_text(errors='replace')[-500:]}" for log in self.state.glob("log/*")]
            self.down()
            if isinstance(error, ClusterError):
                raise ClusterError("\n".join([str(error), *ends])) from error
            raise

    def _up(self) -> None:
        self.state.mkdir(parents=True)
        self.state.chmod(0o755)
        self._write(nodes=self.nodes, owner=self.owner)  # the next up() needs this to clean up after a kill
        for name in ("etc", "munge", "ctl", "spool", "log", "gpus", "pid"):
            (self.state / name).mkdir()
        net = self._add_login()
        names = {name: f"{net}.{i}" for i, name in enumerate(self.nodes, start=1)}
        hosts = {"switch": "", "ctl": f"{net}.253", **names}
        self._write(hosts=hosts)

        devices = [self.state / "gpus" / f"nvidia{i}" for i in range(self.gpus)]
        for device in devices:
            device.touch()
        key = self.state / "munge" / "key-file"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        values: dict[str, object] = {"state": self.state, "net": net, "user": os.geteuid()}
        values |= {"gpus": self.gpus, "cpus": CPUS, "memory": MEMORY_MB, "memory_per_cpu": MEMORY_MB // CPUS}
        values["first_job_id"] = first_unused_job_id()
        values["nodes"] = "\n".join(f"NodeName={name} NodeAddr={address}" for name, address in names.items())
        # munged runs in the switch and puts the switch's address into credentials. Slurm expects the login node's
        # address there, so the two names share an address.
        known = {"localhost": "127.0.0.1", f"{os.uname().nodename} switch": f"{net}.254", "ctl": f"{net}.253", **names}
        etc = self.state / "etc"
        for host in hosts:
            seen = dict(known)
            if host in names:
                del seen[host]
                seen[f"{host}.{DOMAIN} {host}"] = "127.0.1.1"
            (etc / f"hosts.{host}").write_text("".join(f"{address} {name}\n" for name, address in seen.items()))
        (etc / "slurm.conf").write_text(SLURM_CONF.format(**values))
        (etc / "gres.conf").write_text("".join(f"Name=gpu File={device} {self.gpu_flags}\n" for device in devices))
        (etc / "slurmstepd").write_text(SLURMSTEPD.format(python=shlex.quote(sys.executable)))
        (etc / "slurmstepd").chmod(0o755)
        (etc / "bashrc").write_text(BASHRC)

        since = time.strftime("%Y-%m-%dT%H:%M:%S")
        for host in hosts:
            self._boot(host)
        self._await(names, since)

    def down(self) -> None:
        """End the cluster's processes and remove its interfaces and state_dir. Harmless if it is not up.

        This ends only processes with a recorded pid and start time, and all processes on their hosts.
        """
        if not self.state.parent.is_dir():
            return
        lock = os.open(self.state.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two sessions may find the same orphaned cluster
            record = self.record
            for host in (SERVER, *record.get("hosts", ())):
                self.end(host)
            for name in re.findall(rf"(sl\d+)@.* {self._mac} ", run(["ip", "-oneline", "link"]).stdout):
                run(["ip", "link", "delete", name], check=False)
            if record:
                shutil.rmtree(self.state)
        finally:
            os.close(lock)

    def keep_up(self) -> None:
        """Boot each node again that has lost its first process. This does not return."""
        down_since: dict[str, float] = {}
        while True:
            for node in self.nodes:
                if self.pid(node):
                    continue
                self.end(node)
                # A node that is back before Slurm has missed it would leave its old job in the state RUNNING
                state = run(["sinfo", "--noheader", f"--nodes={node}", "--format=%T"], env=self.env, check=False).stdout
                if state.startswith("down"):
                    down_since.setdefault(node, time.monotonic())
                if time.monotonic() - down_since.get(node, time.monotonic()) > REBOOT_SECONDS:
                    del down_since[node]
                    try:
                        self.start(node)
                    except ClusterError as error:
                        print(error, flush=True)  # into the server's log
            time.sleep(1)

    def start(self, node: str) -> None:
        """Start a node whose processes have ended, and return when Slurm can use it."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S")
        self._boot(node)
        self._await([node], since)

    def end(self, host: str) -> None:
        """Kill all processes of a host, as a power failure does, and return when they have ended."""
        pid = self.pid(host)
        if pid:
            os.kill(pid, signal.SIGKILL)  # the kernel kills all processes of the host, and process 1 ends last
        deadline = time.monotonic() + 30
        while self.pid(host):
            if time.monotonic() > deadline:
                raise ClusterError(f"{host} (process {pid}) did not end within 30 s")
            time.sleep(0.005)
        if host in self._children:
            self._children.pop(host).wait()
        if self.pid("switch"):
            self._on_switch("delete", host, check=False)  # the kernel removes the link too, but later

    def serve(self) -> None:
        """Start the cluster, print "ready", and keep it up until SIGTERM. If it does not start, print the reason."""
        os.umask(0o022)  # if root starts the cluster, other users must be able to read its configuration
        run(["ip", "link", "set", "lo", "up"])
        try:
            self.up()
        except ClusterError as error:
            print(error)
            return
        self._write_pid(SERVER, os.getpid())
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        print(READY, end="", flush=True)
        log = os.open(self.state / "log" / SERVER, os.O_WRONLY | os.O_CREAT)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        try:
            self.keep_up()
        finally:
            self.cancel_jobs()

    def cancel_jobs(self) -> None:
        """Cancel all jobs and wait until they have ended, so that they save a checkpoint and close their records."""
        deadline = time.monotonic() + CANCEL_SECONDS
        while self.pid("ctl") and time.monotonic() < deadline:
            # On a busy machine squeue may fail, and its empty output then does not mean that all jobs have ended
            shown = run(["squeue", "--noheader", "--format=%A"], env=self.env, check=False)
            jobs = shown.stdout.split()
            if shown.returncode == 0 and not jobs:
                return
            run(["scancel", *jobs], env=self.env, check=False)
            time.sleep(1)

    def _write(self, **changes: object) -> None:
        new = self.state / f"{RECORD}.new"
        new.write_text(json.dumps({**self.record, **changes}))
        new.replace(self.state / RECORD)

    def _write_pid(self, host: str, pid: int) -> None:
        self._write(pids={**self.record.get("pids", {}), host: (pid, start_time(pid))})
        (self.state / "pid" / host).write_text(f"{pid}\n")  # for people: kill -KILL $(cat $CLUSTER/pid/node2)

    def pid(self, host: str) -> int | None:
        """Pid of the host's process 1, outside its namespace; None if the process has ended."""
        pid, started = self.record.get("pids", {}).get(host, (0, 0))
        return pid if pid and start_time(pid) == started else None

    def _boot(self, host: str) -> None:
        """Start a host, record its pid, and connect its cable to the switch."""
        etc, record = f"{self.state}/etc", self.record
        files = [f"--{name}={self.state}/munge/{name}" for name in MUNGE_FILES]
        daemons = {"switch": " ".join(["munged --force", *files]), "ctl": "slurmctld -D"}
        daemon = daemons.get(host, f"slurmd -D -d {etc}/slurmstepd")
        words = [host, f"{etc}/hosts.{host}", record["hosts"][host], daemon, f"{self.state}/gpus"]
        env = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "SLURM_CONF": f"{etc}/slurm.conf"}
        with open(self.state / "log" / host, "ab") as log:
            child = subprocess.Popen(
                [*UNSHARE, "sh", "-c", INIT, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                cwd="/",
                start_new_session=True,
            )
        self._children[host] = child
        assert child.stdin and child.stdout
        with child.stdin, child.stdout:
            if not child.stdout.readline():
                raise ClusterError(f"{host} did not start")
            init = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())
            self._write_pid(host, init)
            if host == "switch":
                port = record["login"]
                run(["ip", "link", "set", port, "netns", init])
            else:
                # Keep the hardware address after a crash, as a real card does: other hosts have it in their ARP caches
                port, card = host, f"06:{self._hash[:4].hex(':')}:{list(record['hosts']).index(host):02x}"
                ends = f"netns {self.pid('switch')} type veth peer name eth0 address {card} netns {init}"
                run(["ip", "link", "add", port, *ends.split()])
            self._on_switch("set", port, "master", "bridge", "up")
            child.stdin.write(b"plugged in\n")

    def _on_switch(self, *link_args: str, check: bool = True) -> None:
        run(["nsenter", "-t", self.pid("switch"), "--net", "ip", "link", *link_args], check=check)

    def _add_login(self) -> str:
        """Add the login node's cable and return the first three numbers of its subnet.

        The name of the local end comes from the subnet, so two clusters cannot use the same subnet. Its hardware
        address comes from state_dir, so down() finds the interface even without a record.
        """
        for number in ((self._hash[5] * 2 + i) % 512 for i in range(512)):
            name, net = f"sl{number}", f"198.{18 + number // 256}.{number % 256}"  # for tests (RFC 2544)
            add = f"ip link add {name} address {self._mac} type veth peer name {name}p"
            if run(add.split(), check=False).returncode == 0:  # fails if another cluster uses the subnet
                self._write(login=f"{name}p")
                run(["ip", "addr", "add", f"{net}.254/24", "dev", name])
                run(["ip", "link", "set", name, "up"])
                return net
        raise ClusterError("no free subnet in 198.18.0.0/15")

    def _await(self, nodes: Iterable[str], since: str, timeout: float = 30) -> None:
        """Wait until slurmctld answers and the nodes have registered after the time `since` (local, ISO format)."""
        usable = r"NodeName=(\S+) .* State=(?:IDLE|MIXED|ALLOCATED)(?:\+\w+)* .* SlurmdStartTime=(\d\S+)"
        deadline = time.monotonic() + timeout
        while True:
            shown = run(["scontrol", "--oneliner", "show", "node"], env=self.env, check=False)
            started = dict(re.findall(usable, shown.stdout))
            if shown.returncode == 0 and all(started.get(node, "") >= since for node in nodes):
                return
            if time.monotonic() > deadline:
                raise ClusterError(f"the cluster is not ready after {timeout} s\n{shown.stdout}{shown.stderr}")
            time.sleep(0.05)


def start(cluster: Cluster) -> None:
    check_outside()
    if cluster.pid(SERVER):
        print(f"Slurm is already running, with {len(cluster.record['nodes'])} node(s)")
        return
    check_machine()
    take_down(cluster)  # what a killed cluster has left
    serve = [*ROOTLESS, sys.executable, __file__, "serve", "--folder", cluster.state, "--nodes", len(cluster.nodes)]
    server = subprocess.Popen(
        [str(word) for word in serve],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert server.stdout
    lines = []
    for line in server.stdout:
        lines.append(line)
        if line == READY:
            break
    else:
        raise WorkshopError("cluster", "it did not start", "".join(lines), ENVIRONMENT)
    print(f"Slurm is running: {len(cluster.nodes)} node(s) with {cluster.gpus} GPUs each. The GPUs are only names.")
    print("  a first job        cd experiments/baseline; sbatch baseline.slurm; squeue")
    print("  a second terminal  make cluster; its shell is in the same cluster")
    print("  the end            exit leaves the shell, and make cluster-down ends the cluster")
    print("  more               docs/practice-cluster.md", flush=True)


def check_outside() -> None:
    """Raise WorkshopError in the shell of a cluster, which can neither enter nor start another one."""
    if "CLUSTER_PID" in os.environ:
        is_up = str(Cluster(os.environ["CLUSTER"]).pid(SERVER)) == os.environ["CLUSTER_PID"]
        what = "this shell is already in the cluster" if is_up else "the cluster of this shell has ended"
        raise WorkshopError("cluster", what, "to leave the shell, type exit")


def shell(cluster: Cluster) -> None:
    """Replace this process by a shell of the ordinary user on the login node."""
    check_outside()
    server = cluster.pid(SERVER)
    if not server:
        raise WorkshopError("cluster", "none is running", "start one: make cluster")
    env = {**cluster.env, "SITE": "practice", "CLUSTER": str(cluster.state), "CLUSTER_PID": str(server)}
    command = ["bash", "--rcfile", f"{cluster.state}/etc/bashrc"]
    if not cluster.is_roots:
        enter = ["nsenter", "--target", str(server), "--user", "--preserve-credentials", "--net", "--"]
        command = [*enter, *command]
    elif os.geteuid() != USER:  # sudo
        user = pwd.getpwuid(USER)
        env |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
        command = ["setpriv", f"--reuid={USER}", f"--regid={user.pw_gid}", "--init-groups", "--", *command]
    os.execvpe(command[0], command, env)


def stop(cluster: Cluster) -> None:
    if not cluster.record:
        print("no cluster is running")
        return
    take_down(cluster)
    print("The cluster has ended: its jobs are cancelled, its processes and files removed. Logs and results remain.")
    print("To leave a shell of this cluster, type exit.")


def take_down(cluster: Cluster) -> None:
    if cluster.record and cluster.is_roots and os.geteuid() != 0:
        raise WorkshopError("cluster", "root has started it", "end it: sudo make cluster-down")
    if server := cluster.pid(SERVER):
        os.kill(server, signal.SIGTERM)  # it cancels the jobs, then ends
        deadline = time.monotonic() + 2 * CANCEL_SECONDS
        while cluster.pid(SERVER) and time.monotonic() < deadline:
            time.sleep(0.1)
    cluster.down()


def main() -> None:
    parser = OneLineErrors(description=__doc__)
    verbs = {"start": start, "shell": shell, "stop": stop, "serve": Cluster.serve}  # only start() uses serve
    parser.add_argument("verb", choices=verbs, metavar="start|shell|stop")
    parser.add_argument("--nodes", metavar="N", type=NODES.whole_number, default=2, help="compute nodes (%(default)s)")
    parser.add_argument("--folder", metavar="DIR", type=Path, default=FOLDER, help="the cluster's files (%(default)s)")
    arguments = parser.parse_args()
    try:
        verbs[arguments.verb](Cluster(arguments.folder, arguments.nodes))
    except ClusterError as error:
        raise WorkshopError("cluster", str(error), "see docs/practice-cluster.md", ENVIRONMENT) from error


if __name__ == "__main__":
    run_program(main)
