"""The prediction of estimate_memory.py for a run, made from its record only. The report shows it next to the memory
that was measured."""

import json
import subprocess
import sys
from functools import cache
from typing import NamedTuple

from config import DEFAULTS
from estimate.command_line import check_optimizer
from estimate.memory import MIB, MemoryPart, estimate_parts, totals, without_gpu
from settings.settings import settings_of
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
    """Predict the memory of a run. record: a run record as its file has it; records/schema.py describes it.

    None for a record without configs, and for a run that cannot be estimated: with another optimizer than AdamW, or
    with a model that cannot be traced. Needs no network, no GPU and no files of the run.
    """
    configs = record.get("configs")
    if not configs:
        return None
    settings = settings_of(
        DEFAULTS | record["settings"] | {"gpus": record["world_size"], "nodes": len(record["nodes"])},
        deepspeed_config=configs["deepspeed"],
        fsdp_config=configs["fsdp"],
    )
    try:
        check_optimizer(settings)
        parts = estimate_parts(settings, json.dumps(configs["model"]), measure_python_elsewhere())
    except WorkshopError:
        return None
    state = [
        sum(part.gpu + part.cpu for part in parts if part.name == name) / MIB
        for name in ("parameters", "gradients", "optimizer state")
    ]
    on_cpu = record["hardware"]["gpus"] == 0 or settings.trainer.use_cpu
    ranks_per_node = settings.estimate.gpus // settings.estimate.nodes
    on_gpu, on_node = totals(without_gpu(parts) if on_cpu else parts, ranks_per_node)
    return Predicted(None if on_cpu else on_gpu / MIB, on_node / MIB, *state)


@cache
def measure_python_elsewhere() -> MemoryPart:
    """Measure what estimate_memory.py measures as Python's memory, in a new process.

    The process of the report grows with the runs that it reads. A measurement by the training itself would not be a
    prediction: without a GPU, Python is nearly all of a small training's memory.
    """
    measure = """
from estimate.command_line import parse_memory_plan
from estimate.memory import estimate_parts
print(estimate_parts(parse_memory_plan(["--model_name", "tiny-bloom"], environment={}))[-1].cpu)
"""
    command = [sys.executable, "-c", measure]
    done = subprocess.run(command, cwd=REPOSITORY / "scripts", check=True, stdout=subprocess.PIPE, text=True)
    return MemoryPart("Python, libraries", 0, float(done.stdout), from_start=True)
