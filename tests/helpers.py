"""Paths of the repository, tiny settings and the files of a run, for all tests. workbench.py starts the runs."""

import contextlib
import importlib.util
import itertools
import json
import os
import pwd
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from records.schema import read_record

REPOSITORY = Path(__file__).resolve().parent.parent
EXPERIMENTS = REPOSITORY / "experiments"
# A site's own experiments in experiments/own are left out
EXPERIMENT_SCRIPTS = sorted({*EXPERIMENTS.rglob("*.slurm")} - {*EXPERIMENTS.glob("own/**/*.slurm")})
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *REPOSITORY.glob("docs/**/*.md"),
        *REPOSITORY.glob("data/*.md"),
        EXPERIMENTS / "README.md",
        REPOSITORY / "scripts" / "README.md",
    ]
)
# 1,190 real questions of SQuAD v1.1 (CONTRIBUTING gives their source). Without this file, some tests are skipped.
XQUAD = REPOSITORY.parent / "shared" / "data" / "xquad.en.json"
LIMIT = 120  # seconds until a hang fails a test; actions take one or two seconds, or more on a busy machine
RUN_TIMEOUT = (
    1500  # seconds that a training run or a job may take on a busy machine; pytest itself ends a test after 1800
)
# A run of a few seconds with two epochs of 8 steps. The questions have 127 to 194 tokens, so padding matters.
TINY = {
    "MODEL_NAME": "tiny-bloom",
    "DATASET": "data/squad_sample.json",
    "TRAIN_SIZE": "32",
    "EVAL_SIZE": "16",
    "MAX_LENGTH": "256",
    "FP16": "False",
    "BATCH_SIZE": "4",
    "GRAD_ACC": "2",
    "LEARNING_RATE": "4e-3",  # the default of 5e-5 would hardly change the random weights
    "NUM_EPOCHS": "2",
    "EM_F1": "False",
}
NO_KNOBS = dict.fromkeys(TINY, "unset")  # for programs that start runs with their own knobs
# DeepSpeed cannot create this folder, so a run fails if DeepSpeed compiles an extension
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
# These ports are below the kernel's ports for clients; otherwise a connection could take one before torchrun binds it.
# They are also below the ports of job.sh. Pytest's workers and concurrent test sessions use different ranges.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = itertools.count(10000 + 2000 * (WORKER % 4) + os.getpid() % 1000)

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


