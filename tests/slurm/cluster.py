"""Run a real multi-node Slurm on one machine, for the tests and for trying out job scripts (as root).

    eval "$(python tests/slurm/cluster.py up --nodes 2)"   # takes a second; the first time, installs Slurm
    sinfo; sbatch my.slurm; squeue                         # this shell is now the cluster's login node
    python tests/slurm/cluster.py down                     # removes everything

Each host is a set of Linux namespaces (network, host name, mounts, processes) under one `unshare`. `switch` holds
the network bridge and munged, `ctl` runs slurmctld, and `node1`, `node2`, ... run slurmd. All hosts share this
machine's files, including /tmp, as a cluster shares home directories. They can reach each other and the login node,
but no other machine. Slurm schedules by the configured GPUs, CPUs and memory, and nothing enforces the limits.
Each node's /etc/hosts is as Debian's installer writes it: the node's own name, with a domain that the other nodes
do not know, resolves to loopback.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

DEFAULT_STATE = "/tmp/slurm-ws"
RECORD = "slurm-test-cluster.json"  # the file that marks a cluster's directory and lists its processes
# Resources in the configuration of each node
GPUS = 8
CPUS = 64
MEMORY_MB = 512000
DOMAIN = "workshop.test"  # the domain of a node's name in the node's own /etc/hosts
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = ("slurm-wlm", "munge", "iproute2", "util-linux", "mount", "hostname")
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter", "mount", "hostname")
MUNGE_FILES = ("key-file", "seed-file", "pid-file", "log-file", "socket")
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}

# Process 1 of a host. Its arguments are host, hosts file, address and daemon. It reports that its namespaces exist and
# waits for its network cable. If this program dies before it records the host's pid, the pipe closes and process 1
# ends. Process 1 outlives its daemon and reaps orphans, as on a real machine.
INIT = """
set -e
hostname "$0"; mount --bind "$1" /etc/hosts; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; ip link set lo up
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

# cred_expire: seconds before a requeued job can start (120 by default). config_overrides: use the configured
# resources of the nodes, not the machine's. KillWait: time that ranks may need to save after SIGTERM on a slow machine.
# MinJobAge: `scontrol show job` shows finished jobs for a day.
SLURM_CONF = """
ClusterName=workshop
SlurmctldHost=ctl({net}.253)
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
KillWait=15
SlurmdTimeout=6
MessageTimeout=5
MinJobAge=86400
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} Sockets=1 CoresPerSocket={cpus} RealMemory={memory} Gres=gpu:{gpus} Feature=v100,a100
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerCPU={memory_per_cpu}
"""


class ClusterError(RuntimeError):
    """A failure of the cluster or of one of its commands. The message holds the command's output."""


def run(argv, cwd=None, env=None, check=True, timeout=60):
    """Run argv for at most timeout seconds and return the CompletedProcess with text output.

    Raises ClusterError if the command takes longer or, with check, if it fails.
    """
    argv, env = [str(word) for word in argv], env or {**os.environ, "PATH": PATH}
    kept = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, timeout=timeout, check=False, **kept)
    except subprocess.TimeoutExpired as late:
        raise ClusterError(f"still running after {timeout} s: {shlex.join(argv)}") from late
    if check and done.returncode != 0:
        raise ClusterError(f"exit code {done.returncode}: {shlex.join(argv)}\n{done.stderr}{done.stdout}")
    return done


