"""Predict the memory of a run from its record only. The report shows the prediction next to the measured memory."""

import json
import subprocess
import sys
from functools import cache
from typing import Any, NamedTuple

from config import DEFAULTS
from estimate.command_line import check_optimizer
from estimate.flags import RankFlags
from estimate.memory import MemoryPart, estimate_parts, move_to_cpu, totals
from settings.settings import build_settings
from shared.errors import WorkshopError
from shared.paths import REPOSITORY
from shared.units import MIB


class Predicted(NamedTuple):
    """Predicted memory of a run in MiB.

    gpu_mib: the fullest GPU, None for a training run on the CPU. node_mib: the first node. parameters, gradients,
    optimizer_state: these parts on the rank that holds most.
    """

    gpu_mib: float | None
    node_mib: float
    parameters: float
    gradients: float
    optimizer_state: float


def predicted_memory(record: dict) -> Predicted | None:
    """Predict the memory of a run only from its record, without network, GPU or other files.

    Return None for a run that cannot be estimated, such as one with an unknown optimizer, or with a model that cannot
    be traced.
    """
    try:
        parts = predicted_parts(record, measure_python_elsewhere())
    except WorkshopError:
        return None
    state = [
        sum(part.gpu + part.cpu for part in parts if part.name == name) / MIB
        for name in ("parameters", "gradients", "optimizer state")
    ]
    on_gpu, on_node = totals(parts, record["world_size"] // len(record["nodes"]))
    return Predicted(None if trained_on_cpu(record) else on_gpu / MIB, on_node / MIB, *state)


def predicted_parts(record: dict, python: MemoryPart) -> list[MemoryPart]:
    """Estimate the memory of a run from its record. python: the memory of Python itself.

    Raises WorkshopError (exit code 2) for a run that cannot be estimated.
    """
    configs = record["configs"]
    own = {"gpus": record["world_size"], "nodes": len(record["nodes"])}
    if trained_on_cpu(record):
        own["use_cpu"] = True
    settings = build_settings(
        DEFAULTS | record["settings"] | own,
        RankFlags,
        deepspeed_config=configs["deepspeed"],
        fsdp_config=configs["fsdp"],
    )
    check_optimizer(settings)
    parts = estimate_parts(settings, json.dumps(configs["model"]), python)
    return move_to_cpu(parts) if settings.trainer.use_cpu else parts


def trained_on_cpu(record: dict) -> bool:
    return record["hardware"]["gpus"] == 0 or record["settings"].get("use_cpu", False)


@cache
def measure_python_elsewhere() -> MemoryPart:
    """Measure Python's memory in a new process, as estimate_memory.py measures it.

    The report's own process grows with the runs that it reads. The training's own measurement would make the prediction
    circular: without a GPU, Python is nearly all of a small training's memory.
    """
    measure = """
from estimate.command_line import parse_memory_plan
from estimate.memory import estimate_parts
print(estimate_parts(parse_memory_plan(["--model_name", "tiny-bloom"], environment={}))[-1].cpu)
"""
    command = [sys.executable, "-c", measure]
    # In a session of its own, the process does not print a traceback when Ctrl-C ends the report
    options: dict[str, Any] = {"check": True, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    done = subprocess.run(command, cwd=REPOSITORY / "scripts", **options)
    return MemoryPart("Python, libraries", 0, float(done.stdout), from_start=True)
