"""Utilisation after each step, and the activity of the parts of a GPU.

Utilisation, which nvidia-smi also shows, is only the share of time in which any kernel ran. That share includes kernels
that only wait in a collective. The activity comes from NVML's GPU performance monitoring (GPM; Hopper and newer).
"""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pynvml
import torch

from distributed.collectives import gather_lists, local_world_size, rank
from records.writer import RunRecord
from shared.nvml import find_gpu
from training.speed import TrainSpeed

SHORTEST_INTERVAL = 0.1  # seconds; NVML needs at least this time between two samples
METRICS = {
    "sm_percent": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_percent": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_percent": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}


class Utilisation:
    """Utilisation and memory after each step: of each rank's GPU, or of its process if there is no GPU."""

    def __init__(self, record: RunRecord):
        self.record = record
        self.samples: list[dict[str, Any]] = []
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first call only starts the measurement

    def sample(self) -> None:
        self.samples.append(self.gpu_sample() if torch.cuda.is_available() else self.process_sample())

    def gpu_sample(self) -> dict:
        try:
            utilisation = torch.cuda.utilization()
        except Exception as error:  # nvidia-ml-py is missing, or the GPU partition does not report its utilisation
            utilisation = None
            self.record.reasons["callbacks.avg_gpu_util_%"] = str(error)
        return {
            "gpu_util_%": utilisation,
            "mem_alloc_MB": torch.cuda.memory_allocated() / 2**20,
            "mem_reserved_MB": torch.cuda.memory_reserved() / 2**20,
            "mem_total_MB": torch.cuda.get_device_properties().total_memory / 2**20,
        }

    def process_sample(self) -> dict:
        return {"cpu_util_%": self.process.cpu_percent(), "process_mem_MB": self.process.memory_info().rss / 2**20}

    def means(self) -> dict:
        """Return avg_<name> of every quantity and std_<name> of the utilisation: means over the ranks. Collective."""
        own = {}
        for name in self.samples[0] if self.samples else []:
            values = [sample[name] for sample in self.samples]
            complete = None not in values
            own[f"avg_{name}"] = statistics.fmean(values) if complete else None
            if "util" in name:
                own[f"std_{name}"] = statistics.pstdev(values) if complete else None
        ranks = [means for (means,) in gather_lists([own])]
        return {
            name: None if any(r[name] is None for r in ranks) else round(statistics.fmean(r[name] for r in ranks), 2)
            for name in own
        }


class GpuActivity:
    """Measure the activity of each node's first GPU over one steady step, or over several short ones.

    Profiled steps are not steady steps, so the profiler does not disturb the measurement.
    """

    def __init__(self, speed: TrainSpeed):
        self.speed = speed
        self.gpu: Any = None  # None if this rank does not measure, or no longer measures
        self.started: float | None = None  # time of the first sample
        self.activity: dict[str, float] = {}
        self.reason = f"less than {SHORTEST_INTERVAL} s of steady steps in a row"
        if not torch.cuda.is_available():
            self.reason = "no GPU"
        elif rank() % local_world_size() == 0:
            with self.nvml_errors():
                gpu = find_gpu()
                if pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
                    self.samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
                    self.gpu = gpu
                else:
                    self.reason = "this GPU does not count it; Hopper and newer GPUs do"

    def begin_step(self) -> None:
        if self.gpu and self.started is None and self.speed.started is not None:
            with self.nvml_errors():
                pynvml.nvmlGpmSampleGet(self.gpu, self.samples[0])
                self.started = time.perf_counter()

    def end_step(self) -> None:
        if not self.gpu or self.started is None:
            return
        seconds = time.perf_counter() - self.started
        if seconds >= SHORTEST_INTERVAL:
            with self.nvml_errors():
                pynvml.nvmlGpmSampleGet(self.gpu, self.samples[1])
                self.activity = {"seconds": round(seconds, 3), **compare_samples(*self.samples)}
            self.gpu = None
        elif self.speed.started is None:
            self.pause()

    def pause(self) -> None:
        """Discard the first sample: an evaluation or a save follows, which does not belong to a steady step."""
        self.started = None

    @contextlib.contextmanager
    def nvml_errors(self) -> Iterator[None]:
        """Keep an error of NVML as the reason for the missing measurement."""
        try:
            yield
        except pynvml.NVMLError as error:
            self.reason = f"NVML: {error}"
            self.gpu = None

    def write(self, record: RunRecord) -> None:
        """Record the activity of one GPU per node. Collective."""
        ranks = gather_lists([self.activity, self.reason])
        first_ranks = ranks[:: local_world_size()]
        if all(activity for activity, _ in first_ranks):
            record.update(gpu_activity=[activity for activity, _ in first_ranks])
        else:
            record.missing("gpu_activity", next(reason for activity, reason in first_ranks if not activity))


def compare_samples(earlier: Any, later: Any) -> dict[str, float]:
    """Return the METRICS in percent between two samples. Raises NVMLError if one of them was not counted."""
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(METRICS)
    request.sample1 = earlier
    request.sample2 = later
    for number, metric in enumerate(METRICS.values()):
        request.metrics[number].metricId = metric
    counted = pynvml.nvmlGpmMetricsGet(request).metrics[: len(METRICS)]
    for metric in counted:
        if metric.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(metric.nvmlReturn)
        if not math.isfinite(metric.value):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    return {name: round(metric.value, 1) for name, metric in zip(METRICS, counted, strict=True)}
