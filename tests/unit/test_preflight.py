"""preflight.py: its comparisons, and what its lines say, without a GPU, a cluster or a training."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import preflight
from checks import files as preflight_files
from checks import jobs as preflight_jobs
from checks import machine as preflight_machine
from checks.machine import Site
from helpers import REPOSITORY

TORCH_2_13_CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((9, 0), TORCH_2_13_CU130, True),
        ((8, 9), TORCH_2_13_CU130, True),  # sm_86
        ((7, 0), TORCH_2_13_CU130, False),  # V100
        ((10, 3), ["sm_90", "compute_90"], True),  # by PTX
        ((10, 3), ["sm_90"], False),
        ((8, 0), ["sm_86", "compute_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["compute_90a"], False),  # PTX of one chip
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_100f"], False),
        ((9, 0), [], False),
    ],
)
def test_a_gpu_runs_a_build(capability, arch_list, runs):
    assert preflight_machine.built_for(capability, arch_list) is runs


def gpus(monkeypatch, said: tuple[bool, str]) -> list[tuple]:
    monkeypatch.setattr(preflight_machine, "command", lambda *words, **options: said)
    return list(preflight_machine.gpus())


# as nvidia-smi --query-gpu=name,driver_version --format=csv,noheader prints it
NVIDIA_SMI = "Tesla V100-SXM2-32GB, 470.82.01\nTesla V100-SXM2-32GB, 470.82.01"


@pytest.mark.parametrize(
    ("cuda", "visible", "found"),
    [
        (None, None, "is a CPU build; install a CUDA build"),
        ("13.0", None, "driver 470.82.01 of Tesla V100-SXM2-32GB is too old for CUDA 13.0 (CUDA 13 needs 580"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES hides Tesla V100-SXM2-32GB; unset it"),
    ],
)
def test_a_gpu_that_pytorch_does_not_use_fails(monkeypatch, cuda, visible, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    ((state, name, *texts),) = gpus(monkeypatch, (True, NVIDIA_SMI))
    assert (state, name) == ("fail", "GPUs")
    assert found in "; ".join(texts)


def test_a_gpu_that_torch_was_not_built_for_fails(monkeypatch):
    answers = {"device_count": 1, "get_device_name": "Tesla V100-SXM2-32GB", "get_device_capability": (7, 0)}
    for name, answer in (answers | {"is_available": True, "get_arch_list": TORCH_2_13_CU130}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    ((state, name, found, way_out),) = preflight_machine.gpus()
    assert (state, name) == ("fail", "GPU 0")
    assert way_out.startswith("python -m pip install torch==2.13.0+cu126 --index-url ")
    assert "/cu126 " in way_out
    assert found.startswith("Tesla V100-SXM2-32GB, compute capability 7.0: torch ")
    assert found.endswith("is built for " + ", ".join(TORCH_2_13_CU130))


def test_a_login_node_has_no_gpu(monkeypatch):
    ((state, _, _, way_out),) = gpus(monkeypatch, (False, "nvidia-smi: no such file"))
    assert state == "skip"
    assert "srun --gpus-per-node=1 python scripts/preflight.py" in way_out
    monkeypatch.setenv("REQUIRE_GPU", "0")
    assert [line[0] for line in gpus(monkeypatch, (True, NVIDIA_SMI))] == ["skip"]


def test_nvcc_must_have_the_major_version_of_torch():
    said = "Cuda compilation tools, release 12.8, V12.8.93\nBuild cuda_12.8.r12.8/compiler.35583870_0"
    assert preflight_machine.nvcc_mismatch(said, "12.6") == ""
    assert preflight_machine.nvcc_mismatch(said, "13.0") == "12.8"
    assert preflight_machine.nvcc_mismatch("", "13.0") == "no version"


def test_pins():
    installed = torch.__version__.split("+")[0]
    assert preflight_machine.wrong_pins(f"# comment\n-r other.txt\ntorch=={installed}\n") == []
    wrong = preflight_machine.wrong_pins("torch==0.1\nno-such-package==1.0\n")
    assert wrong == [f"torch {installed} instead of 0.1", "no-such-package absent instead of 1.0"]


@pytest.mark.parametrize(
    ("value", "exact", "absent"),
    [
        ("", False, []),
        ("ib", False, []),  # NCCL takes prefixes
        ("ib", True, ["ib"]),
        ("=ib", False, ["ib"]),
        ("^docker,lo", False, []),
        ("eth,hsn0", False, ["hsn0"]),
    ],
)
def test_interfaces(value, exact, absent):
    assert preflight_machine.absent_interfaces(value, ["eth0", "ib0", "lo"], exact) == absent


def test_a_wrong_interface_is_a_warning_on_a_login_node_and_a_failure_in_a_job(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "no_such")
    assert ("warn", "NCCL_SOCKET_IFNAME") in [line[:2] for line in preflight_machine.nccl(Site("mysite"))]
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert ("fail", "NCCL_SOCKET_IFNAME") in [line[:2] for line in preflight_machine.nccl(Site("mysite"))]
    assert {line[0] for line in preflight_machine.nccl(Site(""))} == {"skip"}


def test_state_of_the_compiled_optimizer(tmp_path):
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    assert preflight_machine.extensions(tmp_path)[0] == "warn"
    (folder / "cpu_adam.so").touch()
    assert preflight_machine.extensions(tmp_path)[0] == "ok"


def fill_cache(folder, shards: list[str]) -> None:
    """A model of two shards as huggingface_hub keeps it, of which these are there."""
    repository = folder / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    weights = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(weights))
    for name in shards:
        (snapshot / name).write_bytes(b"0" * 1000)
    (snapshot / "tokenizer.json").symlink_to(folder / ("blob" if len(shards) == 1 else "one"))


def test_a_model_in_the_cache_is_whole(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert preflight_files.cached_model("some/model", None) == ("", "not in the cache")
    fill_cache(tmp_path, ["one.safetensors"])
    missing = preflight_files.cached_model("some/model", None)[1]
    assert missing == "the cache lacks tokenizer.json, two.safetensors", "a link to nothing, and a shard"
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "models--some--model/snapshots" / ("a" * 40) / "two.safetensors").write_bytes(b"0" * 1000)
    assert preflight_files.cached_model("some/model", 2000) == ("0.0 GB", "")
    assert preflight_files.cached_model("some/model", 9000)[1].endswith("of 9000 bytes are in the cache")


@pytest.mark.parametrize(("path", "local"), [("/tmp/hf", True), ("/home/me/.cache", False), ("/tmpfiles", False)])
def test_folders_of_one_node(path, local):
    assert preflight_files.node_local(path) is local


def disk(monkeypatch, free: float, model: str = "bigscience/bloom-560m") -> tuple:
    monkeypatch.setattr(preflight_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    (line,) = preflight_files.disk(SimpleNamespace(model_name=[model, "tiny-bloom"], dataset="squad"))
    return line


def test_disk_is_for_the_experiments_that_save(monkeypatch):
    """Two of BLOOM-560m, of 559,214,592 parameters each."""
    need = (16 * 2 + 12) * 559_214_592
    state, _, found, *_ = disk(monkeypatch, need + 1e8)
    assert state == "ok"
    assert f"{need / 1e9:.1f} GB for one run each of baseline, fsdp-baseline" in found
    assert disk(monkeypatch, need - 1e8)[0] == "warn"
    monkeypatch.setenv("SAVE_STRATEGY", "no")
    assert disk(monkeypatch, 0)[0] == "ok"


def test_the_last_error_line_of_a_log_is_its_cause():
    log = "start\nerror: --x: first; way\nerror: --y: second; way\rprogress\nTraceback\nlast words\n\n"
    assert preflight_machine.last_line(log) == "error: --y: second; way"
    assert preflight_machine.last_line("a\nb\n") == "b"
    assert preflight_machine.last_line("") == "no output"


def test_nothing_of_the_caller_reaches_a_tiny_training(tmp_path):
    caller = {"BATCH_SIZE": "64", "DATASET": "squad", "RANK": "3", "SLURM_JOB_ID": "7", "SLURM_CONF": "c", "HOME": "h"}
    variables = preflight_jobs.tiny_variables(tmp_path, caller, gpu=True)
    assert variables == {"SLURM_CONF": "c", "HOME": "h", "HF_DATASETS_CACHE": f"{tmp_path}/datasets"} | {
        name: str(value) for name, value in preflight_jobs.TINY.items()
    } | {"DATASET": f"{REPOSITORY}/data/squad_sample.json"}
    assert preflight_jobs.tiny_variables(tmp_path, {}, gpu=False)["FP16"] == "False"


SCONTROL = """JobId=7 JobName=baseline
   JobState=PENDING Reason=Resources Dependency=(null)
   StdOut=/a folder/log/baseline_7.out
