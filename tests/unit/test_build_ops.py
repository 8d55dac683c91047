"""Compiling DeepSpeed's optimizers: one folder per kind of machine, and one line for what is missing."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

import build_ops


def program(folder: Path, name: str, lines: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
    (folder / name).chmod(0o755)


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


@pytest.mark.parametrize(
    ("config", "builder"),
    [
        ({}, None),
        ({"optimizer": {"type": "AdamW"}}, "FusedAdamBuilder"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, None),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
         "CPUAdamBuilder"),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": None}}, "FusedAdamBuilder"),
    ],
)  # fmt: skip
def test_the_builder_that_a_config_needs(config, builder):
    assert build_ops.needed_builder(config) == builder


def test_a_training_that_cannot_compile_its_optimizer_ends_with_3(command, sample, tmp_path):
    program(tmp_path / "old", "c++", "exit 1")
    words = ("--model_name", "tiny-bloom", "--dataset", sample, "--deepspeed")
    path = f"{tmp_path / 'old'}:{os.environ['PATH']}"
    config = sample.parent.parent / "ds_configs" / "zero2.json"
    done = command("train.py", *words, config, PATH=path, TRAIN_SIZE="8", EVAL_SIZE="4")
    assert done.code == 3
    assert done.error_lines == [
        "error: c++: does not know -std=c++20, which PyTorch's headers need (exit code 1); "
        "load GCC 11 or newer in site_setup (module load gcc)"
    ]
    assert not list(done.folder.iterdir())


# Folders


@pytest.fixture
def described(monkeypatch):
    """Sets what a machine says of itself."""

    def describe(capability: tuple | None = None, cpu: str = "EPYC", torch_version: str = "2.13.0+cpu") -> Path:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability is not None))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(build_ops, "cpu_model", lambda: [cpu, "avx2"])
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        return build_ops.extensions_folder()

    return describe


def test_each_kind_of_machine_has_a_folder_of_its_own(described, monkeypatch):
    folders = [
        described(),
        described(capability=(7, 0), torch_version="2.13.0+cu126"),
        described(capability=(9, 0), torch_version="2.13.0+cu126"),
        described(capability=(9, 0), torch_version="2.13.0+cu130"),
        described(cpu="Xeon"),
    ]
    monkeypatch.setattr(build_ops, "version", lambda package: "0.0.1")
    folders.append(described())
    assert len(set(folders)) == 6
    assert folders[1].name.startswith("sm_70-torch2.13.0+cu126-deepspeed")
    assert {folder.parent for folder in folders} == {build_ops.ROOT}


def test_an_environment_has_the_same_folder_through_a_link(described, monkeypatch, tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "snapshot").symlink_to(tmp_path / "env")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    own = described()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "snapshot"))
    assert described() == own


def test_the_folder_of_the_site_holds_one_for_each_kind_as_well(described, monkeypatch, tmp_path):
    name = described().name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert build_ops.prepare_deepspeed() == tmp_path / name
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / name)
    assert build_ops.extensions_folder() == tmp_path / name, "of a child process"


# build_ops.py


class Builders:
    """Stands in for DeepSpeed's accelerator; FusedAdam fails as without nvcc."""

    def __init__(self):
        self.loaded = []

    def create_op_builder(self, name: str):
        return self if name != "FusedAdamBuilder" else FailingBuilder()

    def load(self, verbose: bool):
        self.loaded.append(verbose)


class FailingBuilder:
    def load(self, verbose: bool):
        raise RuntimeError("Error building extension 'fused_adam': [1/2]\nx.cpp:1: error: no such thing\nmore")


def test_one_failing_build_keeps_no_other_from_being_built(monkeypatch, tmp_path, capsys):
    import deepspeed.accelerator

    builders = Builders()
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: builders)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["build_ops.py"])
    build_ops.main()
    assert builders.loaded == [False, False]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: FusedAdamBuilder: cannot be compiled (x.cpp:1: error: no such thing); ")


def test_what_is_there_is_not_compiled_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in (build_ops.OPTIMIZERS | build_ops.ON_CPU).values():
        library = build_ops.extensions_folder() / name / f"{name}.so"
        library.parent.mkdir(parents=True)
        library.touch()
    monkeypatch.setattr(sys, "argv", ["build_ops.py"])
    build_ops.main()
    assert capsys.readouterr() == ("", "")
