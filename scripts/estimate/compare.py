"""Judge whether a training fits a GPU and a node, and compare all config files by that."""

import math
from dataclasses import replace

import torch

from estimate.command_line import read_config_files
from estimate.memory import GIB, estimate_parts, totals
from estimate.model_shape import trace_shape
from estimate.time import Rates, predict_step, read_rates, uses_offload
from settings.settings import Settings
from shared.errors import WorkshopError
from shared.paths import REPOSITORY

FITS = 0.9  # of a GPU or node: the rest is for what is not counted
VERDICTS = ("fits", "is tight", "does not fit")
WIDTH = 54  # of the column with the files' names


def verdict(what: str, needed: float, there: float | None) -> str:
    """Return a line that says whether `needed` bytes fit into the GiB that are there, if that is known."""
    if not there:
        return f"{what}: {needed / GIB:.1f} GiB needed"
    return f"{what}: {needed / GIB:.1f} GiB needed, {there:g} GiB there: {VERDICTS[tightness(needed, there)]}"


def tightness(needed: float, there: float) -> int:
    """Return 0 to 2: an index of VERDICTS. needed: bytes. there: GiB."""
    if needed < FITS * there * GIB:
        return 0
    return 1 if needed < there * GIB else 2


def gpu_memory(settings: Settings) -> float | None:
    """GiB of one GPU: those given by --gpu_memory, otherwise those of the GPU that is here."""
    here = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None
    return settings.estimate.gpu_memory or here


def comparison(settings: Settings) -> str:
    """Plain training (or DDP) and all files of the two folders: those that fit first, and the fastest of them first."""
    trainer = settings.trainer
    given = settings.estimate
    for flag, value in (("deepspeed", trainer.deepspeed), ("fsdp", trainer.fsdp)):
        if value:
            raise settings.error(flag, "is what --compare chooses", "leave it out")
    if settings.model.tensor_parallel > 1:
        raise settings.error("tensor_parallel", "is not compared", "leave it out, or leave out --compare")
    trace_shape(settings)  # raises for a model that cannot be estimated
    rates = read_rates(settings)
    choices = []
    refused = []
    for name, chosen in settings_by_config(settings).items():
        try:
            complete = read_config_files(chosen)
        except WorkshopError as error:
            refused.append(f"{name:{WIDTH}}{error.what}; {error.way_out}")
        else:
            choices.append(choice(name, complete, rates))
    gpus = f"{given.gpus} GPU(s) on {given.nodes} node(s)"
    batch = f"micro batch {trainer.per_device_train_batch_size} x {settings.data.max_length} tokens"
    lines = [
        f"{settings.model.model_name}, {settings.precision}, {batch}, {gpus}",
        f"{'config':{WIDTH}}{'GiB/GPU':>8}{'GiB/node':>10}  {'verdict':14}{'s/step':>8}",
        *(line for _, line in sorted(choices)),
    ]
    if refused:
        lines += ["cannot be combined with these options:", *refused]
    hints = {
        "for a verdict: --gpu_memory, in GiB, and --cpu_memory": not gpu_memory(settings),
        "the memory of a node is not judged: give --cpu_memory, in GiB": gpu_memory(settings) and not given.cpu_memory,
        "for seconds of a step: --matmul_tflops, --memory_bandwidth and, for several GPUs, --bus_bandwidth": not rates,
        "seconds without communication: give --bus_bandwidth": rates and given.gpus > 1 and rates.bus == math.inf,
        "no seconds for offload: how fast the CPU and its memory are is not known": rates,
    }
    return "\n".join([*lines, *(hint for hint, applies in hints.items() if applies)])


def settings_by_config(settings: Settings) -> dict[str, Settings]:
    """The settings with each config file, by its name, before the file is read. The first have none: DDP or plain."""
    found = {"DDP" if settings.estimate.gpus > 1 else "plain": settings}
    for path in sorted((REPOSITORY / "ds_configs").glob("*.json")):
        found[f"ds_configs/{path.name}"] = replace(settings, trainer=replace(settings.trainer, deepspeed=str(path)))
    for path in sorted((REPOSITORY / "fsdp_configs").glob("*.json")):
        trainer = replace(settings.trainer, fsdp="True", fsdp_config=str(path))
        found[f"fsdp_configs/{path.name}"] = replace(settings, trainer=trainer)
    return found


def choice(name: str, settings: Settings, rates: Rates | None) -> tuple[tuple[float, float, float], str]:
    """Return what a config is sorted by, and its line."""
    on_gpu, on_node = totals(estimate_parts(settings), settings.estimate.gpus // settings.estimate.nodes)
    memories = ((on_gpu, gpu_memory(settings)), (on_node, settings.estimate.cpu_memory))
    tight = max([tightness(needed, there) for needed, there in memories if there], default=None)
    seconds = predict_step(settings, rates).seconds if rates and not uses_offload(settings) else math.inf
    said = "" if tight is None else VERDICTS[tight]
    shown = "" if seconds == math.inf else f"{seconds:.3f}"
    line = f"{name:{WIDTH}}{on_gpu / GIB:8.1f}{on_node / GIB:10.1f}  {said:14}{shown:>8}"
    return (tight or 0, seconds, on_gpu), line.rstrip()
