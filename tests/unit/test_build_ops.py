"""Compiling DeepSpeed's optimizers: which one a config needs, and one folder per kind of machine."""

import os
import sys
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


def test_the_build_of_torch_is_read_without_importing_it():
    assert build_ops.torch_build() == (torch.__version__, torch.version.cuda)


@pytest.fixture
def described(monkeypatch):
    """Sets what a machine says of itself."""

    def describe(gpus: list[str], cpu: str = "EPYC", version: str = "2.13.0+cu126") -> Path:
        monkeypatch.setattr(build_ops, "compute_capabilities", lambda: gpus)
        monkeypatch.setattr(build_ops, "torch_build", lambda: (version, "12.6"))
        monkeypatch.setattr(build_ops, "cpu_model", lambda: [cpu, "avx2"])
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        return build_ops.extensions_folder()

    return describe


def test_each_kind_of_machine_has_a_folder_of_its_own(described, monkeypatch):
    machines = [[], ["sm_70"], ["sm_90"], ["sm_70", "sm_90"]]
    folders = [described(gpus) for gpus in machines]
    folders += [described(["sm_70"], version="2.13.0+cu130"), described(["sm_70"], cpu="Xeon")]
    monkeypatch.setattr(build_ops, "version", lambda package: "0.0.1")
    folders.append(described(["sm_70"]))
    assert len(set(folders)) == 7
    assert folders[0].name.startswith("cpu-torch2.13.0+cu126-deepspeed")
    assert folders[3].name.startswith("sm_70-sm_90-torch2.13.0+cu126-deepspeed")
    assert {folder.parent for folder in folders} == {build_ops.ROOT}


def test_an_environment_has_the_same_folder_through_a_link(described, monkeypatch, tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "snapshot").symlink_to(tmp_path / "env")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    own = described([])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "snapshot"))
    assert described([]) == own


def test_the_folder_of_the_site_holds_one_for_each_kind_as_well(described, monkeypatch, tmp_path):
    name = described([]).name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert build_ops.prepare_deepspeed() == tmp_path / name
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / name)
    assert build_ops.extensions_folder() == tmp_path / name, "of a child process"


def test_a_folder_that_cannot_be_written_is_named(refusal):
    line = refusal(build_ops.sole_builder, Path("/proc/nowhere"), code=3)
    assert line.startswith(
        "error: TORCH_EXTENSIONS_DIR: /proc/nowhere cannot be written, or not be locked (No such file"
    )
