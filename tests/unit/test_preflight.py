"""Tests of the comparisons and output lines of preflight.py, without a GPU, a cluster or a training run."""

import importlib.metadata
import re

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from checks import jobs as preflight_jobs
from checks import machine as preflight_machine
from helpers import REPOSITORY
from shared.paths import CONSTRAINTS

TORCH_2_13_CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((9, 0), TORCH_2_13_CU130, True),
        ((8, 9), TORCH_2_13_CU130, True),  # 8.9 runs code for sm_86
        ((7, 0), TORCH_2_13_CU130, False),  # V100
        ((10, 3), ["sm_90", "compute_90"], True),  # the driver compiles the PTX of compute_90
        ((10, 3), ["sm_90"], False),
    ],
)
def test_a_gpu_runs_builds_for_its_architecture(capability, arch_list, runs):
    assert preflight_machine.supports_gpu(arch_list, capability) is runs


# Output of nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
NVIDIA_SMI = "Tesla V100-SXM2-32GB, 470.82.01\nTesla V100-SXM2-32GB, 470.82.01"


def test_a_machine_where_pytorch_finds_no_usable_gpu(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: 1
    )  # a driver that is too old lists its GPU, but PyTorch cannot use it
    monkeypatch.setattr(preflight_machine, "run_command", lambda *words: (False, "nvidia-smi: no such file"))
    ((state, *_, remedy),) = preflight_machine.gpus()
    expected = ("skip", "check them in a job: srun --gpus-per-node=1 python scripts/preflight.py")
    assert (state, remedy) == expected, "a login node"
    monkeypatch.setattr(preflight_machine, "run_command", lambda *words: (True, NVIDIA_SMI))
    ((state, _, found, remedy),) = preflight_machine.gpus()
    assert state == "fail"
    assert found.startswith("nvidia-smi lists Tesla V100-SXM2-32GB, 470.82.01, but torch ")
    assert "docs/environment.md" in remedy and "torch==2.13.0+cu126" in remedy


def test_a_gpu_that_torch_was_not_built_for_fails(monkeypatch):
    answers = {"device_count": 1, "get_device_name": "Tesla V100-SXM2-32GB", "get_device_capability": (7, 0)}
    for name, answer in (answers | {"is_available": True, "get_arch_list": TORCH_2_13_CU130}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    ((state, _, found, remedy),) = preflight_machine.gpus()
    assert state == "fail"
    assert found.startswith("Tesla V100-SXM2-32GB, compute capability 7.0: torch ")
    assert "python -m pip install torch==2.13.0+cu126 --index-url " in remedy


def test_versions_that_differ_from_the_pins_are_listed(tmp_path, monkeypatch):
    requirements, constraints = tmp_path / "requirements.txt", tmp_path / "constraints.txt"
    monkeypatch.setattr(preflight_machine, "REQUIREMENTS", requirements)
    monkeypatch.setattr(preflight_machine, "CONSTRAINTS", constraints)
    installed = torch.__version__.split("+")[0]
    requirements.write_text(f"# comment\n-c constraints.txt\ntorch=={installed}\n")
    constraints.write_text("no-such-package==1.0\npytest==0.1 ; sys_platform == 'linux'\n")
    ((state, _, found, _),) = preflight_machine.packages()
    assert (state, found) == ("warn", f"pytest {pytest.__version__} instead of 0.1")
    requirements.write_text("torch==0.1\nno-such-package==1.0\n")
    ((state, _, found, _),) = preflight_machine.packages()
    assert (state, found) == ("fail", f"torch {installed} instead of 0.1, no-such-package absent instead of 1.0")


def needed(packages: list[str]) -> set[str]:
    """The normalised names of installed packages and of all packages that they need on this machine."""
    found, to_visit = set(), packages
    while to_visit:
        found |= {canonicalize_name(name) for name in to_visit}
        lines = [Requirement(line) for name in to_visit for line in importlib.metadata.requires(name) or []]
        wanted = {line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})}
        to_visit = [name for name in wanted if canonicalize_name(name) not in found]
    return found


@pytest.mark.promise("an installation in a year has the same versions of all packages")
def test_constraints_txt_has_every_package_of_this_environment_in_its_version():
    differ = preflight_machine.wrong_pins(CONSTRAINTS, absent=False)
    assert not differ, "install constraints.txt again with `make quick`, or correct the file with `make constraints`"
    files = [REPOSITORY / name for name in ("requirements.txt", "requirements-docs.txt", "requirements-dev.txt")]
    direct, all_pins = (
        re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
        for text in ("\n".join(file.read_text() for file in files), CONSTRAINTS.read_text())
    )
    # Each build of torch has its own packages of CUDA
    absent = {name for name in needed(direct) - {*all_pins} if not name.startswith(("cuda-", "nvidia-"))}
    assert not absent, "constraints.txt lacks packages; run `make constraints`"


@pytest.mark.parametrize(
    ("value", "exact", "absent"),
    [
        ("", False, []),
        ("ib", False, []),  # NCCL accepts prefixes
        ("ib", True, ["ib"]),
        ("=ib", False, ["ib"]),
        ("^docker,lo", False, []),
        ("eth,hsn0", False, ["hsn0"]),
    ],
)
def test_absent_network_interfaces_are_listed(value, exact, absent):
    assert preflight_machine.absent_interfaces(value, ["eth0", "ib0", "lo"], exact) == absent


def test_a_tiny_training_gets_no_settings_of_the_caller(tmp_path):
    caller = {"BATCH_SIZE": "64", "DATASET": "squad", "RANK": "3", "SLURM_JOB_ID": "7", "SLURM_CONF": "c", "HOME": "h"}
    variables = preflight_jobs.tiny_variables(tmp_path, caller, gpu=True)
    assert variables == {"SLURM_CONF": "c", "HOME": "h", "HF_DATASETS_CACHE": f"{tmp_path}/datasets"} | {
        name: str(value) for name, value in preflight_jobs.TINY.items()
    } | {"DATASET": f"{REPOSITORY}/data/squad_sample.json"}
