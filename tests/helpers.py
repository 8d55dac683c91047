"""Start the workshop's scripts as a participant does, in a directory of their own, and read what they leave."""

import contextlib
import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
EXPERIMENTS = REPOSITORY / "experiments"
EXPERIMENT_SCRIPTS = sorted({*EXPERIMENTS.rglob("*.slurm")} - {*EXPERIMENTS.glob("own/**/*.slurm")})  # own: a site's
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *REPOSITORY.glob("docs/**/*.md"),
        *REPOSITORY.glob("data/*.md"),
        EXPERIMENTS / "README.md",
    ]
)
RUN_TIMEOUT = 1500  # seconds, on a machine that is slow and busy. pytest itself ends a test after 1800
# A run that takes seconds. Two epochs of 8 steps; the questions have 127 to 194 tokens, so that padding matters.
TINY = {
    "MODEL_NAME": "tiny-bloom",
    "DATASET": "data/squad_sample.json",
    "TRAIN_SIZE": "64",
    "EVAL_SIZE": "32",
    "MAX_LENGTH": "256",
    "FP16": "False",
    "BATCH_SIZE": "4",
    "GRAD_ACC": "2",
    "LEARNING_RATE": "2e-3",  # random weights: the default of 5e-5 would hardly change them
    "NUM_EPOCHS": "2",
    "EM_F1": "False",
    "CUDA_VISIBLE_DEVICES": "",  # on the CPU everywhere, so that the losses can be compared
}
# DeepSpeed is to compile nothing: here it could not, as the folder cannot be made
NOTHING_COMPILED = {"TORCH_EXTENSIONS_DIR": f"{os.devnull}/none"}
INHERITED = ("HOME", "XDG_CACHE_HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "LD_LIBRARY_PATH")
LAUNCHERS = {
    "python": lambda processes: [sys.executable],
    "torchrun": lambda processes: [str(Path(sys.executable).with_name("torchrun")), f"--nproc_per_node={processes}"],
    "torch.distributed.run": lambda processes: [
        sys.executable,
        *("-m", "torch.distributed.run", f"--nproc_per_node={processes}"),
    ],
    "launch.py": lambda processes: [sys.executable, "scripts/launch.py", f"--nproc-per-node={processes}"],
}
# Below the ports that the kernel gives to clients, so that no connection takes one before torchrun binds it, and below
# those of job.sh; each of pytest's workers has its own, as do two sessions at a time
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = itertools.count(10000 + 2000 * (WORKER % 4) + os.getpid() % 1000)


@dataclass
class Finished:
    """A run that has ended. `log`: stdout and stderr together."""

    command: str
    code: int
    log: str
    folder: Path
    job_id: str

    @property
    def record_path(self) -> Path:
        return self.folder / "results" / f"{self.job_id}.json"

    @property
    def record(self) -> dict:
        assert self.record_path.exists(), f"no run record\n{self}"
        return json.loads(self.record_path.read_text(encoding="utf-8"))

    @property
    def output(self) -> Path:
        """Folder of the saved model and the checkpoints."""
        return self.folder / "output" / self.job_id

    @property
    def losses(self) -> list[float]:
        """Evaluation loss of each epoch."""
        return [entry["loss"] for entry in self.record["eval"]]

    def effective(self, knob: str) -> object:
        return self.record["knobs"][knob]["effective"]

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("error: ")]

    def __str__(self) -> str:
        # What torchrun says of a failure is long and names no cause: the cause stands before it
        own, agent, _ = self.log.partition("torch/distributed/elastic/multiprocessing/api.py")
        tail = "\n".join([*own.splitlines()[-40:], *(["[torchrun's report follows]"] if agent else [])])
        return f"command: {self.command}\nin: {self.folder}\nexit code: {self.code}\nend of the log:\n{tail}"


