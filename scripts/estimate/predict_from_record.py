"""What estimate_memory.py would have said of a run, from its record alone: for the report, beside what was measured."""

import json
import subprocess
import sys
from functools import cache
from typing import NamedTuple

from config import DEFAULTS
from estimate.command_line import ADAMW, check_optimizer
from estimate.memory import MIB, Held, held_by_rank, totals, without_gpu
from estimate.model_shape import shape_of
from settings.command_line import Options
from shared.errors import WorkshopError
from shared.paths import REPOSITORY


class Predicted(NamedTuple):
    """MiB of the fullest GPU, None for a training on the CPU, and of the first node's memory; of these on the rank that
    holds most: parameters, gradients and optimizer state."""

    gpu_mib: float | None
    node_mib: float
    parameters: float
    gradients: float
    optimizer_state: float


def predicted_memory(record: dict) -> Predicted | None:
    """record: a run record, as its file has it; records/schema.py describes it.

    None for one without configs, and for a run that cannot be estimated: of another optimizer than AdamW, or of a
    model that cannot be traced. Needs no network, no GPU and no files of the run.
    """
    configs = record.get("configs")
    if not configs:
        return None
    options = options_of(record)
    try:
        check_optimizer(options)
        held = held_by_rank(shape_of(json.dumps(configs["model"]), options), options, python_of_the_estimate())
    except WorkshopError:
        return None
    state = [
        sum(part.gpu + part.cpu for part in held if part.what == what) / MIB
        for what in ("parameters", "gradients", "optimizer state")
    ]
    ranks_per_node = options.values["gpus"] // options.values["nodes"]
    if record["hardware"]["gpus"] == 0 or options.values["use_cpu"]:
        _, on_node = totals(without_gpu(held), ranks_per_node)
        return Predicted(None, on_node / MIB, *state)
    on_gpu, on_node = totals(held, ranks_per_node)
    return Predicted(on_gpu / MIB, on_node / MIB, *state)


@cache
def python_of_the_estimate() -> Held:
    """Measure what estimate_memory.py measures as Python's memory, in a new process.

    The process of the report grows with the runs that it reads. A measurement by the training itself would not be a
    prediction: without a GPU, Python is nearly all of a small training's memory.
    """
    measure = """
from estimate.command_line import options_of_plan
from estimate.memory import estimate
print(estimate(options_of_plan(["--model_name", "tiny-bloom"], "", environment={}))[-1].cpu)
"""
    command = [sys.executable, "-c", measure]
    done = subprocess.run(command, cwd=REPOSITORY / "scripts", check=True, stdout=subprocess.PIPE, text=True)
    return Held("Python, libraries", 0, float(done.stdout), from_start=True)


def options_of(record: dict) -> Options:
    """The options that the run had, as far as its memory depends on them, with its ranks and nodes."""
    ranks = {"gpus": record["world_size"], "nodes": len(record["nodes"])}
    flags = {"optim": ADAMW[0], "use_cpu": False}  # a record keeps them only where they were given
    options = Options(DEFAULTS | flags | record["settings"] | ranks, names={})
    options.fsdp_config = record["configs"]["fsdp"]
    deepspeed_config = record["configs"]["deepspeed"]
    if deepspeed_config is not None:
        options.deepspeed_config = {"zero_optimization": {}} | deepspeed_config
    return options
