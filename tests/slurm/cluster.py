"""Run a real multi-node Slurm on this one machine, for the tests and for trying out job scripts (as root).

    eval "$(python tests/slurm/cluster.py up --nodes 2)"   # a second, the first time apt-get installs Slurm
    sinfo; sbatch my.slurm; squeue                         # this shell is now the cluster's login node
    python tests/slurm/cluster.py down                     # leaves nothing behind

Each host is a set of Linux namespaces (network, host name, mounts, processes) under one `unshare`: `switch`
holds the network bridge and munged, `ctl` runs slurmctld, `node1`, `node2`, ... run slurmd. They share this
machine's files, /tmp included, as a cluster shares its home directories, and reach each other and the login
node, not the outside world. GPUs, CPUs and memory are claims that Slurm schedules by; nothing enforces them.
Each node's /etc/hosts is as Debian's installer leaves it: its own name, with a domain that the other nodes do
not know, means loopback.
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
RECORD = "slurm-test-cluster.json"  # the file that makes a directory a cluster's, and lists its processes
# What each node claims to have
GPUS = 8
CPUS = 64
MEMORY_MB = 512000
DOMAIN = "workshop.test"  # behind a node's own name, in its own /etc/hosts
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = ("slurm-wlm", "munge", "iproute2", "util-linux", "mount", "hostname")
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter", "mount", "hostname")
MUNGE_FILES = ("key-file", "seed-file", "pid-file", "log-file", "socket")
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}

# Process 1 of a host; arguments: host, hosts file, address, daemon. It reports that the namespaces are there
# and waits for its cable: if we die before its pid is on record, it reads the end of the pipe and goes too.
# It outlives its daemon and reaps orphans, as a real machine's does.
INIT = """
set -e
hostname "$0"; mount --bind "$1" /etc/hosts; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; ip link set lo up
if [ "$0" = switch ]; then ip link add bridge type bridge; ip link set bridge up; $3; fi
echo ready; read -r plugged_in; exec < /dev/null >&2
if [ "$0" != switch ]; then ip addr add "$2/24" dev eth0; ip link set eth0 up; $3 & fi
set +e; while :; do wait; sleep 1; done
"""

# Without cgroups Slurm takes the descendants of slurmstepd for a step's processes. One whose parent has ended
# would move to process 1, survive scancel and keep the job COMPLETING until the node drains. As a subreaper
# (prctl 36) slurmstepd adopts such orphans, so they end with the step.
SLURMSTEPD = """#!/bin/sh
exec {python} -ISc 'import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
os.execvp("slurmstepd", ["slurmstepd", *sys.argv[1:]])' "$@"
"""

# cred_expire: a requeued job can start that many seconds later (by default 120). config_overrides: believe
# the nodes' claims, not the machine. KillWait: as long as ranks may need to save behind SIGTERM on a slow machine.
# MinJobAge: `scontrol show job` knows finished jobs for a day.
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
    """The cluster, or a command of its, failed; the message holds the command's own words."""


def run(argv, cwd=None, env=None, check=True, timeout=60):
    """Run argv for at most timeout seconds and return the CompletedProcess, with text output.

    Raises ClusterError when it takes longer or, with check, when it fails.
    """
    argv, env = [str(word) for word in argv], env or {**os.environ, "PATH": PATH}
    kept = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, timeout=timeout, check=False, **kept)
    except subprocess.TimeoutExpired as late:
        raise ClusterError(f"no end after {timeout} s: {shlex.join(argv)}") from late
    if check and done.returncode != 0:
        raise ClusterError(f"exit code {done.returncode}: {shlex.join(argv)}\n{done.stderr}{done.stdout}")
    return done


def start_time(pid):
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def missing():
    """The programs that a cluster needs and this machine lacks, as one string."""
    return " ".join(tool for tool in TOOLS if not shutil.which(tool, path=PATH))


def install():
    """Install what is missing by apt-get; raises ClusterError when something is missing afterwards."""
    if not missing():
        return
    if os.geteuid() != 0 or not shutil.which("apt-get", path=PATH):
        raise ClusterError(f"missing: {missing()}; installing needs root and apt-get")
    policy = Path("/usr/sbin/policy-rc.d")  # Debian's way to start no services: we run daemons of our own
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
    if missing():  # apt's exit code does not count: post-install scripts may fail where there is no systemd
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ClusterError(f"missing after apt-get install: {missing()}; {words}")


