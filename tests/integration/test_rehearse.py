"""Tests of benchmarks/rehearse.py, which runs rank 0 of up to 512 ranks.

Memory and traffic must match the formulas, and the collectives must match those of real runs.
"""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from estimate.command_line import parse_plan
from estimate.communication import rings
from estimate.flags import RankFlags
from estimate.memory import estimate_parts, parts_at_peak
from estimate.model_shape import trace_shape
from helpers import REPOSITORY, program
from settings.settings import Settings

TINY = ("--model_name", "tiny-bloom", "--max_length", 64, "--bf16", "--gradient_accumulation_steps", 2)
GPT = ("--model_name", "custom-gpt", "--vocab_size", 512, "--hidden_size", 256, "--num_layers", 2)
GPT += ("--num_heads", 4, "--ff_dim", 512, "--max_length", 64, "--bf16", "--gradient_accumulation_steps", 2)
FSDP = ("--fsdp", "--fsdp_config")
METHODS = {
    "DDP": TINY,
    "FULL_SHARD": (*TINY, *FSDP, "fsdp_configs/full_shard.json"),
    "SHARD_GRAD_OP": (*TINY, *FSDP, "fsdp_configs/shard_grad_op.json"),
    "HYBRID_SHARD": (*TINY, *FSDP, "fsdp_configs/hybrid_shard.json"),
    "TP": (*GPT, "--tensor_parallel", 4, "--fsdp"),
}
MANY_RANKS = [("HYBRID_SHARD", 64), ("HYBRID_SHARD", 512), ("TP", 512)]
MORE = [(method, gpus) for method in METHODS for gpus in (64, 512) if (method, gpus) not in MANY_RANKS]
CASES = [*MANY_RANKS, *(pytest.param(*case, marks=pytest.mark.faults) for case in MORE)]
# DeepSpeed loops over all ranks in Python, which is slow for many ranks
CASES += [(method, 8) for method in METHODS]
METHODS |= {f"ZeRO-{stage}": (*TINY, "--deepspeed", f"ds_configs/zero{stage}.json") for stage in range(4)}
CASES += [(f"ZeRO-{stage}", 8) for stage in range(4)]
METHODS |= {f"LoRA, {method}": (*METHODS[method], "--lora_rank", 4) for method in ("DDP", "FULL_SHARD")}
METHODS |= {f"LoRA, ZeRO-{stage}": (*METHODS[f"ZeRO-{stage}"], "--lora_rank", 4) for stage in (1, 2, 3)}
METHODS |= {
    f"no padding, {method}": (*METHODS[method], "--attention", "sdpa", "--padding", "none")
    for method in ("FULL_SHARD", "ZeRO-3")
}
CASES += [(method, 8) for method in METHODS if method.startswith(("LoRA", "no padding"))]
communication = program("benchmarks/communication.py")
command = program("benchmarks/rehearse.py")
rehearse = command.rehearse
SMALL = command.SMALL


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the command sets it, too
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def plan(*flags: object) -> Settings:
    return parse_plan([str(flag) for flag in flags], environment={}, flags=RankFlags)


def check_bytes_sent(found: Any, settings: Settings, tolerance: float = 0.01) -> None:
    """Compare the bytes with the formulas, which leave out the ranks' token counts (8 bytes each)."""
    rehearsed, estimated = (
        command.sent_by_group(each) for each in (found.rings(), rings(trace_shape(settings), settings))
    )
    large = {group: size for group, size in rehearsed.items() if size > 8 * SMALL}
    assert large == pytest.approx({group: size for group, size in estimated.items() if size}, rel=tolerance)


