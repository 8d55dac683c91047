"""Compile the optimizers that DeepSpeed builds on first use; does nothing when they are there.

    python scripts/build_ops.py

job.sh runs it before a DeepSpeed training: g++ takes several GB for some minutes, which would stand in the memory
log as the training's peak. A build that fails is one line here, and keeps no other from being built; a training that
needs it ends with the same line.

Who compiles holds a lock that ends with its process. DeepSpeed's own is a file, which a build that was killed leaves
behind, and for which every later run would wait without an end: whoever holds ours removes it. A training loads what
is there by itself: DeepSpeed would take its lock again, and ask the compiler whether there is something to do.
"""

import argparse
import ctypes
import fcntl
import importlib.machinery
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path
from typing import IO

from errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program

ROOT = Path.home() / ".cache" / "torch_extensions"
# DeepSpeed's builder -> name of the library, and of its folder
OPTIMIZERS = {"FusedAdamBuilder": "fused_adam", "CPUAdamBuilder": "cpu_adam"}
ON_CPU = {"ShareMemCommBuilder": "deepspeed_shm_comm"}
CPP_STANDARD = "-std=c++20"  # of PyTorch 2.13's headers
# of CUDA's driver API, CUdevice_attribute
COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76


# 1. Where the libraries are. PyTorch is not imported for this: that takes seconds, before each run


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
    if not compute_capabilities():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found no GPU
    return folder


def extensions_folder() -> Path:
    """A folder for this kind of machine and this environment, below TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions.

    The library of FusedAdam has one name for CPU and GPU, for every architecture and version: in one folder two kinds
    of machine would compile over each other, under the feet of running jobs.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ROOT)
    kind = "-".join(compute_capabilities()) or "cpu"
    torch_version, _ = torch_build()
    # -march=native: code for this CPU alone
    details = [cpu_model(), sys.implementation.cache_tag, os.path.realpath(sys.prefix)]
    checksum = zlib.crc32(repr(details).encode())
    name = f"{kind}-torch{torch_version}-deepspeed{version('deepspeed')}-{checksum:08x}"
    return root if root.name == name else root / name  # a parent process may have set it


def torch_build() -> tuple[str, str | None]:
    """Version of PyTorch, and of the CUDA that it is built for: ``2.13.0+cu130``, ``13.0``."""
    # not the package's version, which on PyPI has no +cu130
    values = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
    return values["__version__"], values["cuda"]


def compute_capabilities() -> list[str]:
    """The kinds of GPUs that PyTorch can use, as ``sm_70``, as CUDA's driver tells them; empty where there is none."""
    _, cuda = torch_build()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []

    def ask(function: Callable, *arguments: int) -> int:
        answer = ctypes.c_int()
        function(ctypes.byref(answer), *arguments)
        return answer.value

    newest_cuda = ask(driver.cuDriverGetVersion) // 1000  # 13000 is CUDA 13.0
    # it fails where CUDA_VISIBLE_DEVICES hides them all
    if cuda is None or newest_cuda < int(cuda.split(".")[0]) or driver.cuInit(0) != 0:
        return []
    found = set()
    for index in range(ask(driver.cuDeviceGetCount)):
        device = ask(driver.cuDeviceGet, index)
        major = ask(driver.cuDeviceGetAttribute, COMPUTE_CAPABILITY_MAJOR, device)
        minor = ask(driver.cuDeviceGetAttribute, COMPUTE_CAPABILITY_MINOR, device)
        found.add((major, minor))
    return [f"sm_{major}{minor}" for major, minor in sorted(found)]


def cpu_model() -> list[str]:
    """Name and instruction sets of the first CPU, as Linux gives them."""
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text().split("\n\n")[0] if cpuinfo.exists() else ""
    return re.findall(r"^(?:model name|flags|Features|CPU part)\s*:\s*(.*)$", first, re.MULTILINE)


def library(builder: str) -> Path:
    name = (OPTIMIZERS | ON_CPU)[builder]
    return extensions_folder() / name / f"{name}.so"


def is_built(builder: str) -> bool:
    """Whether its library is there, and nobody is, or was killed, writing it."""
    path = library(builder)
    return path.is_file() and not (path.parent / "lock").exists()


# 2. What compiles them


