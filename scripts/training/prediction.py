"""What the estimates say of the very run that records them. A prediction that fails ends no training."""

import dataclasses

import torch

from config import Options
from estimate_memory import check_optimizer, estimate, totals, without_gpu
from parallel.distributed import local_world_size, rank, world_size
from training.record import RunRecord

MIB = 2**20


def predict_memory(options: Options, record: RunRecord) -> None:
    """Note the estimate of the memory; rank 0 makes it. To be called before the model is loaded."""
    if rank() != 0:
        return
    gpu = torch.cuda.is_available() and not options.values["use_cpu"]
    try:
        own = of_this_run(options)
        check_optimizer(own)
        held = estimate(own)
        on_gpu, on_node = totals(held if gpu else without_gpu(held), local_world_size())
    except Exception as error:  # whatever a model or a library does that nobody has foreseen
        record.missing("estimate", reason_of(error))
        return
    predicted = {"gpu_mib": round(on_gpu / MIB, 1) if gpu else None, "node_mib": round(on_node / MIB, 1)}
    no_rates = dict.fromkeys(("matmul_tflops", "memory_gb_per_s", "bus_gb_per_s"))
    record.content["missing"]["estimate.step"] = "it is predicted at the end of the training"
    if not gpu:
        record.content["missing"]["estimate.gpu_mib"] = "no GPU"
    record.update(estimate=predicted | {"step": None, "rates": no_rates})


def of_this_run(options: Options) -> Options:
    """As estimate_memory.py reads them: with the number of ranks and nodes."""
    ranks = {"gpus": world_size(), "nodes": world_size() // local_world_size()}
    return dataclasses.replace(options, values=options.values | ranks)


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