def unavailable():
    """Why no cluster can run here, in one line, or None; installs Slurm when it is missing and can be."""
    if os.geteuid() != 0:
        return "not root"
    if not Path("/etc/debian_version").exists():
        return "not a Debian-like system"
    try:
        install()
    except ClusterError as error:
        return " ".join(str(error).split())
    # what a host needs: namespaces, both kinds of network device, mounts, device files
    probe = "ip link add v1 type veth && ip link add b1 type bridge && mount -t tmpfs tmpfs /dev/shm"
    tried = run([*UNSHARE, "sh", "-c", f"{probe} && mknod /dev/shm/null c 1 3"], check=False)
    return f"namespaces not permitted: {' '.join(tried.stderr.split())}" if tried.returncode else None


class Cluster:
    """A Slurm cluster of some nodes, with all its files and logs in state_dir; clusters in different ones do not meet.

    With owner, a pid, the cluster belongs to that process: once it is dead, the next up() of a cluster in the same
    parent directory takes this one down. Raises ClusterError for a path that Slurm cannot take: it goes into names
    of sockets (at most 107 bytes) and, without quotes, into configuration lines.
    """

    def __init__(self, state_dir=DEFAULT_STATE, nodes=2, owner=None):
        self.state = Path(state_dir).resolve()
        self.nodes = [f"node{number + 1}" for number in range(nodes)]
        if not re.fullmatch(r"/[\w./-]{1,59}", str(self.state), re.ASCII):
            raise ClusterError(f"--state: over 60 or odd characters; choose one like {DEFAULT_STATE}")
        self.owner = owner and (owner, start_time(owner))
        self._children = {}  # kept to be reaped
        self._hash = hashlib.sha256(str(self.state).encode()).digest()
        self._mac = "02:" + self._hash[:5].hex(":")

    @property
    def env(self):
        """Environment of a login-node shell: this process's, with this cluster's Slurm settings alone."""
        foreign = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "PATH": PATH, "SLURM_CONF": f"{self.state}/etc/slurm.conf"}

    def up(self):
        """Start the cluster and return when every node takes jobs; a whole one is left as it is.

        What a killed run left, here or beside this under a dead owner, is cleaned first. Raises ClusterError,
        with the ends of the logs, when it does not start or already runs with another number of nodes.
        """
        for other in self.state.parent.glob(f"*/{RECORD}"):
            owner = self._read(other).get("owner")
            if owner and start_time(owner[0]) != owner[1]:
                Cluster(other.parent).down()
        found = self._read()
        if found.get("ready") and all(map(self._pid, found["hosts"])):
            if found["nodes"] != self.nodes:
                raise ClusterError(f"{self.state} is up with {len(found['nodes'])} nodes; down it first")
            return
        self.down()
        try:
            (self.state / f"{RECORD}.new").unlink(missing_ok=True)
            self.state.rmdir()  # an empty one may be another user's
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
        self._write(nodes=self.nodes, owner=self.owner)  # from here on the next up() can clean up
        for name in ("etc", "munge", "ctl", "spool", "log", "dev"):
            (self.state / name).mkdir()
        net = self._add_login()
        names = {name: f"{net}.{i}" for i, name in enumerate(self.nodes, start=1)}
        hosts = {"switch": "", "ctl": f"{net}.253", **names}
        self._write(hosts=hosts)

        devices = [self.state / "dev" / f"nvidia{i}" for i in range(GPUS)]
        for device in devices:  # slurmd counts a GPU only with a device file: these are clones of /dev/null
            os.mknod(device, 0o20666, os.makedev(1, 3))
        key = self.state / "munge" / "key-file"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        values = {"state": self.state, "net": net, "gpus": GPUS, "cpus": CPUS, "memory": MEMORY_MB}
        values["memory_per_cpu"] = MEMORY_MB // CPUS
        values["nodes"] = "\n".join(f"NodeName={name} NodeAddr={address}" for name, address in names.items())
        # munged, in the switch, puts its address into credentials: Slurm is to read the login node's
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
        """End the cluster's processes and remove its interfaces and state_dir; harmless when not up.

        Only processes whose pid and start time are on record are ended, and with them all on their hosts.
        """
        if not self.state.parent.is_dir():
            return
        lock = os.open(self.state.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two sessions may find the same orphan
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
        """Wait at most timeout seconds until a job has ended and its nodes are clean; its state and its exit code.

        Raises TimeoutError with what Slurm says of it.
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
            time.sleep(min(0.1 + waited / 20, 1))  # asking costs as much as training

    def exec(self, node, argv, timeout=60):
        """Run argv on node, outside Slurm, in /, with self.env, for at most timeout seconds.

        Returns the CompletedProcess, with text output, whatever its exit code. Raises ClusterError when the
        node is not up or the command takes longer.
        """
        init = self._pid(node)
        if not init:
            raise ClusterError(f"{node} is not running")
        enter = ["nsenter", "-t", init, "--net", "--uts", "--mount", "--pid", "--"]
        return run([*enter, *argv], env=self.env, check=False, timeout=timeout)

    def processes(self, node, *contains):
        """The processes on node whose command line or environment mentions all these strings: pid -> command line.

        The pid is that seen from here. Each NAME=value of the environment ends with a NUL: "SLURM_JOB_ID=7\\0" is
        job 7, not 77. slurmd and slurmstepd count too. A node that is not up has no processes.
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
                pass  # it has ended meanwhile, or is none of ours
        return found

    def kill(self, node, sent, *contains):
        """Send a signal to the processes on node that mention all these strings; returns how many there were."""
        victims = self.processes(node, *contains)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        return len(victims)

    def crash(self, node):
        """Power loss: end everything on node at once, and return when it is gone."""
        self._end(node)

    def start(self, node):
        """Start a crashed node and return when Slurm can use it."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S")
        self._boot(node)
        self._await([node], since)

    def _read(self, record=None):
        """What the cluster wrote down; {} when there is nothing, or only another user's."""
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
        """Pid, seen from here, of the host's process 1; None when it has ended."""
        pid, started = self._read().get("pids", {}).get(host, (0, 0))
        return pid if pid and start_time(pid) == started else None

    def _boot(self, host):
        """Start a host, write its pid down, plug its cable into the switch."""
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
                # the same hardware address after a crash, as a real card's: others have it in their ARP caches
                port, card = host, f"06:{self._hash[:4].hex(':')}:{list(record['hosts']).index(host):02x}"
                ends = f"netns {self._pid('switch')} type veth peer name eth0 address {card} netns {init}"
                run(["ip", "link", "add", port, *ends.split()])
            self._on_switch("set", port, "master", "bridge", "up")
            child.stdin.write(b"plugged in\n")

    def _end(self, host):
        pid = self._pid(host)
        if pid:
            os.kill(pid, signal.SIGKILL)  # process 1 takes all of its host along, and ends after them
        deadline = time.monotonic() + 30
        while self._pid(host):
            if time.monotonic() > deadline:
                raise ClusterError(f"{host} (process {pid}) does not end")
            time.sleep(0.005)
        if host in self._children:
            self._children.pop(host).wait()
        if self._pid("switch"):
            self._on_switch("delete", host, check=False)  # the kernel does it too, but later

    def _on_switch(self, *link_args, check=True):
        run(["nsenter", "-t", self._pid("switch"), "--net", "ip", "link", *link_args], check=check)

    def _add_login(self):
        """Add the login node's cable and return the first three numbers of its subnet.

        The end that stays here has a name by the subnet, so that no two clusters take the same, and a
        hardware address by state_dir, so that down() finds it even when nothing was written down.
        """
        for number in ((self._hash[5] * 2 + i) % 512 for i in range(512)):
            name, net = f"sl{number}", f"198.{18 + number // 256}.{number % 256}"  # RFC 2544: for tests
            add = f"ip link add {name} address {self._mac} type veth peer name {name}p"
            if run(add.split(), check=False).returncode == 0:  # else it is another cluster's
                self._write(login=f"{name}p")
                run(["ip", "addr", "add", f"{net}.254/24", "dev", name])
                run(["ip", "link", "set", name, "up"])
                return net
        raise ClusterError("no free subnet in 198.18.0.0/15")

    def _await(self, nodes, since, timeout=30):
        """Wait until slurmctld answers and the nodes have registered with it after since (local ISO time)."""
        usable = r"NodeName=(\S+) .* State=(?:IDLE|MIXED|ALLOCATED)(?:\+\w+)* .* SlurmdStartTime=(\d\S+)"
        deadline = time.monotonic() + timeout
        while True:
            shown = run(["scontrol", "--oneliner", "show", "node"], env=self.env, check=False)
            started = dict(re.findall(usable, shown.stdout))
            if shown.returncode == 0 and all(started.get(node, "") >= since for node in nodes):
                return
            if time.monotonic() > deadline:
                raise ClusterError(f"not ready after {timeout} s\n{shown.stdout}{shown.stderr}")
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
