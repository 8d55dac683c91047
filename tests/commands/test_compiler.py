"""What DeepSpeed's optimizers are compiled with: one line for what is missing, with stand-ins for c++ and ninja."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import build_ops
from shell import program, until


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """A folder that is all of PATH, with a compiler and ninja."""
    folder = tmp_path / "tools"
    program(folder, "c++", "exit 0")
    program(folder, "ninja", "exit 0")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def test_nothing_is_missing(tools):
    assert build_ops.problem("FusedAdamBuilder") is build_ops.problem("CPUAdamBuilder") is None


def test_a_compiler_of_rocky_8_does_not_know_the_standard(tools):
    program(tools, "c++", """echo "c++: error: unrecognized command line option '-std=c++20'" >&2; exit 1""")
    found = build_ops.problem("CPUAdamBuilder")
    assert (found.source, found.code) == ("c++", 3)
    assert found.what.startswith("does not know -std=c++20")
    assert "unrecognized command line option" in found.what
    assert found.way_out == "load GCC 11 or newer in site_setup (module load gcc)"


def test_a_library_that_is_there_needs_no_new_compiler(tools, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    program(tools, "c++", "exit 1")
    assert build_ops.problem("CPUAdamBuilder").source == "c++"
    built = build_ops.library("CPUAdamBuilder")
    built.parent.mkdir(parents=True)
    built.touch()
    assert build_ops.problem("CPUAdamBuilder") is None


BUILD = [sys.executable, build_ops.__file__]


@pytest.fixture
def building(tmp_path) -> dict[str, str]:
    """Environment of a build of its own, with a compiler that takes its time; `started` is there once it was called."""
    lines = f"""case "$*" in *empty.cpp*) ;; *" -c "*) touch {tmp_path}/started; exec sleep 600 ;; esac"""
    compiler = program(tmp_path / "compiler", "c++", lines)
    own = {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CUDA_VISIBLE_DEVICES": ""}
    return dict(os.environ) | own


def test_a_killed_build_keeps_nobody_waiting(building, tmp_path):
    build = subprocess.Popen(BUILD, env=building, stdout=subprocess.PIPE, start_new_session=True)
    assert until((tmp_path / "started").exists, 120)
    os.killpg(build.pid, signal.SIGKILL)
    build.communicate()
    (left,) = (tmp_path / "extensions").glob("*/*/lock")
    lines = """case "$*" in *empty.cpp*) ;; *) echo "x: error: no" >&2; exit 1 ;; esac"""
    program(tmp_path / "compiler", "c++", lines)
    next_one = subprocess.run(BUILD, env=building, capture_output=True, text=True, timeout=300, check=True)
    assert next_one.stderr.count("cannot be compiled") == 3, next_one.stderr
    assert not left.exists()


def test_two_builds_of_one_folder_wait_for_each_other(building, tmp_path):
    build = subprocess.Popen(BUILD, env=building, stdout=subprocess.PIPE, start_new_session=True)
    assert until((tmp_path / "started").exists, 120)
    second = subprocess.Popen(BUILD, env=building, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert second.stdout.readline().startswith("waiting for another process that compiles into ")
    os.killpg(build.pid, signal.SIGKILL)
    build.communicate()
    assert second.stdout.readline().startswith("compiling fused_adam, cpu_adam, deepspeed_shm_comm into ")
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()


def test_the_compiler_of_cxx_is_the_one_that_counts(tools, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_ops.problem("CPUAdamBuilder").source == "no-such-compiler"


def test_ninja_is_missing(tools):
    (tools / "ninja").unlink()
    assert build_ops.problem("CPUAdamBuilder").source == "ninja"


def test_nvcc_is_needed_for_fused_adam_on_a_gpu_alone(tools, monkeypatch):
    monkeypatch.setattr(build_ops, "nvcc", lambda: None)
    assert build_ops.problem("FusedAdamBuilder") is None, "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert build_ops.problem("CPUAdamBuilder") is None
    found = build_ops.problem("FusedAdamBuilder")
    assert found.source == "nvcc"
    assert found.what == "not found on PATH or in CUDA_HOME, and FusedAdam is compiled with it"
    assert "module load cuda" in found.way_out


def test_a_real_compiler_takes_the_standard():
    assert build_ops.refuses_standard("c++") == ""
