"""Activity of the parts of a GPU, from NVML's GPU performance monitoring (GPM; Hopper and newer).

torch.cuda.utilization, which nvidia-smi also shows, is only the share of time in which any kernel ran. That share
includes kernels that only wait in a collective.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import pynvml
import torch

from distributed.collectives import gather_lists, local_world_size, rank
from measure.speed import TrainSpeed
from records.writer import RunRecord
from shared.nvml import find_gpu

SHORTEST_INTERVAL = 0.1  # seconds; NVML needs at least this time between two samples
METRICS = {
    "sm_percent": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_percent": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_percent": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}


class GpuActivityMeter:
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
