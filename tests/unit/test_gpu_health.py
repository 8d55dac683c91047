"""Tests of preflight's check of a GPU's health, with values of NVML that are made up."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from checks import machine
from checks.gpu_health import gpu_health

NVIDIA = "00000000-1111-2222-3333-444444444444"  # torch shows a UUID without the prefix GPU-
GetClock, GetEcc = "nvmlDeviceGetClockInfo", "nvmlDeviceGetTotalEccErrors"
Throttling, OldThrottling = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
V100 = {
    "nvmlDeviceGetHandleByUUID": f"GPU-{NVIDIA}",
    Throttling: 0x1,  # idle
    GetClock: 135,
    "nvmlDeviceGetMaxClockInfo": 1530,
    GetEcc: (2, 0),  # by pynvml's numbers of the types: corrected, uncorrected
    "nvmlDeviceGetPowerManagementLimit": 300000,  # milliwatts
    "nvmlDeviceGetPowerManagementDefaultLimit": 300000,
    "nvmlDeviceGetApplicationsClock": 1290,
    "nvmlDeviceGetDefaultApplicationsClock": 1290,
}
NO_VALUES = dict.fromkeys(V100.keys() - {"nvmlDeviceGetHandleByUUID"})
MODEL = {"device_count": 1, "get_device_name": "Tesla V100-SXM2-32GB", "get_device_capability": (7, 0)}


@pytest.fixture(autouse=True)
def uuid_in_pytorch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=NVIDIA))


@pytest.fixture
def nvml(monkeypatch):
    """Replace NVML's functions. A GPU does not have a value that is None."""

    def build(**changes: object) -> None:
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        for name, answer in (V100 | changes).items():

            def call(*arguments, answer=answer):
                assert arguments[0] == f"GPU-{NVIDIA}"  # the UUID, or the handle that it has given
                if answer is None:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
                return answer[arguments[1]] if isinstance(answer, tuple) else answer

            monkeypatch.setattr(pynvml, name, call)

    return build


OK = "not throttled, SM clock 135 of 1530 MHz (idle), 0 uncorrected and 2 corrected ECC errors"
POWER, CLOCK = "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetApplicationsClock"
CRASH = "drain the node and tell the administrators: a run on this GPU may crash"
SLOW = "exclude the node and tell the administrators: runs on this GPU are slow"


@pytest.mark.promise("preflight reports the health of each GPU")
@pytest.mark.parametrize(
    ("changes", "state", "found"),
    [
        ({}, "ok", OK),
        ({Throttling: 0x4, GetClock: 1380}, "ok", OK.replace("135 of 1530 MHz (idle)", "1380 of 1530 MHz")),
        ({Throttling: 0x2 | 0x10 | 0x100}, "ok", OK.replace(" (idle)", "")),  # settings, not faults
        ({POWER: 200000}, "ok", f"{OK}, power limit 200 W instead of 300 W"),
        ({CLOCK: 1005}, "ok", f"{OK}, application clock 1005 MHz instead of 1290 MHz"),
        ({Throttling: 0x8 | 0x40}, "warn", "throttled: hardware slowdown, too hot (slowed down by the h"),
        ({Throttling: 0x20}, "warn", "throttled: too hot (slowed down by the driver), SM clock 135 of 1530 MHz, 0 "),
        ({Throttling: 0x80 | 0x4}, "warn", "throttled: power brake (signal from the power supply), SM clock"),
        ({GetEcc: (7, 1)}, "fail", OK.replace("0 uncorrected and 2", "1 uncorrected and 7")),
        ({GetEcc: (0, 3), Throttling: 0x8}, "fail", "throttled: hardware slowdown, "),
        ({GetEcc: None}, "ok", "not throttled, SM clock 135 of 1530 MHz (idle), no ECC counters"),
        (NO_VALUES, "ok", "throttling unknown, SM clock ? of ? MHz, no ECC counters"),
        ({"nvmlDeviceGetHandleByUUID": None}, "ok", "health not checked: Not Supported"),
    ],
)  # fmt: skip
def test_state_and_findings_of_a_gpu(nvml, changes, state, found):
    nvml(**changes)
    seen, text, *remedy = gpu_health(0)
    assert (seen, text[: len(found)]) == (state, found)
    assert remedy == {"ok": [], "warn": [SLOW], "fail": [CRASH]}[state]


def test_an_older_driver_knows_only_the_old_name_for_throttling(nvml):
    nvml(**{Throttling: None, OldThrottling: 0x40})
    state, text, _ = gpu_health(0)
    assert state == "warn" and text.startswith("throttled: too hot (slowed down by the hardware), ")


def test_without_nvidias_driver_the_health_is_not_checked(monkeypatch):
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert gpu_health(0) == ("ok", "health not checked: NVML Shared Library Not Found")


def test_preflight_prints_the_health_in_the_line_of_its_gpu(nvml, monkeypatch):
    for name, answer in (MODEL | {"is_available": True, "get_arch_list": ["sm_70"]}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    nvml(**{GetEcc: (0, 2)})
    name = "Tesla V100-SXM2-32GB, compute capability 7.0"
    health = "not throttled, SM clock 135 of 1530 MHz (idle), 2 uncorrected and 0 corrected ECC errors"
    assert list(machine.gpus()) == [("fail", "GPU 0", f"{name}, {health}", CRASH)]
