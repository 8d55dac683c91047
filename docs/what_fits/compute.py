"""Compute numbers.json for the page "What fits where" (docs/what-fits.md), with the code of the estimates.

python docs/what_fits/compute.py      # a quarter of an hour on two cores

In the reader's browser the page only adds numbers and takes the largest sum. numbers.json has the terms of these sums:
for each model, precision, accumulation and layout (nodes x GPUs of a node), the memory and messages of a rank under
each method. The memory of the passes is linear in the number of sequences, so two traces give it for any micro batch.
The file has only the operations after which the memory is largest for some micro batch.
"""

import json
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch
from transformers import LlamaConfig, Qwen2Config

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from distributed.config_file import read_config_file
from distributed.strategy import choose_strategy
from estimate.command_line import parse_memory_plan
from estimate.communication import bytes_between_nodes, sent_bytes
from estimate.compare import FITS, ORDER_TO_TRY, VERDICTS, settings_by_config
from estimate.memory import INTERVALS, state_parts, totals
from estimate.model_shape import PASSES, Alive, forward_pass, trace_shape
from job.directives import gpus_per_node, parse_count, read_directives
from models.chunked_loss import GPU_PIECES, chunk_bytes
from settings.settings import Settings
from shared.errors import WorkshopError
from shared.units import MB, MIB

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NUMBERS = HERE / "numbers.json"
WHOLE_STEP = ("parameters", "optimizer state")  # parts that exist in all intervals of a step
BY_INTERVAL = ("gradients", "buffers")  # parts that exist in some intervals
CHOICES = {
    "precision": ["bf16", "fp32"],
    "length": [256, 512, 1024, 2048, 4096],
    "batch": [1, 2, 4, 8, 16],
    "accumulation": [1, 4],
    "loss": ["full", "chunked"],
    "attention": ["eager", "sdpa"],
    "gpus": [1, 2, 4, 8, 16, 32, 64],
    "per_node": [1, 4, 8],
    "memory": [16, 24, 32, 40, 80, 141],
}
PRECISIONS = {"bf16": ["--bf16"], "fp32": ["--fp16", "False"]}
BLOOM = [f"bigscience/bloom-{size}" for size in ("560m", "1b1", "1b7", "3b", "7b1")]
GPT_LENGTH = 512  # positions of custom-gpt, the default of SEQ_LENGTH
# The configurations are those of the Hub. The models have 8,030,261,248 and 7,615,616,512 parameters
DOWNLOADED = {
    "meta-llama/Llama-3.1-8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
    "Qwen/Qwen2.5-7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
    ),
}
MODELS = [*BLOOM, "custom-gpt", *DOWNLOADED]
# The groups of methods, in the order of the page, with a name for each config. "FSDP" is FSDP2
GROUPS = {
    "A copy on each GPU": {"DDP": "DDP", "zero0": "ZeRO-0"},
    "ZeRO": {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"},
    "FSDP": {
        "shard_grad_op": "FSDP SHARD_GRAD_OP",
        "full_shard": "FSDP FULL_SHARD",
        "fsdp1_full_shard": "FSDP1 FULL_SHARD",
        "full_shard_activation_checkpointing": "FSDP FULL_SHARD + activation checkpointing",
        "hybrid_shard": "FSDP HYBRID_SHARD",
        "hybrid_shard_2x2": "FSDP HYBRID_SHARD 2 x 2",
    },
    "With CPU offload": {
        "zero1_cpu_offload": "ZeRO-1 + CPU offload",
        "zero2_cpu_offload": "ZeRO-2 + CPU offload",
        "zero2_cpu_offload_pinned_memory": "ZeRO-2 + CPU offload, pinned",
        "zero3_cpu_offload": "ZeRO-3 + CPU offload",
        "ds_zero3_offload": "ZeRO-3 + CPU offload, pinned",
        "full_shard_cpu_offload": "FSDP FULL_SHARD + CPU offload",
    },
}


def layouts() -> list[tuple[int, int]]:
    """Return all pairs of nodes and GPUs per node. A job with fewer GPUs than a node has uses one node."""
    found = set()
    for gpus, per_node in product(CHOICES["gpus"], CHOICES["per_node"]):
        nodes = max(1, gpus // per_node)
        found.add((nodes, gpus // nodes))
    return sorted(found, key=lambda layout: (layout[0] * layout[1], layout))


def plan(model: list[str], precision: str, *flags: object) -> Settings:
    """Return the settings of a training run. model: the flags that name the model."""
    return parse_memory_plan([*model, *PRECISIONS[precision], *map(str, flags)], environment={})


def settings_for_configs(settings: Settings) -> list[tuple[str, Settings | WorkshopError]]:
    """Return the name of each config that --compare lists, with its settings or the error."""
    found: list[tuple[str, Settings | WorkshopError]] = []
    chosen = settings_by_config(settings)
    gpus = settings.estimate.gpus
    for name in sorted(chosen, key=sort_key):
        try:
            found.append((name, read_config_file(chosen[name], gpus, gpus // settings.estimate.nodes)))
        except WorkshopError as error:
            found.append((name, error))
    return found


def sort_key(config: str) -> tuple[str, str]:
    folder, _, file = config.rpartition("/")
    return folder, file.removeprefix("ds_")


# 1. Numbers of each model


def model_numbers(model: list[str], lengths: list[int]) -> dict:
    """Compute the numbers of one model. model: the flags that name it. lengths: tokens of a sequence."""
    numbers: dict = {"passes": {}, "chunks": {}, "cells": {}}
    attentions = CHOICES["attention"] if model[1] in BLOOM else ["sdpa"]
    for precision in CHOICES["precision"]:
        numbers["parameters"] = trace_shape(plan(model, precision)).model
        numbers["chunks"][precision] = chunk_sizes(model, precision)
        numbers["passes"][precision] = {
            attention: pass_bytes(model, precision, attention, lengths) for attention in attentions
        }
        numbers["cells"][precision] = {
            accumulation: {
                f"{nodes}x{per_node}": layout_numbers(model, precision, accumulation, nodes, per_node)
                for nodes, per_node in layouts()
            }
            for accumulation in CHOICES["accumulation"]
        }
    return numbers


def layout_numbers(model: list[str], precision: str, accumulation: int, nodes: int, per_node: int) -> list[list[int]]:
    """Compute a row of numbers for each config. The row is empty if the config cannot be used with this layout.

    A row has: MiB on a GPU for each part in WHOLE_STEP; MiB on a GPU for each part in BY_INTERVAL and each interval;
    MiB of CPU memory on a node; MB that a rank sends in a step; MB that a rank sends to other nodes.
    """
    flags = ["--gradient_accumulation_steps", accumulation, "--gpus", nodes * per_node, "--nodes", nodes]
    rows = []
    for _, settings in settings_for_configs(plan(model, precision, *flags)):
        if isinstance(settings, WorkshopError):
            rows.append([])
            continue
        shape = trace_shape(settings)
        parts = state_parts(shape, settings)
        held = [sum(part.gpu for part in parts if part.name == name) for name in WHOLE_STEP]
        held += [
            sum(part.gpu for part in parts if part.name == name and interval in part.intervals)
            for name, interval in product(BY_INTERVAL, INTERVALS)
        ]
        held.append(totals(parts, per_node)[1])
        sent = [sent_bytes(shape, settings), bytes_between_nodes(shape, settings)]
        rows.append([round(size / MIB) for size in held] + [round(size / MB) for size in sent])
    return rows


def pass_bytes(model: list[str], precision: str, attention: str, lengths: list[int]) -> dict:
    """Compute the bytes held in the passes, for each cast of the weights, length, loss and activation checkpointing.

    `largest_states` describes the lists of numbers.
    """
    flags: list[object] = ["--attention", attention] if model[1] in BLOOM else []
    found: dict = {}
    for cast, config in {
        "autocast": [],
        "cast once": ["--deepspeed", REPOSITORY / "ds_configs" / "zero0.json"],
    }.items():
        found[cast] = {}
        for length in lengths:
            found[cast][length] = {
                loss: {
                    checkpointing: largest_states(model, precision, length, [*flags, *config, "--loss", loss, *words])
                    for checkpointing, words in {"no": [], "yes": ["--activation_checkpointing"]}.items()
                }
                for loss in CHOICES["loss"]
            }
    return found


def largest_states(model: list[str], precision: str, length: int, flags: list[object]) -> list[list]:
    """Return the memory states that are the largest of an interval for at least one micro batch of CHOICES.

    Each list has: the interval; bytes of activations that do not depend on the micro batch; bytes of activations for
    each sequence; bytes of the head; bytes of logits for each sequence. With the chunked loss, the last number is 1
    while a chunk exists, otherwise 0.
    """
    history_of_2, history_of_4 = (
        trace_shape(plan(model, precision, *flags, *micro_batch(batch, length))).history for batch in (2, 4)
    )
    chunked = "chunked" in flags
    found = []
    for interval in PASSES:
        pairs = zip(history_of_2[interval], history_of_4[interval], strict=True)
        states = [split_state(two, four, chunked) for two, four in pairs]
        if chunked:
            found += [[interval, *each] for each in states if each[3]]
            states = [each for each in states if not each[3]]
        for batch in CHOICES["batch"]:
            most = max(states, key=lambda each: each[0] + each[2] + batch * (each[1] + each[3]), default=None)
            if most and [interval, *most] not in found:
                found.append([interval, *most])
    return found


def split_state(two: Alive, four: Alive, chunked: bool) -> list[int]:
    """Split the bytes alive after an operation into a constant and the bytes per sequence.

    two, four: the bytes with micro batches of 2 and 4 sequences.
    """
    each, logits = ((four[kind] - two[kind]) // 2 for kind in (0, 1))
    return [two.activations - 2 * each, each, two.head, int(two.logits > 0) if chunked else logits]


def micro_batch(batch: int, length: int) -> list[object]:
    return ["--per_device_train_batch_size", batch, "--max_length", length]


def chunk_sizes(model: list[str], precision: str) -> dict:
    """Compute the bytes of a chunk of the loss, for each cast of the weights and number of tokens in a micro batch."""
    forward = forward_pass(plan(model, precision))
    sizes = json.loads(forward.config_json)
    counts = sorted({batch * length for batch, length in product(CHOICES["batch"], CHOICES["length"])})
    found = {}
    for cast, dtype in {"autocast": torch.float32, "cast once": forward.dtype}.items():
        weight = torch.empty(sizes["vocab_size"], sizes["hidden_size"], dtype=dtype, device="meta")
        found[cast] = {tokens: chunk_bytes(tokens, weight, forward.dtype, GPU_PIECES) for tokens in counts}
    return found


# 2. What all models have in common


def methods() -> list[dict]:
    """Return the properties of each config that the page needs. On one GPU, DDP is the plain Trainer."""
    found = []
    for name, settings in settings_for_configs(plan(["--model_name", "bigscience/bloom-560m"], "bf16", "--gpus", 4)):
        assert isinstance(settings, Settings), settings
        fsdp = settings.fsdp_config or {}
        strategy = choose_strategy(settings, settings.estimate.gpus)
        found.append(
            {
                "name": name.rpartition("/")[2].removesuffix(".json"),
                "config": name if "/" in name else "",
                "flags": "--deepspeed" if settings.deepspeed_config else "--fsdp --fsdp_config" if fsdp else "",
                "activations": "autocast" if strategy.autocasts else "cast once",
                "checkpointing": fsdp.get("activation_checkpointing", False),
                "experiments": experiments(name if "/" in name else ""),
            }
        )
    return found


def experiment_scripts(config: str) -> list[tuple[int, int, Path]]:
    """Return nodes, GPUs per node and path of the experiments that differ from plain training only in this config."""
    found = []
    families = (
        "baseline",
        "ddp",
        "deepspeed-*",
        "fsdp-single-gpu",
        "fsdp-multi-*",
        "fsdp-strategies",
        "methods-comparison",
    )
    for family in families:
        for script in sorted((REPOSITORY / "experiments").glob(f"{family}/**/*.slurm")):
            named = re.search(r"(?:ds|fsdp)_configs/[\w.]+", script.read_text())
            if (named[0] if named else "") == config:
                asked = read_directives(script)
                found.append((parse_count(asked["nodes"]), gpus_per_node(asked), script))
    return found


def experiments(config: str) -> dict[str, str]:
    """Return the experiment script for each layout.

    The keys "one node" and "several nodes" are for all other layouts. Their script starts the ranks with torchrun.
    """
    found: dict[str, str] = {}
    for nodes, per_node, script in experiment_scripts(config):
        path = str(script.relative_to(REPOSITORY))
        found.setdefault(f"{nodes}x{per_node}", path)
        if "run_torchrun" in script.read_text():
            found.setdefault("several nodes" if nodes > 1 else "one node", path)
    return found


def left_out() -> dict[str, dict[str, str]]:
    """Return, for each layout, the configs that cannot be used with it, and the reasons."""
    found: dict[str, dict[str, str]] = {}
    for nodes, per_node in layouts():
        settings = plan(["--model_name", "bigscience/bloom-560m"], "bf16", "--gpus", nodes * per_node, "--nodes", nodes)
        reasons = {
            name: error.what for name, error in settings_for_configs(settings) if isinstance(error, WorkshopError)
        }
        found[f"{nodes}x{per_node}"] = {
            name.rpartition("/")[2].removesuffix(".json"): why for name, why in reasons.items()
        }
    return found


def model_flags(folder: Path) -> dict[str, tuple[list[str], list[int]]]:
    """Return the flags and lengths of each model, by its name on the page.

    The custom GPT with more positions is a separate model. folder: gets the config.json of each model in DOWNLOADED.
    """
    found = {}
    for name in MODELS:
        path = name
        if name in DOWNLOADED:
            path = str(folder / name)
            DOWNLOADED[name].save_pretrained(path)
        lengths = [length for length in CHOICES["length"] if name != "custom-gpt" or length <= GPT_LENGTH]
        found[short_name(name)] = (["--model_name", path], lengths)
    for length in CHOICES["length"]:
        if length > GPT_LENGTH:
            found[f"custom-gpt {length}"] = (["--model_name", "custom-gpt", "--seq_length", str(length)], [length])
    return found


def short_name(model: str) -> str:
    return model.rpartition("/")[2]


def format_json(tree: object, indent: str = "\n") -> str:
    """Format JSON with a line for each key, and with each list in one line."""
    if not isinstance(tree, dict):
        return json.dumps(tree, separators=(",", ":"))
    inner = indent + " "
    lines = (f"{inner}{json.dumps(str(key))}: {format_json(value, inner)}" for key, value in tree.items())
    return "{" + ",".join(lines) + indent + "}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor() as processes:
        futures = {
            name: processes.submit(model_numbers, flags, lengths)
            for name, (flags, lengths) in model_flags(Path(folder)).items()
        }
        numbers = {
            "choices": {"model": [short_name(model) for model in MODELS]} | CHOICES,
            "model_names": {short_name(model): model for model in MODELS},
            "verdicts": VERDICTS,
            "fits": FITS,
            "whole_step": WHOLE_STEP,
            "intervals": INTERVALS,
            "groups": GROUPS,
            "order_to_try": ORDER_TO_TRY,
            "methods": methods(),
            "left_out": left_out(),
            "models": {},
        }
        for name, future in futures.items():
            numbers["models"][name] = future.result()
            print(name, flush=True)
    NUMBERS.write_text(format_json(numbers) + "\n")
    print(f"{NUMBERS.relative_to(REPOSITORY)}: {NUMBERS.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