def start_time(pid):
    """Start time of a process in clock ticks since boot; None if the process has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def missing():
    """Names of the programs that a cluster needs and this machine lacks, as one string."""
    return " ".join(tool for tool in TOOLS if not shutil.which(tool, path=PATH))


def install():
    """Install missing programs with apt-get. Raises ClusterError if a program is still missing afterwards."""
    if not missing():
        return
    if os.geteuid() != 0 or not shutil.which("apt-get", path=PATH):
        raise ClusterError(f"missing: {missing()}; installing needs root and apt-get")
    policy = Path("/usr/sbin/policy-rc.d")  # prevents Debian from starting services: the cluster runs its own daemons
    ours = not policy.exists()
    try:
        if ours:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        env = {**os.environ, "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive"}
        apt = ["apt-get", "-qq", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=120"]
        run([*apt, "update"], env=env, check=False, timeout=300)
        apt += ["install", "-y", "--no-install-recommends"]
        done = run([*apt, *PACKAGES], env=env, check=False, timeout=600)
    finally:
        if ours:
            policy.unlink(missing_ok=True)
    if missing():  # ignore apt's exit code, because post-install scripts may fail without systemd
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ClusterError(f"missing after apt-get install: {missing()}; {words}")


def unavailable():
    """Return in one line why no cluster can run here, or None. Installs Slurm first if it is missing."""
    if os.geteuid() != 0:
        return "not root"
    if not Path("/etc/debian_version").exists():
        return "not a Debian-like system"
    try:
        install()
    except ClusterError as error:
        return " ".join(str(error).split())
    # A host needs namespaces, both kinds of network device, mounts and device files
    probe = "ip link add v1 type veth && ip link add b1 type bridge && mount -t tmpfs tmpfs /dev/shm"
    tried = run([*UNSHARE, "sh", "-c", f"{probe} && mknod /dev/shm/null c 1 3"], check=False)
    return f"namespaces not permitted: {' '.join(tried.stderr.split())}" if tried.returncode else None


class Cluster:
    """A Slurm cluster with all its files and logs in state_dir. Clusters with different directories are independent.

    With owner (a pid), the cluster belongs to that process. After the process has ended, the next up() of a cluster in
    the same parent directory takes this cluster down. Raises ClusterError for a path that Slurm cannot use: the path
    is part of socket names (at most 107 bytes) and, without quotes, of configuration lines.
    """

    def __init__(self, state_dir=DEFAULT_STATE, nodes=2, owner=None):
        self.state = Path(state_dir).resolve()
        self.nodes = [f"node{number + 1}" for number in range(nodes)]
        if not re.fullmatch(r"/[\w./-]{1,59}", str(self.state), re.ASCII):
            raise ClusterError(f"--state: has over 60 or special characters; choose a path like {DEFAULT_STATE}")
        self.owner = owner and (owner, start_time(owner))
        self._children = {}  # process 1 of each host, which must be reaped
        self._hash = hashlib.sha256(str(self.state).encode()).digest()
        self._mac = "02:" + self._hash[:5].hex(":")

    @property
    def env(self):
        """Environment of a login node's shell: this process's variables, but only this cluster's Slurm settings."""
        foreign = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "PATH": PATH, "SLURM_CONF": f"{self.state}/etc/slurm.conf"}

    def up(self):
        """Start the cluster and return when every node accepts jobs. A running cluster stays unchanged.

        Before the start, remove what a killed run left in this directory, and clusters next to it whose owner has
        ended. Raises ClusterError with the ends of the logs if the cluster does not start or already runs with another
        number of nodes.
        """
        for other in self.state.parent.glob(f"*/{RECORD}"):
            owner = self._read(other).get("owner")
            if owner and start_time(owner[0]) != owner[1]:
                Cluster(other.parent).down()
        found = self._read()
        if found.get("ready") and all(map(self._pid, found["hosts"])):
            if found["nodes"] != self.nodes:
                raise ClusterError(f"{self.state} is up with {len(found['nodes'])} nodes; take it down first")
            return
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

    def _up(self):
        self.state.mkdir(parents=True)
        self.state.chmod(0o755)
        self._write(nodes=self.nodes, owner=self.owner)  # the next up() needs this to clean up after a kill
        for name in ("etc", "munge", "ctl", "spool", "log", "dev"):
            (self.state / name).mkdir()
        net = self._add_login()
        names = {name: f"{net}.{i}" for i, name in enumerate(self.nodes, start=1)}
        hosts = {"switch": "", "ctl": f"{net}.253", **names}
        self._write(hosts=hosts)

        devices = [self.state / "dev" / f"nvidia{i}" for i in range(GPUS)]
        for device in devices:  # slurmd counts only GPUs with a device file: these are clones of /dev/null
            os.mknod(device, 0o20666, os.makedev(1, 3))
        key = self.state / "munge" / "key-file"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        values = {"state": self.state, "net": net, "gpus": GPUS, "cpus": CPUS, "memory": MEMORY_MB}
        values["memory_per_cpu"] = MEMORY_MB // CPUS
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
        (etc / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        (etc / "slurmstepd").write_text(SLURMSTEPD.format(python=shlex.quote(sys.executable)))
        (etc / "slurmstepd").chmod(0o755)

        since = time.strftime("%Y-%m-%dT%H:%M:%S")
        for host in hosts:
            self._boot(host)
        self._await(names, since)
        self._write(ready=True)

    def down(self):
        """End the cluster's processes and remove its interfaces and state_dir. Harmless if it is not up.

        This ends only processes with a recorded pid and start time, and all processes on their hosts.
        """
        if not self.state.parent.is_dir():
            return
        lock = os.open(self.state.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two sessions may find the same orphaned cluster
            record = self._read()
            for host in record.get("pids", ()):
                self._end(host)
            for name in re.findall(rf"(sl\d+)@.* {self._mac} ", run(["ip", "-oneline", "link"]).stdout):
                run(["ip", "link", "delete", name], check=False)
            if record:
                shutil.rmtree(self.state)
        finally:
            os.close(lock)

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
        init = self._pid(node)
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
        init = self._pid(node)
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
        self._end(node)

    def start(self, node):
        """Start a crashed node and return when Slurm can use it."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S")
        self._boot(node)
        self._await([node], since)

    def _read(self, record=None):
        """The cluster's record; {} if there is none or it belongs to another user."""
        record = record or self.state / RECORD
        try:
            return json.loads(record.read_text()) if record.stat().st_uid == os.geteuid() else {}
        except (OSError, ValueError):
            return {}

    def _write(self, **changes):
        new = self.state / f"{RECORD}.new"
        new.write_text(json.dumps({**self._read(), **changes}))
        new.replace(self.state / RECORD)

    def _pid(self, host):
        """Pid of the host's process 1, outside its namespace; None if the process has ended."""
        pid, started = self._read().get("pids", {}).get(host, (0, 0))
        return pid if pid and start_time(pid) == started else None

    def _boot(self, host):
        """Start a host, record its pid, and connect its cable to the switch."""
        etc, record = f"{self.state}/etc", self._read()
        files = [f"--{name}={self.state}/munge/{name}" for name in MUNGE_FILES]
        daemons = {"switch": " ".join(["munged --force", *files]), "ctl": "slurmctld -D"}
        daemon = daemons.get(host, f"slurmd -D -d {etc}/slurmstepd")
        argv = [*UNSHARE, "sh", "-c", INIT, host, f"{etc}/hosts.{host}", record["hosts"][host], daemon]
        env = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "SLURM_CONF": f"{etc}/slurm.conf"}
        with open(self.state / "log" / host, "ab") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            child = subprocess.Popen(argv, **pipes, env=env, cwd="/", start_new_session=True)
        self._children[host] = child
        with child.stdin, child.stdout:
            if not child.stdout.readline():
                raise ClusterError(f"{host} did not start")
            init = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())
            self._write(pids={**record.get("pids", {}), host: (init, start_time(init))})
            if host == "switch":
                port = record["login"]
                run(["ip", "link", "set", port, "netns", init])
            else:
                # Keep the hardware address after a crash, as a real card does: other hosts have it in their ARP caches
                port, card = host, f"06:{self._hash[:4].hex(':')}:{list(record['hosts']).index(host):02x}"
                ends = f"netns {self._pid('switch')} type veth peer name eth0 address {card} netns {init}"
                run(["ip", "link", "add", port, *ends.split()])
            self._on_switch("set", port, "master", "bridge", "up")
            child.stdin.write(b"plugged in\n")

    def _end(self, host):
        pid = self._pid(host)
        if pid:
            os.kill(pid, signal.SIGKILL)  # the kernel kills all processes of the host, and process 1 ends last
        deadline = time.monotonic() + 30
        while self._pid(host):
            if time.monotonic() > deadline:
                raise ClusterError(f"{host} (process {pid}) did not end within 30 s")
            time.sleep(0.005)
        if host in self._children:
            self._children.pop(host).wait()
        if self._pid("switch"):
            self._on_switch("delete", host, check=False)  # the kernel removes the link too, but later

    def _on_switch(self, *link_args, check=True):
        run(["nsenter", "-t", self._pid("switch"), "--net", "ip", "link", *link_args], check=check)

    def _add_login(self):
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

    def _await(self, nodes, since, timeout=30):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["up", "down"])
    parser.add_argument("--nodes", metavar="N", type=int, default=2, help="compute nodes (%(default)s)")
    parser.add_argument("--state", metavar="DIR", default=DEFAULT_STATE, help="the cluster's files (%(default)s)")
    args = parser.parse_args()
    try:
        cluster = Cluster(args.state, args.nodes)
        if args.verb == "down":
            cluster.down()
            return
        if reason := unavailable():
            raise ClusterError(f"{reason}; use a Debian machine or privileged container, as root")
        cluster.up()
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}")
    except ClusterError as error:
        sys.exit(f"error: {args.verb}: {error}")


if __name__ == "__main__":
    main()
