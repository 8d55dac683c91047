"""What DeepSpeed's optimizers are compiled with, and who compiles them: stand-ins for c++ and for CUDA's driver."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import build_ops
from shell import program, until

BUILD = [sys.executable, build_ops.__file__]


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Path:
    """A folder that is all of PATH, with a compiler that takes everything."""
    program(tmp_path / "tools", "c++", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "tools"


def test_a_compiler_that_is_missing_or_does_not_know_the_standard(compiler, monkeypatch):
    assert build_ops.problem("CPUAdamBuilder") is None
    # GCC 8 of Rocky Linux 8
    program(compiler, "c++", """echo "c++: error: unrecognized command line option '-std=c++20'" >&2; exit 1""")
    found = build_ops.problem("CPUAdamBuilder")
    assert found.code == 3
    assert str(found).startswith(
        "c++: does not know -std=c++20, which PyTorch's headers need (c++: error: unrecognized "
    )
    assert str(found).endswith("; load GCC 10 or newer in site_setup (module load gcc)")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert str(build_ops.problem("CPUAdamBuilder")).startswith("no-such-compiler: not on PATH")


def test_nvcc_is_needed_for_fused_adam_on_a_gpu_alone(compiler, monkeypatch):
    monkeypatch.setattr(build_ops, "nvcc", lambda: None)
    monkeypatch.setattr(build_ops, "compute_capabilities", list)
    assert build_ops.problem("FusedAdamBuilder") is None
    monkeypatch.setattr(build_ops, "compute_capabilities", lambda: ["sm_70"])
    assert build_ops.problem("CPUAdamBuilder") is None
    found = build_ops.problem("FusedAdamBuilder")
    assert str(found).startswith("nvcc: not found on PATH or in CUDA_HOME, and FusedAdam is compiled with it; ")
    assert "module load cuda" in found.way_out


# The driver of two GPUs, of which CUDA_VISIBLE_DEVICES= hides all; its functions are declared as in cuda.h
DRIVER = """
#include <stdlib.h>
int cuDriverGetVersion(int *version) { *version = atoi(getenv("DRIVER")); return 0; }
int cuInit(unsigned flags) { char *seen = getenv("CUDA_VISIBLE_DEVICES"); return seen && !*seen ? 100 : 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 7 + device : attribute == 76 ? 5 * device : -1;
  return 0;
}
"""
ASK = "import build_ops; build_ops.torch_build = lambda: ('', {cuda!r}); print(*build_ops.compute_capabilities())"


@pytest.mark.parametrize(
    ("driver", "cuda", "variables", "kinds"),
    [
        (12020, "12.6", {}, "sm_70 sm_85"),  # a newer minor version runs
        (12080, "13.0", {}, ""),  # of a newer major one PyTorch says that the driver is too old
        (13000, "13.0", {"CUDA_VISIBLE_DEVICES": ""}, ""),
    ],
)
def test_gpus_as_the_driver_tells_them(tmp_path, driver, cuda, variables, kinds):
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"], cwd=tmp_path, check=True)
    own = {"LD_LIBRARY_PATH": str(tmp_path), "DRIVER": str(driver), "PYTHONPATH": str(Path(BUILD[1]).parent)}
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    words = [sys.executable, "-c", ASK.format(cuda=cuda)]
    done = subprocess.run(words, env=kept | own | variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == kinds


# build_ops.py


@pytest.fixture
def building(tmp_path) -> dict[str, str]:
    """Environment of a build of its own, with a compiler that takes its time; `started` is there once it was called."""
    lines = f"""case "$*" in *" -c "*) touch {tmp_path}/started; exec sleep 600 ;; esac"""
    slow = program(tmp_path / "compiler", "c++", lines)
    own = {"CXX": str(slow), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CUDA_VISIBLE_DEVICES": ""}
    return dict(os.environ) | own


def start(environment: dict) -> subprocess.Popen:
    return subprocess.Popen(BUILD, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def kill(build: subprocess.Popen) -> None:
    os.killpg(build.pid, signal.SIGKILL)
    build.communicate()


def test_a_killed_build_keeps_nobody_waiting(building, tmp_path):
    """And each library is tried, although the first cannot be compiled."""
    build = start(building)
    until((tmp_path / "started").exists, 120)
    kill(build)
    (left,) = (tmp_path / "extensions").glob("*/*/lock")
    program(tmp_path / "compiler", "c++", """case "$*" in *" -c "*) echo "x: error: no" >&2; exit 1 ;; esac""")
    next_one = subprocess.run(BUILD, env=building, capture_output=True, text=True, timeout=300, check=True)
    lines = next_one.stderr.splitlines()
    failed = [line for line in lines if line.endswith(f"try it alone: {sys.executable} {build_ops.__file__}")]
    assert [line.split(":")[1] for line in failed] == [
        " FusedAdamBuilder", " CPUAdamBuilder", " ShareMemCommBuilder"]  # fmt: skip
    assert all(line.startswith("warning: ") and "(x: error: no)" in line for line in failed), lines
    assert not left.exists()


def test_two_builds_of_one_folder_wait_for_each_other(building, tmp_path):
    build = start(building)
    until((tmp_path / "started").exists, 120)
    second = start(building)
    assert second.stdout.readline().startswith("waiting for another process that compiles into ")
    kill(build)
    assert second.stdout.readline().startswith("compiling fused_adam into ")
    kill(second)


def test_where_all_is_built_pytorch_is_not_even_imported(monkeypatch, building):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", building["TORCH_EXTENSIONS_DIR"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for builder in build_ops.OPTIMIZERS | build_ops.ON_CPU:
        library = build_ops.library(builder)
        library.parent.mkdir(parents=True)
        library.touch()
    words = [sys.executable, "-X", "importtime", build_ops.__file__]
    done = subprocess.run(words, env=building, capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not {"torch", "deepspeed"} & imported
    assert done.stdout == ""
