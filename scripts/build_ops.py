"""Compile the optimizers that DeepSpeed builds on first use; does nothing when they are there.

    python scripts/build_ops.py

job.sh runs it before a DeepSpeed training: g++ takes several GB for some minutes, which would stand in the memory
log as the training's peak. A build that fails is one line here, and keeps no other from being built; a training that
needs it ends with the same line.

Two builds of one folder wait for each other by a lock that ends with its process. DeepSpeed's own is a file, which a
build that was killed leaves behind, and for which every later run would wait without an end: the next one to build
removes it, at once on the same node, else when it is older than any build.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program

ROOT = Path.home() / ".cache" / "torch_extensions"
# DeepSpeed's builder -> name of the library, and of its folder
OPTIMIZERS = {"FusedAdamBuilder": "fused_adam", "CPUAdamBuilder": "cpu_adam"}
ON_CPU = {"ShareMemCommBuilder": "deepspeed_shm_comm"}
CPP_STANDARD = "-std=c++20"  # of PyTorch 2.13's headers
NO_NVCC = "not found on PATH or in CUDA_HOME"
LONGEST_BUILD = 600  # seconds


def prepare_deepspeed() -> Path:
    """Set the variables that DeepSpeed reads when it is imported; to be called before that.

    Returns the folder of its compiled extensions, which is also TORCH_EXTENSIONS_DIR afterwards.
    """
    folder = extensions_folder()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    # it compiles with the ninja that pip put beside this python
    beside = os.path.dirname(sys.executable)
    if beside not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ['PATH']}"
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found no GPU
    # ninja compiles anew when a path in a command changes: an environment that is reached through a link (a snapshot's,
    # say) must give the paths of the environment itself
    sys.path[:] = [os.path.realpath(path) if path else path for path in sys.path]
    torch.utils.__path__[:] = map(os.path.realpath, torch.utils.__path__)
    if builder := sys.modules.get("deepspeed.ops.op_builder.builder"):  # transformers has imported it
        builder.__file__ = os.path.realpath(str(builder.__file__))
    return folder


def extensions_folder() -> Path:
    """A folder for this kind of machine and this environment, below TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions.

    The library of FusedAdam has one name for CPU and GPU, for every architecture and version: in one folder two kinds
    of machine would compile over each other, under the feet of running jobs.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ROOT)
    versions = f"torch{torch.__version__}-deepspeed{version('deepspeed')}"
    # -march=native: code for this CPU alone
    details = [cpu_model(), sys.implementation.cache_tag, os.path.realpath(sys.prefix)]
    name = f"{accelerator()}-{versions}-{zlib.crc32(repr(details).encode()):08x}"
    return root if root.name == name else root / name  # a parent process may have set it


def accelerator() -> str:
    """``cpu``, or the compute capabilities of the visible GPUs: ``sm_70``."""
    if not torch.cuda.is_available():
        return "cpu"
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return "-".join(f"sm_{major}{minor}" for major, minor in sorted(capabilities))


def cpu_model() -> list[str]:
    """Name and instruction sets of the first CPU, as Linux gives them."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    first = text.split("\n\n")[0]
    return re.findall(r"^(?:model name|flags|Features|CPU part)\s*:\s*(.*)$", first, re.MULTILINE)


def problem(builder: str) -> WorkshopError | None:
    """What keeps a builder from compiling here (exit code 3); None when nothing does.

    Compiler and ninja are needed each time: PyTorch asks them whether a library is up to date.
    """
    compiler = cpp_compiler()
    absent = "not on PATH, and DeepSpeed compiles its optimizers with it"
    if not shutil.which(shlex.split(compiler)[0]):
        return WorkshopError(compiler, absent, "load it in site_setup (module load gcc)", ENVIRONMENT)
    if not library(builder).is_file() and (said := refuses_standard(compiler)):
        what = f"does not know {CPP_STANDARD}, which PyTorch's headers need ({said})"
        return WorkshopError(compiler, what, "load GCC 11 or newer in site_setup (module load gcc)", ENVIRONMENT)
    if not shutil.which("ninja"):
        return WorkshopError("ninja", absent, "pip install ninja", ENVIRONMENT)
    if builder == "FusedAdamBuilder" and torch.cuda.is_available() and not nvcc():
        what = f"{NO_NVCC}, and FusedAdam is compiled with it"
        without = '"torch_adam": true in optimizer.params, or optimizer offload, do without'
        return WorkshopError("nvcc", what, f"load it in site_setup (module load cuda); {without}", ENVIRONMENT)
    return None


def cpp_compiler() -> str:
    """PyTorch's own choice; it may be several words, such as ``ccache g++``."""
    return os.environ.get("CXX") or "c++"


