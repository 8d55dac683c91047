"""Compare the operation counts of estimate_time.py with PyTorch's, and its bytes with benchmarks/communication.py."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, MixtralConfig

import estimate_time
from estimate.command_line import parse_plan
from estimate.communication import Ring, bytes_between_nodes, sent_bytes
from estimate.memory import estimate_parts, totals
from estimate.model_shape import Shape, trace_shape
from estimate.time import (
    CountWork,
    Rates,
    hideable_seconds,
    micro_batch_work,
    optimizer_seconds,
    predict_step,
    roofline_seconds,
)
from estimate.zero3_gathering import gathered_elements
from helpers import REPOSITORY, program
from settings.settings import Settings
from shared.units import GIB
from training.flops import ModelFlops

GIVEN = ("--matmul_tflops", 100, "--memory_bandwidth", 1000, "--bus_bandwidth", 50)
TINY = ("--model_name", "tiny-bloom", "--max_length", 64, "--fp16", "False")
PSI = 1_000_000_000
SIZES = (PSI // 4, *[PSI // 40] * 30)
CALLS = tuple((number,) for number in range(31))
SHAPE = Shape(PSI, PSI, 0, SIZES, SIZES[1:], 2048, 30, {}, {}, CALLS, rows=SIZES, blocks=CALLS[1:])


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def plan(*flags: object) -> Settings:
    return parse_plan([str(flag) for flag in flags], environment={})


def zero(stage: int, *flags: object) -> Settings:
    return plan("--deepspeed", f"ds_configs/zero{stage}.json", *flags)


def fsdp(name: str, *flags: object) -> Settings:
    return plan("--fsdp", "--fsdp_config", f"fsdp_configs/{name}.json", *flags)


def operations(work: Counter) -> int:
    return sum(each * times for (each, _), times in work.items())


def needed_operations(settings: Settings) -> int:
    return operations(micro_batch_work(settings))


def moved_bytes(work: Counter) -> int:
    return sum(each * times for (_, each), times in work.items())


# 1. Computing


def test_a_meta_model_needs_the_same_work_as_a_real_model():
    model = BloomForCausalLM(BloomConfig(vocab_size=2048, hidden_size=64, n_layer=2, n_head=4)).train()
    ids = torch.zeros(4, 64, dtype=torch.long)
    with CountWork() as real:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    planned = micro_batch_work(plan(*TINY))
    assert operations(planned) == operations(real.work)
    assert moved_bytes(planned) == pytest.approx(moved_bytes(real.work), rel=0.02)
    needed = ModelFlops(model, max_length=64).count_operations(real=4 * 64, counted=4 * 64, squares=4 * 64 * 64)
    assert operations(planned) == pytest.approx(needed, rel=0.05)


def test_with_lora_the_backward_pass_computes_no_gradients_of_weights():
    """Two of three products with each weight remain. The thin products of the adapters move many bytes."""
    flags = ("--model_name", "bigscience/bloom-1b1", "--from_scratch", "--bf16", "--gpus", 2)
    full, adapted = (micro_batch_work(zero(1, *flags, "--lora_rank", rank)) for rank in (0, 8))
    assert operations(adapted) / operations(full) == pytest.approx(2 / 3, abs=0.02)
    assert moved_bytes(adapted) > moved_bytes(full)


def test_the_products_of_experts_are_counted(tmp_path):
    """Two of eight experts compute each token, as many operations as one layer of twice their width."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "use_cache": False}
    found = []
    for config in (LlamaConfig(**sizes, intermediate_size=192), MixtralConfig(**sizes, intermediate_size=96)):
        config.save_pretrained(tmp_path)
        found.append(needed_operations(plan("--model_name", tmp_path, "--max_length", 64, "--fp16", "False")))
    router = 2 * 3 * 2 * 64 * 8 * 4 * 64
    assert found[1] == found[0] + router


def test_fused_attention_is_counted_too():
    sizes = ("--hidden_size", 64, "--num_layers", 2, "--num_heads", 4, "--ff_dim", 128, "--vocab_size", 500)
    short, long = (plan("--model_name", "custom-gpt", *sizes, "--max_length", length) for length in (64, 128))
    squares = (
        12 * 64 * 2 * 4 * (128**2 - 2 * 64**2)
    )  # attention has two products, computed once in the forward pass and twice in the backward pass
    assert needed_operations(long) - 2 * needed_operations(short) == pytest.approx(squares, rel=0.05)


def test_an_operation_costs_its_products_and_the_tensors_it_reads_and_writes():
    a = torch.ones(10, 20)
    with CountWork() as counting:
        torch.mm(a, a.T)
        a.add_(a)
        a.view(20, 10).T.detach()
    assert list(counting.work) == [(2 * 10 * 20 * 10, 4 * (200 + 200 + 100)), (0, 4 * 3 * 200)]
    assert roofline_seconds(Counter({(100, 1): 2, (0, 30): 1}), Rates(matmul=10, memory=3, bus=1)) == 2 * 10 + 10