class RunFiles:
    """Record, model and errors of a run. A subclass sets its `command`, `folder`, `job_id`, exit `code` and `log`."""

    command: str
    folder: Path
    job_id: str
    code: int | None
    log: str

    @property
    def record_path(self) -> Path:
        return self.folder / "results" / f"{self.job_id}.json"

    @property
    def record(self) -> dict:
        """The record that readers see: what the training and its job have written."""
        assert self.record_path.exists(), f"no run record\n{self}"
        return read_record(self.record_path).model_dump(mode="json", by_alias=True, exclude_unset=True)

    @property
    def output(self) -> Path:
        """Folder of the saved model and the checkpoints."""
        return self.folder / "output" / self.job_id

    @property
    def losses(self) -> list[float]:
        """Evaluation loss of each epoch."""
        return [entry["loss"] for entry in self.record["eval"]]

    @property
    def step_losses(self) -> list[float]:
        """Training loss of each step, in all attempts of a run that logs every step."""
        last = max(self.output.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
        history = json.loads((last / "trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry]

    @property
    def rates(self) -> list[float]:
        """Learning rates in the log."""
        return [float(rate) for rate in re.findall(r"'learning_rate': '([^']+)'", self.log)]

    def effective(self, knob: str) -> object:
        return self.record["knobs"][knob]["effective"]

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("error: ")]

    def __str__(self) -> str:
        # Show the text before torchrun's failure report: the report is long and does not name the cause
        own, agent, _ = self.log.partition("torch/distributed/elastic/multiprocessing/api.py")
        tail = "\n".join([*own.splitlines()[-40:], *(["[torchrun's report follows]"] if agent else [])])
        return f"command: {self.command}\nin: {self.folder}\nexit code: {self.code}\nend of the log:\n{tail}"


@dataclass
class Finished(RunFiles):
    """A run that has ended. `code` is the first failed rank's exit code; `out` and `err` hold all ranks' output."""

    command: str
    folder: Path
    job_id: str
    code: int | None
    out: str
    err: str

    @property
    def log(self) -> str:
        return self.out + self.err

    @property
    def error(self) -> str:
        """The run's only error line."""
        return the_error(self.err).removeprefix("error: ")


def until(
    condition: Callable[[], object],
    seconds: float = LIMIT,
    ended: Callable[[], bool] = lambda: False,
    run: object = "",
    pause: float = 0.05,
) -> object:
    """Poll until `condition` is true, and return its value. Fail and show `run` if the run ends first or time is up."""
    deadline = time.monotonic() + seconds
    while True:
        over = ended()  # checked first, because the condition may become true at the end of the run
        if value := condition():
            return value
        assert not over, f"the run ended before the condition was true\n{run}"
        assert time.monotonic() < deadline, f"the condition was not true within {seconds} s\n{run}"
        time.sleep(pause)


def make_workplace(
    folder: Path, *copies: str, links: tuple[str, ...] = ("scripts", "ds_configs", "fsdp_configs", "data")
) -> Path:
    """Create a directory in which the pages' commands work as printed and which receives their results.

    copies: folders of the repository to copy, without results of runs and without your own site and experiments.
    links: files and folders of the repository to link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unwanted = shutil.ignore_patterns("__pycache__", "results", "output", "[cg]pu_memory", "*.out", "own", "site")
    for name in copies:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=unwanted)
    for name in links:
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def add_peft_adapters(base, folder: Path):
    """Return a model with the adapters of a folder in PEFT's format. Without the package, compute what PEFT does.

    base: the model, in fp32. benchmarks/requirements.txt has the version of peft.
    """
    from safetensors.torch import load_file

    if importlib.util.find_spec("peft"):
        from peft import PeftModel

        return PeftModel.from_pretrained(base, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    adapters = load_file(folder / "adapter_model.safetensors")
    for layer in config["target_modules"]:
        a, b = (adapters.pop(f"base_model.model.{layer}.lora_{matrix}.weight") for matrix in "AB")
        base.get_submodule(layer).weight.data += config["lora_alpha"] / config["r"] * b @ a
    assert not adapters
    return base


def inherited() -> dict[str, str]:
    """Return only the caller's basic variables, because its knobs and SLURM_ variables would change the runs."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Act as another user in this process. Tests that do so need the mark `only_root`."""
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise AssertionError


def snapshot(*paths: Path) -> dict:
    """Modification time and content of every file at and below the paths."""
    files = [f for path in paths for f in ([path] if path.is_file() else sorted(path.rglob("*"))) if f.is_file()]
    return {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in files}


def directives(nodes: int, gpus: int) -> str:
    """The first lines of an experiment's script."""
    return f"#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --gpus-per-node={gpus}\n"


def program(path: str) -> ModuleType:
    """Load a program outside of scripts/ as a module that can import the modules in its own folder.

    As when Python starts it, its folder comes first: exercises/ and docs/figures/ both have a collectives.py.
    """
    folder = str((REPOSITORY / path).parent)
    specification = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, folder)
    specification.loader.exec_module(module)
    sys.path.remove(folder)  # the program may have put scripts/ before it
    sys.path.append(folder)  # for imports in functions
    return module


def bash_blocks(page: Path) -> list[tuple[str, str]]:
    """The tag after "bash" (empty or "cluster") and the text of each bash block of a page."""
    return re.findall(r"^ *```bash([^\n]*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def the_error(stderr: str) -> str:
    """Return the only error line of `stderr`, and check its three parts. `stderr` may hold warnings of libraries."""
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr, stderr
    assert re.fullmatch(r"error: \S.*: \S.*; \S.*", lines[0]), lines[0]
    return lines[0]
