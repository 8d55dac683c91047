"""What DeepSpeed's optimizers are compiled with: one line for what is missing, with stand-ins for c++ and ninja."""

import os
import time
from pathlib import Path

import pytest
import torch

import build_ops
from shell import program


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
    source, what, way_out = build_ops.problem("CPUAdamBuilder")
    assert source == "c++"
    assert what.startswith("does not know -std=c++20")
    assert "unrecognized command line option" in what
    assert way_out == "load GCC 11 or newer in site_setup (module load gcc)"


def test_a_library_that_is_there_needs_no_new_compiler(tools, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    program(tools, "c++", "exit 1")
    assert build_ops.problem("CPUAdamBuilder")[0] == "c++"
    built = build_ops.library("CPUAdamBuilder")
    built.parent.mkdir(parents=True)
    built.touch()
    assert build_ops.problem("CPUAdamBuilder") is None


def test_the_lock_of_a_killed_build_ends_a_run_that_would_wait_for_ever(tools, monkeypatch, tmp_path, refusal):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = build_ops.extensions_folder() / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    build_ops.check_compiler({"optimizer": {"type": "AdamW"}})  # it may be another job's
    long_ago = time.time() - 2 * build_ops.OLD_LOCK
    os.utime(lock, (long_ago, long_ago))
    line = refusal(build_ops.check_compiler, {"optimizer": {"type": "AdamW"}}, code=3)
    assert line.endswith(f"; rm '{lock}'")


def test_the_compiler_of_cxx_is_the_one_that_counts(tools, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_ops.problem("CPUAdamBuilder")[0] == "no-such-compiler"


def test_ninja_is_missing(tools):
    (tools / "ninja").unlink()
    assert build_ops.problem("CPUAdamBuilder")[0] == "ninja"


def test_nvcc_is_needed_for_fused_adam_on_a_gpu_alone(tools, monkeypatch):
    monkeypatch.setattr(build_ops, "nvcc", lambda: None)
    assert build_ops.problem("FusedAdamBuilder") is None, "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert build_ops.problem("CPUAdamBuilder") is None
    source, what, way_out = build_ops.problem("FusedAdamBuilder")
    assert (source, what) == ("nvcc", "not found on PATH or in CUDA_HOME, and FusedAdam is compiled with it")
    assert "module load cuda" in way_out


def test_a_real_compiler_takes_the_standard():
    assert build_ops.refuses_standard("c++") == ""