def refuses_standard(compiler: str) -> str:
    """What the compiler says to a file of the C++ standard that is needed; empty when it makes an object of it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.cpp"
        source.write_text("#include <version>\n")  # a header of that standard
        words = [*shlex.split(compiler), CPP_STANDARD, "-c", source.name, "-o", "empty.o"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    said = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else (said or [f"exit code {done.returncode}"])[0]


def library(builder: str) -> Path:
    name = (OPTIMIZERS | ON_CPU)[builder]
    return extensions_folder() / name / f"{name}.so"


def nvcc() -> str | None:
    """The nvcc that PyTorch compiles with."""
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which(f"{CUDA_HOME}/bin/nvcc") if CUDA_HOME else None


def needed_builder(config: dict) -> str | None:
    """DeepSpeed's builder of the optimizer that a config file asks for, None for one of PyTorch's own."""
    optimizer = config.get("optimizer", {})
    if not optimizer or optimizer.get("params", {}).get("torch_adam"):
        return None
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return "CPUAdamBuilder" if offload.get("device", "none") != "none" else "FusedAdamBuilder"


def check_compiler(config: dict) -> None:
    """Compile what a DeepSpeed config needs, and what is not there yet.

    Raises WorkshopError (exit code 3) where it cannot be compiled.
    """
    builder = needed_builder(config)
    if builder and (found := problem(builder)):
        raise found
    needed = [builder] if builder else []
    if not torch.cuda.is_available():
        needed += ON_CPU
    for error in compile_missing(needed):
        raise error


def compile_missing(builders: Iterable[str]) -> Iterator[WorkshopError]:
    """Compile the libraries that are not there, one process at a time; of each that fails the error.

    Raises WorkshopError (exit code 3) where there is no place for them.
    """
    folder = extensions_folder()
    for lock in folder.glob("*/lock"):
        if (lock.parent / f"{lock.parent.name}.so").is_file():  # another run looks whether that is up to date
            wait_for_end(lock, LONGEST_BUILD)
    if all(library(builder).is_file() for builder in builders):
        return  # before DeepSpeed is imported, which takes seconds
    with sole_builder(folder) as certain:
        missing = [builder for builder in builders if not library(builder).is_file()]
        if not missing:
            return
        names = ", ".join(library(builder).stem for builder in missing)
        print(f"compiling {names} into {folder}: minutes, once", flush=True)
        from deepspeed.accelerator import get_accelerator

        for builder in missing:
            wait_for_end(library(builder).parent / "lock", 0 if certain else LONGEST_BUILD)
            if found := problem(builder):
                yield found
                continue
            try:
                get_accelerator().create_op_builder(builder).load(verbose=False)
            except Exception as error:  # whatever compiler and linker end with
                way_out = f"try it alone: {shlex.quote(sys.executable)} {shlex.quote(__file__)}"
                what = f"cannot be compiled ({first_error(str(error))})"
                yield WorkshopError(builder, what, way_out, ENVIRONMENT)


def wait_for_end(lock: Path, longest: float) -> None:
    """Until DeepSpeed's lock is gone. One that is older, in seconds, is of a killed process, and removed."""
    with contextlib.suppress(FileNotFoundError):
        while time.time() - lock.stat().st_mtime < longest:
            time.sleep(1)
        lock.unlink()


@contextlib.contextmanager
def sole_builder(folder: Path) -> Iterator[bool]:
    """Wait until no other process compiles into the folder.

    Yields whether it is certain that none does: not where another node was the last, as the locks of some file systems
    do not reach it, nor where there are no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "building").open("a+")
    except OSError as error:
        what = f"{folder} cannot be written ({error.strerror})"
        raise WorkshopError("TORCH_EXTENSIONS_DIR", what, "give a folder of your own", ENVIRONMENT) from error
    with lock:
        certain = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if rank_of_job() == "0":
                print(f"waiting for another process that compiles into {folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            certain = False
        lock.seek(0)
        last = lock.read()
        lock.truncate(0)
        lock.write(socket.gethostname())
        lock.flush()
        yield certain and last in ("", socket.gethostname())


def rank_of_job() -> str:
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"


def main() -> None:
    OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    prepare_deepspeed()
    builders = OPTIMIZERS if torch.cuda.is_available() else OPTIMIZERS | ON_CPU
    for error in compile_missing(builders):
        print(f"warning: {error}", file=sys.stderr, flush=True)


def first_error(said: str) -> str:
    """The compiler's first error line, else the first line."""
    lines = said.splitlines() or ["no message"]
    return next((line for line in lines if "error:" in line), lines[0]).strip()


if __name__ == "__main__":
    run_program(main)
