"""Compute the numbers of the page "What fits where" (docs/what-fits.md): numbers.json, by the code of the estimates.

PYTHONPATH=scripts python docs/what_fits/compute.py      # a quarter of an hour on two cores

The page only adds, in the reader's browser, and takes the largest sum. So the file has everything else: for each model,
precision, accumulation and layout (nodes x GPUs of a node) what a rank of each method holds and sends. What the passes
of a micro batch hold grows by the same with each sequence, after each operation. So two traces give it for any number
of sequences, and the file has those operations after which most is held.
"""

import json
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch
from transformers import LlamaConfig, Qwen2Config

from estimate.command_line import parse_memory_plan, read_config_files
from estimate.communication import bytes_between_nodes, sent_bytes
from estimate.compare import FITS, VERDICTS, settings_by_config
from estimate.memory import MIB, MOMENTS, state_parts, totals
from estimate.model_shape import PASSES, Alive, forward_pass, trace_shape, uses_autocast
from estimate.time import uses_offload
from settings.settings import Settings
from shared.errors import WorkshopError
from training.chunked_loss import GPU_PIECES, chunk_bytes

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NUMBERS = HERE / "numbers.json"
MB = 10**6
WHOLE_STEP = ("parameters", "optimizer state")  # held in all moments of a step
IN_MOMENTS = ("gradients", "buffers")  # held in some
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
GPT_LENGTH = 512  # its positions, unless SEQ_LENGTH says more
DOWNLOADED = {  # by their config.json on the Hub: 8,030,261,248 and 7,615,616,512 parameters
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


def layouts() -> list[tuple[int, int]]:
    """Nodes, and GPUs of each; a job with fewer GPUs than a node has uses one node."""
    found = set()
    for gpus, per_node in product(CHOICES["gpus"], CHOICES["per_node"]):
        nodes = max(1, gpus // per_node)
        found.add((nodes, gpus // nodes))
    return sorted(found, key=lambda layout: (layout[0] * layout[1], layout))


def plan(model: list[str], precision: str, *flags: object) -> Settings:
    """The settings of a training. model: the flags that name it."""
    return parse_memory_plan([*model, *PRECISIONS[precision], *map(str, flags)], environment={})


def with_each_config(settings: Settings) -> list[tuple[str, Settings | WorkshopError]]:
    """As estimate_memory.py --compare: the name of each config, and the settings with it, or why there are none."""
    found: list[tuple[str, Settings | WorkshopError]] = []
    chosen = settings_by_config(settings)
    for name in sorted(chosen, key=order):
        try:
            found.append((name, read_config_files(chosen[name])))
        except WorkshopError as error:
            found.append((name, error))
    return found


def order(config: str) -> tuple[str, str]:
    folder, _, file = config.rpartition("/")
    return folder, file.removeprefix("ds_")


# 1. Of each model


def of_model(model: list[str], lengths: list[int]) -> dict:
    """Numbers of one model. model: its flags."""
    numbers: dict = {"passes": {}, "chunks": {}, "cells": {}}
    attentions = CHOICES["attention"] if model[1] in BLOOM else ["sdpa"]
    for precision in CHOICES["precision"]:
        numbers["parameters"] = trace_shape(plan(model, precision)).model
        numbers["chunks"][precision] = of_chunks(model, precision)
        numbers["passes"][precision] = {
            attention: of_passes(model, precision, attention, lengths) for attention in attentions
        }
        numbers["cells"][precision] = {
            accumulation: {
                f"{nodes}x{per_node}": of_layout(model, precision, accumulation, nodes, per_node)
                for nodes, per_node in layouts()
            }
            for accumulation in CHOICES["accumulation"]
        }
    return numbers


def of_layout(model: list[str], precision: str, accumulation: int, nodes: int, per_node: int) -> list[list[int]]:
    """Numbers of each config, an empty list where it cannot be taken.

    MiB on a GPU: of WHOLE_STEP, and of IN_MOMENTS in each of MOMENTS; MiB of the CPUs of a node; MB that a rank sends
    in a step; MB of these between nodes.
    """
    flags = ["--gradient_accumulation_steps", accumulation, "--gpus", nodes * per_node, "--nodes", nodes]
    rows = []
    for _, settings in with_each_config(plan(model, precision, *flags)):
        if isinstance(settings, WorkshopError):
            rows.append([])
            continue
        shape = trace_shape(settings)
        parts = state_parts(shape, settings)
        held = [sum(part.gpu for part in parts if part.name == name) for name in WHOLE_STEP]
        held += [
            sum(part.gpu for part in parts if part.name == name and moment in part.moments)
            for name, moment in product(IN_MOMENTS, MOMENTS)
        ]
        held.append(totals(parts, per_node)[1])
        sent = (sent_bytes(shape, settings), bytes_between_nodes(shape, settings))
        rows.append([round(size / MIB) for size in held] + [round(size / MB) for size in sent])
    return rows


def of_passes(model: list[str], precision: str, attention: str, lengths: list[int]) -> dict:
    """Bytes that the passes hold, by cast of the weights, length, loss and activation checkpointing: see `fullest`."""
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
                    checkpointing: fullest(model, precision, length, [*flags, *config, "--loss", loss, *words])
                    for checkpointing, words in {"no": [], "yes": ["--activation_checkpointing"]}.items()
                }
                for loss in CHOICES["loss"]
            }
    return found


def fullest(model: list[str], precision: str, length: int, flags: list[object]) -> list[list]:
    """The operations after which most is held in a part of the passes, for some micro batch of CHOICES.

    Of each: the moment, bytes of activations and head without any sequence, bytes of both for each sequence, bytes of
    the head, and bytes of logits for each sequence. The chunked loss has 1 in the last place while there is a chunk.
    """
    of_two, of_four = (
        trace_shape(plan(model, precision, *flags, *micro_batch(batch, length))).history for batch in (2, 4)
    )
    chunked = "chunked" in flags
    found = []
    for moment in PASSES:
        lines = [line(two, four, chunked) for two, four in zip(of_two[moment], of_four[moment], strict=True)]
        if chunked:
            found += [[moment, *each] for each in lines if each[3]]
            lines = [each for each in lines if not each[3]]
        for batch in CHOICES["batch"]:
            most = max(lines, key=lambda each: each[0] + each[2] + batch * (each[1] + each[3]), default=None)
            if most and [moment, *most] not in found:
                found.append([moment, *most])
    return found


def line(two: Alive, four: Alive, chunked: bool) -> list[int]:
    """Split the bytes held after an operation into those without any sequence and those of each sequence."""
    each, logits = ((four[kind] - two[kind]) // 2 for kind in (0, 1))
    return [two.activations - 2 * each, each, two.head, int(two.logits > 0) if chunked else logits]


def micro_batch(batch: int, length: int) -> list[object]:
    return ["--per_device_train_batch_size", batch, "--max_length", length]


def of_chunks(model: list[str], precision: str) -> dict:
    """Bytes of a chunk of the chunked loss, by how the weights are cast and by the tokens of a micro batch."""
    forward = forward_pass(plan(model, precision))
    sizes = json.loads(forward.config_json)
    counts = sorted({batch * length for batch, length in product(CHOICES["batch"], CHOICES["length"])})
    found = {}
    for cast, dtype in {"autocast": torch.float32, "cast once": forward.dtype}.items():
        weight = torch.empty(sizes["vocab_size"], sizes["hidden_size"], dtype=dtype, device="meta")
        found[cast] = {tokens: chunk_bytes(tokens, weight, forward.dtype, GPU_PIECES) for tokens in counts}
    return found


# 2. Of all models


def methods() -> list[dict]:
    """What the page needs to know of each config; on one GPU DDP is the plain Trainer."""
    found = []
    for name, settings in with_each_config(plan(["--model_name", "bigscience/bloom-560m"], "bf16", "--gpus", 4)):
        assert isinstance(settings, Settings), settings
        fsdp = settings.fsdp_config or {}
        found.append(
            {
                "name": name.rpartition("/")[2].removesuffix(".json"),
                "config": name if "/" in name else "",
                "flags": "--deepspeed" if settings.deepspeed_config else "--fsdp --fsdp_config" if fsdp else "",
                "activations": "autocast" if uses_autocast(settings) else "cast once",
                "checkpointing": fsdp.get("activation_checkpointing", False),
                "offload": uses_offload(settings),
                "experiments": experiments(name if "/" in name else ""),
            }
        )
    return found


def scripts_of(config: str) -> list[tuple[int, int, Path]]:
    """Nodes, GPUs of each, and path of the experiments that differ from a plain training by this config alone."""
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
            text = script.read_text()
            named = re.search(r"(?:ds|fsdp)_configs/[\w.]+", text)
            if (named[0] if named else "") == config:
                nodes, per_node = (
                    int(re.search(rf"^#SBATCH --{what}=(\d+)", text, re.MULTILINE)[1])
                    for what in ("nodes", "gpus-per-node")
                )
                found.append((nodes, per_node, script))
    return found


def experiments(config: str) -> dict[str, str]:
    """The script by layout; for other layouts one of one node and one of several, where torchrun starts the ranks."""
    found: dict[str, str] = {}
    for nodes, per_node, script in scripts_of(config):
        path = str(script.relative_to(REPOSITORY))
        found.setdefault(f"{nodes}x{per_node}", path)
        if "run_torchrun" in script.read_text():
            found.setdefault("several nodes" if nodes > 1 else "one node", path)
    return found


def left_out() -> dict[str, dict[str, str]]:
    """By layout: the configs that cannot be taken there, and why."""
    found: dict[str, dict[str, str]] = {}
    for nodes, per_node in layouts():
        settings = plan(["--model_name", "bigscience/bloom-560m"], "bf16", "--gpus", nodes * per_node, "--nodes", nodes)
        reasons = {name: error.what for name, error in with_each_config(settings) if isinstance(error, WorkshopError)}
        found[f"{nodes}x{per_node}"] = {
            name.rpartition("/")[2].removesuffix(".json"): why for name, why in reasons.items()
        }
    return found


def flags_of_models(folder: Path) -> dict[str, tuple[list[str], list[int]]]:
    """Flags and lengths by the page's name of a model. The custom GPT with more positions is another model.

    folder: where the config.json of the models is written that would be downloaded.
    """
    found = {}
    for name in MODELS:
        where = name
        if name in DOWNLOADED:
            where = str(folder / name)
            DOWNLOADED[name].save_pretrained(where)
        lengths = [length for length in CHOICES["length"] if name != "custom-gpt" or length <= GPT_LENGTH]
        found[short(name)] = (["--model_name", where], lengths)
    for length in CHOICES["length"]:
        if length > GPT_LENGTH:
            found[f"custom-gpt {length}"] = (["--model_name", "custom-gpt", "--seq_length", str(length)], [length])
    return found


def short(model: str) -> str:
    return model.rpartition("/")[2]


def as_text(tree: object, indent: str = "\n") -> str:
    """JSON with a line for each key, and each list in one line."""
    if not isinstance(tree, dict):
        return json.dumps(tree, separators=(",", ":"))
    inner = indent + " "
    lines = (f"{inner}{json.dumps(str(key))}: {as_text(value, inner)}" for key, value in tree.items())
    return "{" + ",".join(lines) + indent + "}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor() as processes:
        of_models = {
            name: processes.submit(of_model, flags, lengths)
            for name, (flags, lengths) in flags_of_models(Path(folder)).items()
        }
        numbers = {
            "choices": {"model": [short(model) for model in MODELS]} | CHOICES,
            "model_names": {short(model): model for model in MODELS},
            "verdicts": VERDICTS,
            "fits": FITS,
            "whole_step": WHOLE_STEP,
            "moments": MOMENTS,
            "methods": methods(),
            "left_out": left_out(),
            "models": {},
        }
        for name, future in of_models.items():
            numbers["models"][name] = future.result()
            print(name, flush=True)
    NUMBERS.write_text(as_text(numbers) + "\n")
    print(f"{NUMBERS.relative_to(REPOSITORY)}: {NUMBERS.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
