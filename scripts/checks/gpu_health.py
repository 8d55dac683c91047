"""Health of a GPU: throttling, memory errors and clocks, read through NVML.

NVML is the library that nvidia-smi uses. For each value that a GPU does not have, NVML reports an error. nvidia-smi
rejects a whole query if the driver does not know one of its fields.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from shared.nvml import find_gpu

# Reasons for low clocks that are a fault. The other reasons are normal: a GPU is idle, or has reached its power limit
FAULTS = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "too hot (slowed down by the driver)",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "too hot (slowed down by the hardware)",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake (signal from the power supply)",
}


def gpu_health(index: int) -> tuple[str, ...]:
    """Return the state (ok, warn or fail), the findings, and a remedy if there is a problem.

    index: the GPU's number in PyTorch.
    """
    try:
        gpu = find_gpu(index)
    except pynvml.NVMLError as error:
        return "ok", f"health not checked: {error}"
    reasons = read(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
    if reasons is None:  # drivers before 535 know only the old name
        reasons = read(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    faults = [fault for bit, fault in FAULTS.items() if bit & (reasons or 0)]
    uncorrected, corrected = ecc_errors(gpu, "UNCORRECTED"), ecc_errors(gpu, "CORRECTED")
    findings = [f"throttled: {', '.join(faults)}" if faults else "not throttled"]
    if reasons is None:
        findings = ["throttling unknown"]
    findings.append(sm_clock(gpu, idle=bool(pynvml.nvmlClocksEventReasonGpuIdle & (reasons or 0))))
    if uncorrected is None:
        findings.append("no ECC counters")
    else:
        findings.append(f"{uncorrected} uncorrected and {corrected or 0} corrected ECC errors")
    text = ", ".join([*findings, *lowered_limits(gpu)])
    if uncorrected:
        return "fail", text, "drain the node and tell the administrators: a run on this GPU may crash"
    if faults:
        return "warn", text, "exclude the node and tell the administrators: runs on this GPU are slow"
    return "ok", text


def read(query: Callable[..., int], *arguments: Any) -> int | None:
    """Return NVML's answer. None if this GPU or driver does not report the value."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def ecc_errors(gpu: Any, kind: str) -> int | None:
    """Return the number of memory errors since the driver was loaded."""
    error_type = getattr(pynvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
    return read(pynvml.nvmlDeviceGetTotalEccErrors, gpu, error_type, pynvml.NVML_VOLATILE_ECC)


def sm_clock(gpu: Any, idle: bool) -> str:
    now = read(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM)
    highest = read(pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_SM)
    return f"SM clock {now or '?'} of {highest or '?'} MHz" + " (idle)" * idle


def lowered_limits(gpu: Any) -> Iterator[str]:
    """Yield a text for each limit below its default. Such a GPU is slower than others of its kind."""
    milliwatts = read(pynvml.nvmlDeviceGetPowerManagementLimit, gpu)
    default = read(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu)
    if milliwatts and default and milliwatts < default:
        yield f"power limit {milliwatts // 1000} W instead of {default // 1000} W"
    clock = read(pynvml.nvmlDeviceGetApplicationsClock, gpu, pynvml.NVML_CLOCK_GRAPHICS)
    default = read(pynvml.nvmlDeviceGetDefaultApplicationsClock, gpu, pynvml.NVML_CLOCK_GRAPHICS)
    if clock and default and clock < default:
        yield f"application clock {clock} MHz instead of {default} MHz"
