"""Compare the bytes that a rank sends by the formulas with those that benchmarks/communication.py counted."""

import json
from pathlib import Path

import pytest

import estimate_memory
from estimate.command_line import parse_memory_plan, parse_plan
from estimate.communication import Ring, bytes_between_nodes, sent_bytes
from estimate.model_shape import trace_shape
from helpers import program
from settings.settings import Settings

pytestmark = pytest.mark.usefixtures("in_the_repository")


def plan(*flags: object) -> Settings:
    return parse_plan([str(flag) for flag in flags], environment={})


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


@pytest.mark.parametrize("strategy", dict.fromkeys(strategy for strategy, _ in COUNTED))
def test_sent_bytes_agree_with_counts_of_real_trainings(strategy, tmp_path):
    for accumulation in (1, 4):
        counted = ring_bytes(COUNTED[strategy, accumulation]["collectives"])
        settings = counted_training(strategy, accumulation, tmp_path)
        assert sent_bytes(trace_shape(settings), settings) == pytest.approx(counted, rel=0.02), accumulation


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
    for strategy in ("DDP", "ZeRO-2", "ZeRO-3", "FULL_SHARD"):
        settings = plan("--model_name", "tiny-bloom", *FLAGS[strategy])
        assert sent_bytes(trace_shape(settings), settings) == 0


def test_the_command_shows_the_bytes_that_a_rank_sends():
    settings = parse_memory_plan(["--model_name", "tiny-bloom", "--gpus", "2"], environment={})
    sent = sent_bytes(trace_shape(settings), settings)
    assert f"each rank sends {sent / 1e9:.3g} GB per optimizer step\n" in estimate_memory.memory_table(settings)
