"""What the estimates say of the very run that records them. A prediction that fails ends no training."""

import dataclasses

import torch
import torch.distributed as dist

import measure_bandwidth
from config import Options
from estimate_memory import estimate, totals, without_gpu
from estimate_time import GB, Batch, Rates, predict_step
from parallel import watchdog
from parallel.distributed import local_world_size, rank, same_everywhere, world_size
from planned import check_optimizer
from training.flops import forget_measuring, memory_bandwidth
from training.record import RunRecord

MIB = 2**20
RATES = ("matmul_tflops", "memory_gb_per_s", "bus_gb_per_s")
# Of the all-reduce that is timed where no bandwidth test was: milliseconds on a good network
BUS_BYTES = 256 * MIB if torch.cuda.is_available() else 4 * MIB


class Prediction:
    """Notes what the estimates say: of the memory when it is made, before the model is loaded; of a step at the end."""

    def __init__(self, options: Options, record: RunRecord, peak: float, device: torch.device):
        """peak: operations per second of one rank. Collective."""
        self.options = options
        self.record = record
        watchdog.beat("estimating memory")
        predict_memory(options, record)
        watchdog.beat("timing memory and network")
        self.rates = Rates(peak, memory_bandwidth(device), bus_bandwidth(record, device))

    def note_step(self, samples: float) -> None:
        """samples: that all ranks together have trained on."""
        predict_time(self.options, self.record, self.rates, samples)


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
        record.missing("estimate", first_line_of(error))
        return
    predicted = {"gpu_mib": round(on_gpu / MIB, 1) if gpu else None, "node_mib": round(on_node / MIB, 1)}
    record.content["missing"]["estimate.step"] = "it is predicted at the end of the training"
    if not gpu:
        record.content["missing"]["estimate.gpu_mib"] = "no GPU"
    record.update(estimate=predicted | {"step": None, "rates": dict.fromkeys(RATES)})


def bus_bandwidth(record: RunRecord, device: torch.device) -> float | None:
    """Bytes per second between the ranks: of the job's bandwidth test, else measured here. Collective.

    None where nothing can be said: of one rank, and of a training on the CPU beside GPUs, which a test would measure.
    """
    if world_size() == 1 or device.type != measure_bandwidth.DEVICE:
        return None
    tested = same_everywhere(record.content.get("bandwidth"))
    if tested:
        return tested["bus_bandwidth_gb_per_s"] * GB
    message = torch.ones(BUS_BYTES // 4, device=measure_bandwidth.DEVICE)
    sent, seconds = measure_bandwidth.probe(message)
    del message
    forget_measuring()
    return measure_bandwidth.bus_bandwidth(seconds, sent, dist.get_world_size()) * GB


def predict_time(options: Options, record: RunRecord, rates: Rates, samples: float) -> None:
    """Note the estimate of a step, for sequences as long as they were; rank 0 makes it.

    samples: that all ranks together have trained on. To be called when the record has what the training measured.
    """
    predicted = record.content.get("estimate")
    if rank() != 0 or not predicted:
        return
    measured = (rates.matmul / 1e12, rates.memory / GB, rates.bus and rates.bus / GB)
    predicted["rates"] = {name: value and round(value, 4) for name, value in zip(RATES, measured, strict=True)}
    if rates.bus is None:
        record.content["missing"]["estimate.rates.bus_gb_per_s"] = "one rank has nobody to talk to"
    try:
        predicted["step"] = predicted_step(options, record.content["train"], rates, samples)
        record.content["missing"].pop("estimate.step", None)
    except Exception as error:  # as above
        record.content["missing"]["estimate.step"] = first_line_of(error)
    record.update(estimate=predicted)


def predicted_step(options: Options, train: dict, rates: Rates, samples: float) -> dict:
    """Raises ValueError with the reason for a run of which nothing can be said."""
    if not samples:
        raise ValueError("no step was done")
    if rates.bus is None and world_size() > 1:
        raise ValueError("the network between the ranks was not measured")
    size = options.values["per_device_train_batch_size"]
    length = round((train["real_tokens"] + train["padding_tokens"]) / samples)
    batch = Batch(size, length, counted=max(1, round(size * train["counted_tokens"] / samples)))
    step = predict_step(of_this_run(options), rates, batch)
    content = {"seconds": step.seconds, "samples_per_second": step.samples_per_second} | dataclasses.asdict(step)
    del content["samples"]
    return {name: float(f"{value:.4g}") for name, value in content.items()}


def of_this_run(options: Options) -> Options:
    """As estimate_memory.py reads them: with the number of ranks and nodes."""
    ranks = {"gpus": world_size(), "nodes": world_size() // local_world_size()}
    return dataclasses.replace(options, values=options.values | ranks)


def first_line_of(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
