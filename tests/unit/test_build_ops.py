"""Compiling DeepSpeed's optimizers: one folder per kind of machine, and one line for what is missing."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

import build_ops


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
    monkeypatch.setattr(build_ops, "refuses_standard", lambda compiler: "")
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


def test_another_node_may_still_build_where_it_was_the_last(tmp_path):
    """Not every file system's locks reach other nodes."""
    with build_ops.sole_builder(tmp_path) as certain:
        assert certain
    with build_ops.sole_builder(tmp_path) as certain:
        assert certain
    (tmp_path / "building").write_text("another-node")
    with build_ops.sole_builder(tmp_path) as certain:
        assert not certain


def test_a_lock_that_is_older_than_any_build_is_removed(tmp_path):
    lock = tmp_path / "lock"
    build_ops.wait_for_end(lock, build_ops.LONGEST_BUILD)
    lock.touch()
    long_ago = time.time() - 2 * build_ops.LONGEST_BUILD
    os.utime(lock, (long_ago, long_ago))
    build_ops.wait_for_end(lock, build_ops.LONGEST_BUILD)
    assert not lock.exists()


def test_a_folder_that_cannot_be_written_is_named(refusal):
    def build() -> None:
        with build_ops.sole_builder(Path("/proc/nowhere")):
            pass

    assert refusal(build, code=3).startswith(
        "error: TORCH_EXTENSIONS_DIR: /proc/nowhere cannot be written (No such file"
    )