@pytest.mark.promise("a rehearsal holds and sends what the estimates predict, on 8, 64 and 512 ranks")
@pytest.mark.parametrize(("method", "gpus"), CASES)
def test_memory_and_traffic_of_rank_0_match_the_formulas(method, gpus):
    settings = plan(*METHODS[method], "--gpus", gpus, "--nodes", gpus // 4)
    found = rehearse(settings)
    check_bytes_sent(found, settings)
    parts = parts_at_peak(estimate_parts(settings))
    estimated = {part.name: part.gpu for part in parts}
    # With tensor parallelism and FSDP, the estimate has its peak in another interval
    tolerance = 0.1 if method == "TP" else 0.01
    assert found.at_peak.total() == pytest.approx(sum(part.gpu for part in parts), rel=tolerance)
    assert found.at_most["parameters"] == pytest.approx(estimated["parameters"], rel=0.01)
    # Adam's state has a step counter of 4 bytes per parameter tensor, which the estimate leaves out
    assert found.at_most["optimizer state"] == pytest.approx(estimated["optimizer state"], rel=0.02)


LLAMA = {"model_type": "llama", "num_attention_heads": 4, "vocab_size": 2048, "hidden_size": 128}
LLAMA |= {"intermediate_size": 256, "num_hidden_layers": 2}


# With these six cases, each two of the features meet in each combination
PAIRS = [
    ("DDP", 0, False, False),
    ("DDP", 2, True, True),
    ("FULL_SHARD", 0, True, False),
    ("FULL_SHARD", 2, False, True),
    ("ZeRO-3", 0, False, True),
    ("ZeRO-3", 2, True, False),
]
ALL = itertools.product(["DDP", "FULL_SHARD", "ZeRO-3"], [0, 2], [False, True], [False, True])
PAIRS += [pytest.param(*case, marks=pytest.mark.faults) for case in ALL if case not in PAIRS]


@pytest.mark.parametrize(("method", "lora_rank", "recomputed", "tied"), PAIRS)
def test_pairs_of_features_match_the_formulas(method, lora_rank, recomputed, tied, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": tied}))
    flags = ["--from_scratch", *METHODS[method][2:], "--lora_rank", lora_rank, "--gpus", 4]
    if recomputed:
        flags.append("--activation_checkpointing")
    settings = plan("--model_name", tmp_path, *flags)
    found = rehearse(settings)
    # ZeRO-3 also gathers the parameters that it never shards, once in a step. The formula leaves them out
    check_bytes_sent(found, settings, tolerance=0.02 if method == "ZeRO-3" else 0.01)
    expected = sum(part.gpu for part in parts_at_peak(estimate_parts(settings)))
    if method == "FULL_SHARD" and not tied:  # docs/memory.md, "What it cannot do"
        expected += (2 if lora_rank else 4) * LLAMA["vocab_size"] * LLAMA["hidden_size"]
    assert found.at_peak.total() == pytest.approx(expected, rel=0.03 if method == "ZeRO-3" else 0.01)


@pytest.mark.faults
@pytest.mark.parametrize(
    "flags",
    [("--activation_checkpointing",), ("--lora_rank", 8), ("--lora_rank", 8, "--activation_checkpointing")],
    ids=["recomputed", "LoRA", "LoRA, recomputed"],
)
def test_zero_3_gathers_what_the_passes_need(flags, tmp_path):
    """The limits are smaller than the model, so DeepSpeed drops the blocks between the passes.

    Checkpointing gathers blocks again to recompute them. With LoRA, no backward pass needs the frozen embedding. With
    both, DeepSpeed frees a block between its recomputation and its gradients. The formula is a rule of thumb.
    """
    (tmp_path / "config.json").write_text(json.dumps(communication.CONFIG))
    config = json.loads(Path("ds_configs/zero3.json").read_text())
    config["zero_optimization"] |= {"stage3_max_live_parameters": 3e6, "stage3_max_reuse_distance": 3e6}
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    flags += ("--from_scratch", "--max_length", 64, "--bf16", "--gpus", 4, "--deepspeed", tmp_path / "zero3.json")
    settings = plan("--model_name", tmp_path, *flags)
    check_bytes_sent(rehearse(settings), settings, tolerance=0.1)


def test_a_rehearsal_of_zero_3_does_not_change_later_estimates():
    """DeepSpeed replaces `linear`. The replacement keeps no 16-bit copies of weights for the backward pass."""
    rehearse(plan(*METHODS["ZeRO-3"], "--gpus", 2))
    assert torch.nn.functional.linear is torch._C._nn.linear


@pytest.mark.promise("a rehearsal holds and sends what the estimates predict, on 8, 64 and 512 ranks")
@pytest.mark.parametrize("strategy", ["DDP", "FULL_SHARD", "TP 2 x FSDP 2"])
def test_rehearsed_collectives_match_real_trainings(strategy, tmp_path):
    """benchmarks/communication.py has counted the collectives of real training runs over gloo."""
    (tmp_path / "config.json").write_text(json.dumps(communication.CONFIG))
    ranks = communication.RANKS.get(strategy, 2)
    model = (
        "--model_name",
        tmp_path,
        "--from_scratch",
        "--max_length",
        64,
        "--bf16",
        "--per_device_train_batch_size",
        1,
    )
    settings = plan(*model, "--gradient_accumulation_steps", 1, "--gpus", ranks, *communication.ROWS[strategy])
    number, size = Counter(), Counter()
    for _, each in rehearse(settings).collectives:
        if each.size >= SMALL:
            key = (each.kind, each.dtype, len(each.ranks))
            number[key] += 1
            size[key] += each.size
    rows = communication.read_results()["rows"]
    (counted,) = [row for row in rows if (row["strategy"], row["accumulation"]) == (strategy, 1)]
    assert sorted([*key, number[key], size[key]] for key in number) == sorted(counted["collectives"])


def test_the_command_shows_counts_and_formulas(main_of, capsys):
    main_of(command, *TINY, "--gpus", 8, "--nodes", 2, *FSDP, "fsdp_configs/hybrid_shard.json")
    first, *lines = re.sub(" {2,}", "  ", capsys.readouterr().out).splitlines()
    assert (
        first
        == "tiny-bloom: FSDP2 HYBRID_SHARD, bf16, 2 micro batch(es) of 4 x 64 tokens per rank, rank 0 of 8 on 2 node(s)"
    )
    assert lines[:2] == ["MiB  at the peak  at most  estimated", "parameters  0.22  0.22  0.22"]
    assert "peak: in the phase backward, aten._log_softmax_backward_data.default" in lines
    # Each of the two micro batches gathers 3 units in the forward pass, and 2 blocks again in the backward pass. Each
    # unit's gradient is reduced once.
    assert "forward  all-gather  bfloat16  4 in a node  6  0.92" in lines
    assert "backward  all-gather  bfloat16  4 in a node  4  0.40" in lines
    assert "backward  reduce-scatter  bfloat16  4 in a node  3  0.46" in lines
    assert "backward  all-reduce  bfloat16  2 on several nodes  3  0.12" in lines
    assert "4 in a node  1.34  1.34  0.00" in lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "error: --gpus: one rank has no communication to rehearse; give 2 or more"),
        (
            ("--gpus", 8, "--nodes", 3),
            "error: --gpus: 8 is not a multiple of --nodes 3; give the GPUs of all nodes together",
        ),
        (
            ("--gpus", 8, "--torch_compile"),
            "error: --torch_compile: compiles kernels, and a rehearsal cannot run them; ",
        ),
        (("--gpus", 8, "--optim", "adafactor"), "error: --optim: adafactor cannot be estimated, only adamw"),
        (("--gpus", 8, "--compare"), "error: --compare: unknown flag"),
        (
            ("--gpus", 8, "--deepspeed", "ds_configs/zero2_cpu_offload.json"),
            "error: --deepspeed: offload needs a GPU to offload from, and a rehearsal has none; use a config without",
        ),
        (
            ("--gpus", 8, *FSDP, "fsdp_configs/full_shard_cpu_offload.json"),
            "error: fsdp_configs/full_shard_cpu_offload.json: cpu_offload needs a GPU to offload from, and a rehearsal",
        ),
        (
            ("--gpus", 8, *FSDP, "fsdp_configs/fsdp1_full_shard.json"),
            "error: fsdp_configs/fsdp1_full_shard.json: FSDP1 needs a GPU, and a rehearsal has none; use an FSDP2",
        ),
        (("--gpus", 8, "--tensor_parallel", 2), "error: --tensor_parallel: 2 of 8 ranks cut the matrices"),
    ],
)
def test_input_errors_are_one_line(flags, message, main_of, refusal):
    assert refusal(main_of, command, *TINY, *flags).startswith(message)