"""


def test_a_job_is_waited_for_until_it_ends_or_the_time_is_up(monkeypatch):
    monkeypatch.setattr(preflight_jobs, "command", lambda *words, **options: (True, SCONTROL))
    log = Path("/a folder/log/baseline_7.out")
    assert preflight_jobs.wait_for_job("7", deadline=0) == ("PENDING", "Resources", log)
    done = SCONTROL.replace("PENDING Reason=Resources", "FAILED Reason=NonZeroExitCode")
    monkeypatch.setattr(preflight_jobs, "command", lambda *words, **options: (True, done))
    assert preflight_jobs.wait_for_job("7", time.monotonic() + 60) == ("FAILED", "NonZeroExitCode", log)


def test_a_check_that_breaks_is_a_failed_line():
    def broken():
        yield "ok", "first", "fine"
        raise ImportError("no torch")

    lines = []
    preflight.run_check("check", broken, lambda *line: lines.append(line))
    assert lines[0] == ("ok", "first", "fine")
    assert lines[1][:3] == ("fail", "check", "ImportError: no torch")


@pytest.mark.parametrize("words", [["--no_such_flag"], ["--timeout", "0"]])
def test_a_wrong_flag_is_one_line_with_exit_code_2(words, refusal, main_of):
    refusal(main_of, preflight, *words)