def test_checkpointing_computes_the_blocks_a_second_time():
    plain, again = (needed_operations(plan(*TINY, *flags)) for flags in ((), ("--activation_checkpointing",)))
    head = 6 * 64 * 2048 * 4 * 64
    # the recomputation skips some products of the last block
    assert 1.2 < (again - head) / (plain - head) <= 4 / 3


# 2. The optimizer


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        (lambda: plan("--gpus", 4), 40),
        (lambda: zero(0, "--gpus", 4), 40 + 2 * (2 + 4)),
        (lambda: zero(1, "--gpus", 4), (40 + 2 * (2 + 4)) / 4),
        (lambda: zero(0, "--gpus", 4, "--fp16", "False"), 40),
        (lambda: fsdp("hybrid_shard", "--gpus", 4, "--nodes", 2), 40 / 2),
    ],
)
def test_bytes_that_the_optimizer_reads_and_writes(settings, passes):
    assert optimizer_seconds(SHAPE, settings(), Rates(matmul=1, memory=PSI, bus=1)) == pytest.approx(passes)


# 3. Communication

FLAGS = {
    "DDP": (),
    **{f"ZeRO-{stage}": ("--deepspeed", f"ds_configs/zero{stage}.json") for stage in range(4)},
    "FULL_SHARD": ("--fsdp", "--fsdp_config", "fsdp_configs/full_shard.json"),
    "SHARD_GRAD_OP": ("--fsdp", "--fsdp_config", "fsdp_configs/shard_grad_op.json"),
    "HYBRID_SHARD 2 x 2": ("--fsdp", "--fsdp_config", "fsdp_configs/hybrid_shard_2x2.json"),
}
communication = program("benchmarks/communication.py")
COUNTED = {(row["strategy"], row["accumulation"]): row for row in communication.read_results()["rows"]}


def counted_training(strategy: str, accumulation: int, folder: Path, *flags: object) -> Settings:
    """Return the settings of a training run whose messages the benchmark counted."""
    config = communication.CONFIG
    strategy_flags = tuple(communication.ROWS[strategy]) if strategy.startswith(("TP", "LoRA")) else FLAGS.get(strategy)
    if strategy == "ZeRO-2, reduce to owner":
        (folder / "zero2.json").write_text(json.dumps(communication.zero2_reduce()))
        strategy_flags = ("--deepspeed", str(folder / "zero2.json"))
    if strategy_flags is None:
        scale = int(strategy.split("1:")[1])
        config = communication.SCALED[scale]
        (folder / "zero3.json").write_text(json.dumps(communication.scaled_zero3(scale)))
        strategy_flags = ("--deepspeed", str(folder / "zero3.json"))
    (folder / "config.json").write_text(json.dumps(config))
    return plan(
        *("--model_name", folder, "--from_scratch", "--bf16", "--max_length", 64, "--per_device_train_batch_size", 1),
        *strategy_flags,
        *("--gradient_accumulation_steps", accumulation, "--gpus", communication.RANKS.get(strategy, 2), *flags),
    )


def ring_bytes(collectives: list) -> float:
    return sum(communication.SENT[kind] * (ranks - 1) / ranks * size for kind, _, ranks, _, size in collectives)


@pytest.mark.parametrize(("strategy", "accumulation"), COUNTED)
def test_sent_bytes_agree_with_counts_of_real_trainings(strategy, accumulation, tmp_path):
    counted = ring_bytes(COUNTED[strategy, accumulation]["collectives"])
    settings = counted_training(strategy, accumulation, tmp_path)
    assert sent_bytes(trace_shape(settings), settings) == pytest.approx(counted, rel=0.02)


def test_the_pages_show_how_often_zero3_gathers():
    times = {}
    lines = []
    for size in ("560m", "1b1", "1b7", "3b", "7b1"):
        settings = zero(3, "--model_name", f"bigscience/bloom-{size}")
        shape = trace_shape(settings)
        times[size] = gathered_elements(shape, settings.zero) / shape.parameters
        lines.append(f"| bloom-{size} | {shape.parameters / 1e9:.2f} | {times[size]:.2f} |")
    assert "\n".join(lines) in (REPOSITORY / "docs" / "zero.md").read_text()
    sent_with_accumulation_4 = "; ".join(f"{8 * (times[size] + 1):.1f}" for size in ("560m", "7b1"))
    assert f"| {sent_with_accumulation_4} |" in (REPOSITORY / "docs" / "comparison.md").read_text()


def test_the_page_shows_the_costs_of_tensor_parallelism():
    """The page shows the GB that a rank sends and the GiB that it holds, at a global batch of 4."""
    flags = {
        "FSDP 2": ("--fsdp", "--gpus", 2, "--gradient_accumulation_steps", 2),
        "TP 2": ("--tensor_parallel", 2, "--gradient_accumulation_steps", 4),
        "FSDP 4": ("--fsdp", "--gpus", 4, "--gradient_accumulation_steps", 1),
        "TP 4": ("--tensor_parallel", 4, "--gradient_accumulation_steps", 4),
        "TP 2 x FSDP 2": ("--tensor_parallel", 2, "--fsdp", "--gpus", 4, "--gradient_accumulation_steps", 2),
    }
    model = ("--model_name", "custom-gpt", "--per_device_train_batch_size", 1, "--bf16")
    lines = []
    for name, words in flags.items():
        settings = plan(*model, *words)
        held = totals(estimate_parts(settings), 1)[0] / GIB
        batch = f"1 x {settings.trainer.gradient_accumulation_steps}"
        lines.append(f"| {name} | {batch} | {sent_bytes(trace_shape(settings), settings) / 1e9:.2f} | {held:.1f} |")
    assert "\n".join(lines) in (REPOSITORY / "docs" / "tensor-parallel.md").read_text()


