"""Tests on GPUs: the short rows of gpu_check.py, which train, save and load tiny-bloom; and FSDP on two GPUs."""

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import gpu_check
from helpers import NOTHING_COMPILED, REPOSITORY, RUN_TIMEOUT, TINY
from models.chunked_loss import use_chunked_loss
from workbench import Bench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA GPU here")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the test needs two GPUs")
ROWS = [row.name for row in gpu_check.ROWS if not row.full]
MISSING = [] if shutil.which("g++") else ["compiled"]
needs_compiler = pytest.mark.skipif(bool(MISSING), reason="torch.compile needs g++")
PINNED = {"zero2_cpu_offload_pinned_memory": True, "zero2_cpu_offload": False}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check.py"), "--rows"]
    command += [name for name in ROWS if name not in MISSING]
    subprocess.run(command, cwd=folder, env=os.environ | NOTHING_COMPILED, check=False)
    return folder / "results/gpu_check"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[needs_compiler] if n == "compiled" else []) for n in ROWS])
def test_row(rows, name):
    result = json.loads((rows / "gpu_check.json").read_text())["rows"][name]
    assert result["status"] == "completed", result
    record = json.loads((rows / "results" / f"{name}.json").read_text())
    assert record["knobs"]["device"]["effective"] == "cuda:0"
    assert record["knobs"]["precision"] == {"requested": "fp16", "effective": "fp16"}
    assert record["eval"][1]["loss"] < record["eval"][0]["loss"] < 7.7, (
        "an untrained model has log(2048), which is 7.62"
    )
    (peak,) = record["peak_gpu_memory"]
    assert 0 < peak["allocated_mib"] <= peak["reserved_mib"]
    if name in PINNED:
        knob = record["knobs"]["optimizer pinned memory"]
        assert knob == {"requested": PINNED[name], "effective": PINNED[name]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_chunked_loss_matches_full_logits_on_a_gpu(dtype):
    """With BLOOM's vocabulary, softmax is near fp16's smallest numbers, because loss scaling multiplies only later."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=250_880, hidden_size=64, n_layer=1, n_head=4, use_cache=False)
    full = BloomForCausalLM(config).cuda()
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    tokens = torch.randint(0, 250_880, (2, 300), device="cuda")
    found = []
    for model in (full, chunked):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=tokens, labels=tokens).loss
        (2**10 * loss).backward()
        found.append((loss.item(), model.transformer.word_embeddings.weight.grad))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3)
    assert (found[1][1] - found[0][1]).norm() <= tolerance * found[0][1].norm()


@two_gpus
@pytest.mark.parametrize("config", ["full_shard", "full_shard_cpu_offload", "fsdp1_full_shard"])
def test_two_gpus_shard_generate_and_save(server, tmp_path, config):
    """Two GPUs are needed to test gloo for offloaded gradients, FSDP1, and a loss scale that ranks share."""
    options = {"CUDA_VISIBLE_DEVICES": "0,1", "FP16": "", "EM_F1": "True", "EVAL_SIZE": 8, "BATCH_SIZE": 2}
    flags = ("--fsdp", "--fsdp_config", f"fsdp_configs/{config}.json")
    bench = Bench(server, tmp_path / "work", TINY, RUN_TIMEOUT)
    done = bench.run(*flags, ranks=2, launcher="torchrun", JOB_ID=config, **options)
    assert done.record["knobs"]["precision"]["effective"] == "fp16"
    assert done.record["parameters"] == 231_296
    assert done.losses[1] < done.losses[0] < 7.7
    assert list(done.output.glob("*.safetensors"))
