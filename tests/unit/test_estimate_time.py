"""estimate_time.py: what it counts, against the real libraries and the bytes that benchmarks/communication.py counted.

What the predictions are worth beside measured runs: benchmarks/prediction.py.
"""

import json
import re
from collections import Counter

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import estimate_time
from custom_model import CustomGPTConfig, CustomGPTForCausalLM
from estimate.model_shape import Shape, shape_for
from estimate.planned import options_of_plan
from estimate_time import (
    Batch,
    CountWork,
    Rates,
    full_batch,
    optimizer_step,
    predict_step,
    room_to_hide,
    seconds_of,
    sent,
    work_of,
)
from helpers import REPOSITORY, program
from training.flops import ModelFlops

GIVEN = ("--matmul_tflops", 100, "--memory_bandwidth", 1000, "--bus_bandwidth", 50)
TINY = ("--model_name", "tiny-bloom", "--max_length", 64, "--fp16", "False")
PSI = 1_000_000_000
SHAPE = Shape((PSI // 4, *[PSI // 40] * 30), (PSI // 40,) * 30, 2048, 30, 0, 0, 0)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def options(*flags: object, gpu: bool = True):
    return options_of_plan([str(flag) for flag in flags], "", environment={}, gpu=gpu)


def zero(stage: int, *flags: object):
    return options("--deepspeed", f"ds_configs/zero{stage}.json", *flags)


def fsdp(name: str, *flags: object):
    return options("--fsdp", "--fsdp_config", f"fsdp_configs/{name}.json", *flags)


# 1. Computing


def work_of_model(model, tokens: int = 64) -> Counter:
    ids = torch.zeros(4, tokens, dtype=torch.long)
    with CountWork() as counting:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    return counting.work


def operations(work: Counter) -> int:
    return sum(each * times for (each, _), times in work.items())


def moved(work: Counter) -> int:
    return sum(each * times for (_, each), times in work.items())


def test_a_model_without_storage_has_the_work_of_a_real_one():
    real = work_of_model(BloomForCausalLM(BloomConfig(vocab_size=2048, hidden_size=64, n_layer=2, n_head=4)).train())
    chosen = options(*TINY)
    planned = work_of(chosen, full_batch(chosen))
    assert operations(planned) == operations(real)
    assert moved(planned) == pytest.approx(moved(real), rel=0.02)


def test_products_are_those_that_the_model_needs():
    """Also those of attention in one piece, for which PyTorch has no formula on the CPU."""
    model = CustomGPTForCausalLM(
        CustomGPTConfig(vocab_size=500, hidden_size=64, num_layers=3, num_heads=4, ff_dim=256, seq_length=64)
    )
    needed = ModelFlops(model).needed(real=4 * 64, counted=4 * 64, squares=4 * 64 * 64)
    assert operations(work_of_model(model)) == pytest.approx(needed, rel=0.05)


def work_of_function(function) -> list[tuple[int, int]]:
    with CountWork() as counting:
        function()
    return list(counting.work.elements())


def test_an_operation_costs_its_products_and_the_tensors_that_it_reads_and_writes():
    a = torch.ones(10, 20)
    table = torch.ones(1000, 20)
    rows = torch.zeros(3, dtype=torch.long)
    assert work_of_function(lambda: torch.mm(a, a.T)) == [(2 * 10 * 20 * 10, 4 * (200 + 200 + 100))]
    assert work_of_function(lambda: a * a) == [(0, 4 * 3 * 200)]
    assert work_of_function(lambda: a.add_(1)) == [(0, 4 * 2 * 200)]
    assert work_of_function(lambda: a.copy_(a.clone()))[-1] == (0, 4 * 2 * 200)
    assert work_of_function(lambda: a * torch.ones(1).expand(10, 20))[-1] == (0, 4 * (2 * 200 + 1))
    assert work_of_function(lambda: torch.nn.functional.embedding(rows, table)) == [(0, 4 * 2 * 60 + 8 * 3)]
    assert work_of_function(lambda: a.view(20, 10).T.detach()) == []


def test_an_operation_takes_the_longer_of_its_arithmetic_and_its_bytes():
    found = Counter({(100, 1): 2, (0, 30): 1})
    assert seconds_of(found, Rates(matmul=10, memory=3)) == 2 * 10 + 10


def test_checkpointing_computes_the_blocks_once_more():
    plain, again = (
        operations(work_of(chosen, full_batch(chosen)))
        for chosen in (options(*TINY), options(*TINY, "--activation_checkpointing"))
    )
    head = 6 * 64 * 2048 * 4 * 64
    # the last block's products are not all needed again
    assert 1.2 < (again - head) / (plain - head) <= 4 / 3


def test_the_chunked_loss_computes_for_the_tokens_that_count_alone():
    chosen = options(*TINY, "--loss", "chunked")
    few, many = (work_of(chosen, Batch(4, 64, counted)) for counted in (64, 256))
    assert operations(many) - operations(few) == 6 * 64 * 2048 * (256 - 64)
    full = work_of(options(*TINY), Batch(4, 64, 256))
    assert operations(many) == operations(full)


# 2. The optimizer


@pytest.mark.parametrize(
    ("chosen", "passes"),
    [
        (lambda: options("--gpus", 4), 28 + 12),
        (lambda: options("--gpus", 4, "--max_grad_norm", 0), 28),
        (lambda: options("--gpus", 4, "--optim", "adamw_torch"), 80 + 12),
        (lambda: zero(0, "--gpus", 4), 28 + 12 + 2 * (2 + 4)),
        (lambda: zero(1, "--gpus", 4), (28 + 12 + 2 * (2 + 4)) / 4),
        (lambda: zero(0, "--gpus", 4, "--fp16", "False"), 28 + 12),
        (lambda: fsdp("full_shard", "--gpus", 4), (28 + 12) / 4),
        (lambda: fsdp("hybrid_shard", "--gpus", 4, "--nodes", 2), (28 + 12) / 2),
    ],
)
def test_bytes_that_the_optimizer_passes_over(chosen, passes):
    rates = Rates(matmul=1, memory=PSI)
    assert optimizer_step(SHAPE, chosen(), rates) == pytest.approx(passes)


def test_an_offloaded_optimizer_works_in_the_memory_of_the_cpu_and_sends_over_pcie():
    chosen = options("--deepspeed", "ds_configs/zero2_cpu_offload.json", "--gpus", 2)
    seconds = optimizer_step(SHAPE, chosen, Rates(matmul=1, memory=1e12))
    share = PSI / 2
    assert seconds == pytest.approx(share * 52 / estimate_time.CPU_MEMORY + 2 * 2 * share / estimate_time.PCIE)
    on_cpu = options("--deepspeed", "ds_configs/zero2_cpu_offload.json", "--gpus", 2, gpu=False)
    assert optimizer_step(SHAPE, on_cpu, Rates(matmul=1, memory=1e12)) < seconds / 10


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


@pytest.mark.parametrize(("strategy", "accumulation"), COUNTED)
def test_bytes_sent_are_those_that_were_counted_in_real_trainings(strategy, accumulation, tmp_path):
    row = COUNTED[strategy, accumulation]
    (tmp_path / "config.json").write_text(json.dumps(communication.CONFIG))
    flags = FLAGS.get(strategy)
    if flags is None:
        assert strategy == "ZeRO-3, large model"
        config = json.loads((REPOSITORY / "ds_configs" / "zero3.json").read_text())
        config["zero_optimization"] |= communication.LARGE_MODEL
        (tmp_path / "zero3_large.json").write_text(json.dumps(config))
        flags = ("--deepspeed", str(tmp_path / "zero3_large.json"))
    chosen = options(
        *("--model_name", tmp_path, "--from_scratch", "--bf16", "--max_length", 64, *flags),
        *("--gradient_accumulation_steps", accumulation, "--gpus", communication.RANKS.get(strategy, 2)),
    )
    counted = sum(
        communication.SENT[kind] * (ranks - 1) / ranks * size for kind, _, ranks, _, size in row["collectives"]
    )
    # of a large model the last blocks stay gathered between the passes: how many, depends on what is prefetched
    tolerance = 0.15 if "large" in strategy else 0.02
    assert sum(sent(shape_for(chosen), chosen)) == pytest.approx(counted, rel=tolerance)


def test_one_rank_sends_nothing():
    for chosen in (options(), zero(2), zero(3), fsdp("full_shard"), fsdp("hybrid_shard")):
        assert sum(sent(SHAPE, chosen)) == 0


def test_what_is_sent_while_a_gpu_computes_is_hidden():
    """DDP sends in the last backward pass of a step; on the CPU both need the same cores."""
    assert room_to_hide(options("--gpus", 2, "--gradient_accumulation_steps", 2), 3.0) == pytest.approx(1.0)
    assert room_to_hide(options("--gpus", 2, gpu=False), 3.0) == 0
    assert room_to_hide(fsdp("full_shard", "--gpus", 2), 3.0) == 3
    assert [room_to_hide(zero(stage, "--gpus", 2), 3.0) for stage in range(4)] == [0, 0, 0, 3]


# 4. The step


def test_a_step_is_the_sum_of_its_parts():
    chosen = zero(2, "--gpus", 4, *TINY)
    rates = Rates(matmul=1e12, memory=1e11, bus=1e9)
    step = predict_step(chosen, rates)
    shape = shape_for(chosen)
    work = work_of(chosen, full_batch(chosen))
    adding = 3 * 3 * 4 * shape.parameters / rates.memory  # of micro batches 2 to 4, in fp32
    assert step.compute == pytest.approx(4 * seconds_of(work, rates) + adding)
    assert step.communication == pytest.approx(sum(sent(shape, chosen)) / rates.bus)
    assert step.seconds == pytest.approx(step.compute + step.optimizer + step.communication)
    assert step.samples_per_second == pytest.approx(4 * 4 * 4 / step.seconds)


def test_shorter_sequences_take_less():
    chosen = options(*TINY)
    short, long = (predict_step(chosen, Rates(1e12, 1e11), Batch(4, length, 4 * length)) for length in (16, 64))
    assert 0 < short.compute < long.compute / 2


def printed(main_of, capsys, *flags: object) -> str:
    main_of(estimate_time, *flags)
    return capsys.readouterr().out


def test_the_command_shows_parts_and_both_ends_of_the_overlap(main_of, capsys):
    text = printed(main_of, capsys, *TINY, "--gpus", 2, *GIVEN)
    assert text.startswith("tiny-bloom: 231,296 parameters, fp32, 4 x 4 x 64 tokens per rank, 2 GPU(s) on 1 node(s)")
    assert "of each rank: 100 TFLOP/s in matrix products, 1000 GB/s of memory, 50 GB/s between ranks" in text
    shown = {name: float(number) for name, number in re.findall(r"^([a-z ]+?) {2,}([0-9][0-9.e-]*)", text, re.M)}
    assert shown.keys() >= {"compute", "optimizer", "communication", "no overlap", "full overlap", "expected"}
    assert shown["full overlap"] <= shown["expected"] <= shown["no overlap"]


def test_without_rates_it_measures_here_and_says_that_communication_is_left_out(main_of, capsys, monkeypatch):
    monkeypatch.setattr(estimate_time, "measure_peak", lambda dtype, device: 2e11)
    monkeypatch.setattr(estimate_time, "measure_copy", lambda device: 2e10)
    text = printed(main_of, capsys, *TINY, "--gpus", 2)
    assert "2 rank(s) on the CPU on 1 node(s)" in text
    assert "of each rank: 0.1 TFLOP/s in matrix products, 10 GB/s of memory, nothing known" in text
    assert "communication is left out: give --bus_bandwidth" in text
    assert "For a GPU give --matmul_tflops" in text


def test_what_is_assumed_of_offload_is_said(main_of, capsys):
    text = printed(main_of, capsys, *TINY, *GIVEN, "--deepspeed", "ds_configs/zero2_cpu_offload.json")
    assert "assumed: 12 GB/s of PCIe" in text
    assert "assumed" not in printed(main_of, capsys, *TINY, *GIVEN, "--deepspeed", "ds_configs/zero2.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "3", "--nodes", "2"], "error: --gpus: 3 GPUs do not spread over 2 nodes; "),
        (["--matmul_tflops", "0"], "error: --matmul_tflops: 0 is too small; give 10^12 operations per second"),
        (["--bus_bandwidth", "-1"], "error: --bus_bandwidth: -1 is too small; give GB/s"),
        (
            ["--matmul_tflops", "100"],
            "error: --matmul_tflops: is one of two rates of a GPU that is elsewhere; give --memory",
        ),
        (
            [*map(str, GIVEN), "--torch_compile"],
            "error: --torch_compile: joins operations, and how fast they are is not",
        ),
        ([*map(str, GIVEN), "--optim", "adafactor"], "error: --optim: the state of adafactor is not known here; "),
    ],
)
def test_mistakes_are_one_line(flags, message, refusal, main_of, capsys):
    assert refusal(main_of, estimate_time, *flags).startswith(message)
    assert capsys.readouterr() == ("", "")


def test_a_copy_reads_and_writes(monkeypatch):
    monkeypatch.setattr(estimate_time, "fastest", lambda operation, device: operation() is None or 0.5)
    monkeypatch.setattr(estimate_time, "COPIED_ON_CPU", 1000)
    assert estimate_time.measure_copy(torch.device("cpu")) == 2 * 1000 / 0.5