# Training on 2 x 2 ranks with two dimensions -> function that returns True for a message to the other node
BETWEEN_NODES = {
    "HYBRID_SHARD 2 x 2": lambda kind, dtype: kind == "all-reduce",  # shards are gathered within a node
    "TP 2 x FSDP 2": lambda kind, dtype: (
        dtype == "float32" and kind in ("all-gather", "reduce-scatter")
    ),  # FSDP sends these messages
}


@pytest.mark.parametrize(("strategy", "accumulation"), [key for key in COUNTED if key[0] in BETWEEN_NODES])
def test_bytes_between_nodes_agree_with_counts_of_real_trainings(strategy, accumulation, tmp_path):
    collectives = COUNTED[strategy, accumulation]["collectives"]
    counted = ring_bytes([row for row in collectives if BETWEEN_NODES[strategy](*row[:2])])
    settings = counted_training(strategy, accumulation, tmp_path, "--nodes", 2)
    assert bytes_between_nodes(trace_shape(settings), settings) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("ring", "part"),
    [
        (Ring(4, 1, 1.0), 0),  # two rings, each within a node
        (Ring(8, 1, 1.0), 2 / 8),  # only the last rank of each node sends to the other node
        (Ring(4, 2, 1.0), 1 / 2),  # rings of ranks 0 2 4 6 and 1 3 5 7
        (Ring(2, 4, 1.0), 1),  # rings of ranks 0 4, 1 5, 2 6 and 3 7
    ],
)
def test_a_ring_leaves_a_node_once(ring, part):
    assert ring.bytes_between_nodes(gpus=8, gpus_per_node=4) == pytest.approx(part * ring.sent_bytes)
    assert ring.bytes_between_nodes(gpus=8, gpus_per_node=8) == 0


def test_one_rank_sends_nothing():
    assert [sent_bytes(SHAPE, settings) for settings in (plan(), zero(2), zero(3), fsdp("hybrid_shard"))] == [0] * 4


def test_communication_during_computation_is_hidden():
    """DDP sends only during the last backward pass of a step."""
    assert hideable_seconds(plan("--gpus", 2, "--gradient_accumulation_steps", 2), 3.0) == pytest.approx(1.0)
    assert hideable_seconds(fsdp("full_shard", "--gpus", 2), 3.0) == 3
    assert [hideable_seconds(zero(stage, "--gpus", 2), 3.0) for stage in range(4)] == [0, 0, 0, 3]


# 4. The command


def test_the_command_shows_all_parts_with_no_and_full_overlap(main_of, capsys):
    main_of(estimate_time, *TINY, "--gpus", 2, *GIVEN[:4], "--bus_bandwidth", 0.05)
    text = capsys.readouterr().out
    assert text.startswith("tiny-bloom: 231,296 parameters, fp32, 4 x 4 x 64 tokens per rank, 2 GPU(s) on 1 node(s)")
    assert "each rank: 100 TFLOP/s in matrix products, 1000 GB/s of memory, 0.05 GB/s between ranks" in text
    shown = {name: float(number) for name, number in re.findall(r"^([a-z ]+?) {2,}([0-9][0-9.e-]*)", text, re.M)}
    step = predict_step(plan(*TINY, "--gpus", 2), Rates(1e14, 1e12, 5e7))
    total = step.compute + step.optimizer + step.communication
    assert shown["no overlap"] == pytest.approx(total, rel=0.001)
    assert shown["full overlap"] == pytest.approx(total - min(step.compute, step.communication), rel=0.001)
    assert shown["expected"] == pytest.approx(total - step.hidden, rel=0.001)
    assert 0 < step.hidden < step.communication


def test_without_a_bandwidth_communication_is_left_out(main_of, capsys):
    main_of(estimate_time, *TINY, "--gpus", 2, *GIVEN[:4])
    assert "communication is left out: give --bus_bandwidth" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "error: --matmul_tflops, --memory_bandwidth: the speed of the GPUs is not known; give both"),
        (("--matmul_tflops", 0), "error: --matmul_tflops: 0 is too small; give a number above 0"),
        ((*GIVEN, "--torch_compile"), "error: --torch_compile: fuses operations, and the time of fused"),
        ((*GIVEN, "--deepspeed", "ds_configs/zero2_cpu_offload.json"), "error: offload: the speed of the CPU and its"),
    ],
)
def test_mistakes_are_one_line(flags, message, refusal, main_of):
    assert refusal(main_of, estimate_time, *flags).startswith(message)
