"""Compiling DeepSpeed's optimizers: which one a config needs, and one folder per kind of machine."""

import os
from pathlib import Path

import pytest

import build_ops


@pytest.mark.parametrize(
    ("config", "builder"),
    [
        ({}, None),
        ({"optimizer": {"type": "AdamW"}}, "FusedAdamBuilder"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, None),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
         "CPUAdamBuilder"),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": {"device": "none"}}},
         "FusedAdamBuilder"),
    ],
)  # fmt: skip
def test_the_builder_that_a_config_needs(config, builder):
    assert build_ops.needed_builder(config) == builder


@pytest.fixture
def folder_of(monkeypatch):
    """The folder that a machine which says this of itself compiles into."""

    def folder(gpus: list[str], cpu: str = "EPYC", version: str = "2.13.0+cu126") -> Path:
        monkeypatch.setattr(build_ops, "compute_capabilities", lambda: gpus)
        monkeypatch.setattr(build_ops, "torch_build", lambda: (version, "12.6"))
        monkeypatch.setattr(build_ops, "cpu_model", lambda: [cpu, "avx2"])
        return build_ops.extensions_folder()

    return folder


def test_each_kind_of_machine_has_a_folder_of_its_own(folder_of, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    machines = [([],), (["sm_70"],), (["sm_70", "sm_90"],), (["sm_70"], "Xeon"), (["sm_70"], "EPYC", "2.13.0+cu130")]
    folders = [folder_of(*machine) for machine in machines]
    assert len(set(folders)) == len(machines)
    assert folders[0].name.startswith("cpu-torch2.13.0+cu126-deepspeed")
    assert folders[2].name.startswith("sm_70-sm_90-torch2.13.0+cu126-deepspeed")
    assert {folder.parent for folder in folders} == {build_ops.ROOT}


def test_the_folder_of_the_site_holds_one_for_each_kind_as_well(folder_of, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    expected = folder_of([])
    assert expected.parent == tmp_path
    assert build_ops.prepare_deepspeed() == expected
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(expected)
    assert build_ops.extensions_folder() == expected, "of a child process"


def test_a_folder_that_cannot_be_written_is_named(refusal):
    line = refusal(build_ops.sole_builder, Path("/proc/nowhere"), code=3)
    assert line.startswith("error: TORCH_EXTENSIONS_DIR: /proc/nowhere cannot be written, or not be locked (No such")