def problem(builder: str) -> WorkshopError | None:
    """What keeps a builder from compiling here (exit code 3); None when nothing does."""
    compiler = os.environ.get("CXX") or "c++"  # PyTorch's own choice; it may be several words, such as ccache g++
    way_out = "load GCC 10 or newer in site_setup (module load gcc)"
    if not shutil.which(shlex.split(compiler)[0]):
        return WorkshopError(
            compiler, "not on PATH, and DeepSpeed compiles its optimizers with it", way_out, ENVIRONMENT
        )
    if said := refuses_standard(compiler):
        what = f"does not know {CPP_STANDARD}, which PyTorch's headers need ({said})"
        return WorkshopError(compiler, what, way_out, ENVIRONMENT)
    if builder == "FusedAdamBuilder" and compute_capabilities() and not nvcc():
        what = "not found on PATH or in CUDA_HOME, and FusedAdam is compiled with it"
        without = '"torch_adam": true in optimizer.params, or optimizer offload, do without'
        return WorkshopError("nvcc", what, f"load it in site_setup (module load cuda); {without}", ENVIRONMENT)
    return None


def refuses_standard(compiler: str) -> str:
    """What the compiler says to a header of the C++ standard that is needed; empty when it takes it."""
    words = [*shlex.split(compiler), CPP_STANDARD, "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(words, input="#include <version>\n", capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return done.stderr.partition("\n")[0] or f"exit code {done.returncode}"


def nvcc() -> str | None:
    """The nvcc that PyTorch compiles with."""
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which(f"{CUDA_HOME}/bin/nvcc") if CUDA_HOME else None


# 3. Building and loading


def needed_builder(config: dict) -> str | None:
    """DeepSpeed's builder of the optimizer that a config file asks for, None for one of PyTorch's own."""
    optimizer = config.get("optimizer", {})
    if not optimizer or optimizer.get("params", {}).get("torch_adam"):
        return None
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return "CPUAdamBuilder" if offload.get("device", "none") != "none" else "FusedAdamBuilder"


def check_compiler(config: dict) -> None:
    """Compile what a DeepSpeed config needs and what is not there yet, and load it.

    Raises WorkshopError (exit code 3) where it cannot be compiled.
    """
    builder = needed_builder(config)
    needed = [builder] if builder else []
    if not compute_capabilities():
        needed += ON_CPU
    for each in needed:
        build(each)
        load(library(each))


def build(builder: str) -> None:
    """Compile a library unless it is there. Raises WorkshopError (exit code 3) where it cannot be compiled."""
    if is_built(builder):
        return
    path = library(builder)
    with sole_builder(path.parent):
        if is_built(builder):
            return
        print(f"compiling {path.stem} into {path.parent}: minutes, once", flush=True)
        if found := problem(builder):
            raise found
        from deepspeed.accelerator import get_accelerator

        try:
            get_accelerator().create_op_builder(builder).load(verbose=False)
        except Exception as error:  # whatever compiler and linker end with
            what = f"cannot be compiled ({first_error(str(error))})"
            way_out = f"try it alone: {shlex.quote(sys.executable)} {shlex.quote(__file__)}"
            raise WorkshopError(builder, what, way_out, ENVIRONMENT) from error


def sole_builder(folder: Path) -> IO[str]:
    """Wait until no other process compiles into the folder; none will before the file that this returns is closed.

    Raises WorkshopError (exit code 3) for a folder that cannot be written, or whose file system has no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "building").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that compiles into {folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        what = f"{folder} cannot be written, or not be locked ({error.strerror})"
        raise WorkshopError("TORCH_EXTENSIONS_DIR", what, "give another folder of your own", ENVIRONMENT) from error
    (folder / "lock").unlink(missing_ok=True)  # of a build of DeepSpeed that was killed
    return lock


def first_error(said: str) -> str:
    """The compiler's first error line, else the first line."""
    lines = said.splitlines() or ["no message"]
    return next((line for line in lines if "error:" in line), lines[0]).strip()


def load(path: Path) -> None:
    """Import a compiled library, and let DeepSpeed find it among those that it has loaded."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    name = path.stem
    if name not in OpBuilder._loaded_ops:
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader, origin=str(path)))
        loader.exec_module(module)
        OpBuilder._loaded_ops[name] = module


def main() -> None:
    OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    prepare_deepspeed()
    for builder in OPTIMIZERS if compute_capabilities() else OPTIMIZERS | ON_CPU:
        try:
            build(builder)
        except WorkshopError as error:
            print(f"warning: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)