class Process:
    """A script that runs in the background; `wait` gives its `Finished`."""

    def __init__(self, folder: Path, arguments: list[str], environment: dict, job_id: str):
        self.folder, self.arguments, self.job_id = folder, arguments, job_id
        self.log_path = folder / f"{job_id}.{next(PORTS)}.log"
        self.variables = " ".join(f"{k}={v}" for k, v in environment.items() if k not in INHERITED)
        with self.log_path.open("wb") as log:
            self.popen = subprocess.Popen(
                arguments, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, timeout: float = RUN_TIMEOUT) -> Finished:
        try:
            code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.finished('none')}") from None
        finally:
            self.kill()
        return self.finished(code)

    def finished(self, code: object) -> Finished:
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        # carriage returns of the progress bars become line ends
        log = re.sub(r"\r+", "\n", text)
        return Finished(f"{self.variables} {' '.join(self.arguments)}", code, log, self.folder, self.job_id)

    def kill(self) -> None:
        """End what still runs. torchrun gives each rank a session of its own, so a process group is not enough."""
        if self.popen.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(self.popen.pid)
                for process in [*parent.children(recursive=True), parent]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            self.popen.wait()

    def until(self, condition: Callable[[], object], timeout: float = RUN_TIMEOUT) -> object:
        """Poll until `condition` is true, and return its value; fail when the process ends before."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            ended = self.popen.poll()
            if value := condition():
                return value
            assert ended is None, f"ended too early\n{self.finished(ended)}"
            time.sleep(0.1)
        self.kill()
        raise AssertionError(f"did not happen within {timeout} s\n{self.finished('none')}")


def make_workplace(folder: Path) -> Path:
    """A directory in which the documents' commands work as printed; results go there, not into the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("scripts", "ds_configs", "fsdp_configs", "data"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def environment(variables: dict) -> dict:
    """Nothing of the caller's but the basics: a knob or a SLURM_ variable set outside would change the runs."""
    basics = {name: os.environ[name] for name in INHERITED if name in os.environ}
    own = {"OMP_NUM_THREADS": "1", "PET_MASTER_PORT": str(free_port())}
    return basics | NOTHING_COMPILED | own | variables


def start(
    folder: Path,
    job_id: str,
    *arguments: object,
    processes: int = 1,
    launcher: str = "",
    script: str = "scripts/train.py",
    **variables: object,
) -> Process:
    """Start a script in `folder`; `variables` are environment variables on top of those of `TINY`."""
    job_id = job_id.replace(" ", "_")  # it names files
    launcher = launcher or ("python" if processes == 1 else "torchrun")
    command = [*LAUNCHERS[launcher](processes), script, *map(str, arguments)]
    values = TINY | {"HF_HOME": folder / "hf", "JOB_ID": job_id} | variables
    return Process(folder, command, environment({name: str(value) for name, value in values.items()}), job_id)


def run(folder: Path, job_id: str, *arguments: object, code: int = 0, **options: object) -> Finished:
    """Run a script to its end; any other exit code than `code` fails with the command and the end of the log."""
    finished = start(folder, job_id, *arguments, **options).wait()
    assert finished.code == code, f"exit code {code} expected\n{finished}"
    return finished


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise AssertionError


def snapshot(*paths: Path) -> dict:
    """Content and time of change of every file at and below the paths."""
    files = [f for path in paths for f in ([path] if path.is_file() else sorted(path.rglob("*"))) if f.is_file()]
    return {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in files}


def directives(nodes: int, gpus: int) -> str:
    """The beginning of an experiment's script."""
    return f"#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --gpus-per-node={gpus}\n"


def directives_of(script: Path) -> dict[str, str]:
    """What an experiment's script asks of Slurm."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))


def program(path: str) -> ModuleType:
    """A program of the repository outside of scripts/, as a module."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def bash_blocks(page: Path) -> list[tuple[str, str]]:
    """What stands behind "bash" (nothing, or "cluster") and the text of each such block of a page."""
    return re.findall(r"^ *```bash([^\n]*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def the_error(stderr: str) -> str:
    """The one error line, which must have its three parts; warnings of libraries may stand around it."""
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr, stderr
    assert re.fullmatch(r"error: \S.*: \S.*; \S.*", lines[0]), lines[0]
    return lines[0]
