"""A stub for NVML, the library that nvidia-smi uses, on machines without a GPU.

pynvml's own functions call it with their real ctypes arguments and structures, and get NVML's real return codes.
"""

import ctypes
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

WATTS = 250
GPM = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: 81.25,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 30.5,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 44.0,
}


class StubNvml:
    """GPUs whose values are made up. The first GPU draws WATTS, the second twice as much, and so on.

    errors: return code of a function that fails, by its name. mig: True if the GPUs are divided; None if they cannot
    be divided. gpm: whether the GPUs count their activity. values: those that differ from GPM. clock: the time in
    seconds.
    """

    def __init__(
        self,
        uuids: tuple[str, ...],
        errors: dict[str, int] | None = None,
        mig: bool | None = None,
        gpm: bool = True,
        values: dict[int, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.uuids = uuids
        self.errors = errors or {}
        self.mig = mig
        self.gpm = gpm
        self.values = GPM | (values or {})
        self.clock = clock
        self.sampled: dict[int, float] = {}  # address of each GPM sample -> its time

    def __getattribute__(self, name: str) -> Any:
        """Return a function of NVML, which fails if `errors` says so."""
        errors = object.__getattribute__(self, "errors") if name.startswith("nvml") else {}
        return (lambda *arguments: errors[name]) if name in errors else object.__getattribute__(self, name)

    def nvmlInitWithFlags(self, flags):
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetHandleByUUID(self, uuid, device):
        if uuid.value.decode() not in self.uuids:
            return pynvml.NVML_ERROR_NOT_FOUND
        set_address(device._obj, 1 + self.uuids.index(uuid.value.decode()))
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetUUID(self, device, text, size):
        text.value = self.uuids[address(device) - 1].encode()
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetTotalEnergyConsumption(self, device, millijoules):
        millijoules._obj.value = round(1000 * WATTS * address(device) * self.clock())
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetEnforcedPowerLimit(self, device, milliwatts):
        milliwatts._obj.value = 300_000
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetMigMode(self, device, current, pending):
        if self.mig is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        current._obj.value = pending._obj.value = self.mig
        return pynvml.NVML_SUCCESS

    def nvmlGpmQueryDeviceSupport(self, device, support):
        support._obj.isSupportedDevice = self.gpm
        return pynvml.NVML_SUCCESS

    def nvmlGpmSampleAlloc(self, sample):
        set_address(sample._obj, 1 + len(self.sampled))
        self.sampled[address(sample._obj)] = 0
        return pynvml.NVML_SUCCESS

    def nvmlGpmSampleGet(self, device, sample):
        self.sampled[address(sample)] = self.clock()
        return pynvml.NVML_SUCCESS

    def nvmlGpmMetricsGet(self, question):
        asked = question._obj
        samples = [self.sampled[address(sample)] for sample in (asked.sample1, asked.sample2)]
        if asked.version != pynvml.NVML_GPM_METRICS_GET_VERSION or samples[1] - samples[0] < 0.1:
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn = self.errors.get(f"metric {metric.metricId}", pynvml.NVML_SUCCESS)
            metric.value = self.values[metric.metricId]
        return pynvml.NVML_SUCCESS


def address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value


def set_address(pointer: Any, number: int) -> None:
    ctypes.c_void_p.from_buffer(pointer).value = number


def use_stub(stub: StubNvml, uuid: str, patch: Callable[[Any, str, Any], Any] = setattr) -> None:
    """Let this process see one GPU, with this UUID, in the modules that ask NVML. The training stays on the CPU."""
    import measure.energy
    import measure.gpu_activity
    import shared.nvml

    patch(pynvml, "nvmlLib", stub)
    patch(pynvml, "_nvmlGetFunctionPointer_cache", {})
    patch(shared.nvml, "gpu_uuid", lambda index: uuid)
    for module in (shared.nvml, measure.energy, measure.gpu_activity):
        patch(module, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
