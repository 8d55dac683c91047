"""Energy of the GPUs from NVML's counters, in joules since the driver was loaded (Volta and newer).

A counter covers one whole GPU. Each rank reads only the counter of its own GPU, so no joule counts twice.
"""

import contextlib
import math
from typing import Any

import pynvml
import torch

from distributed.collectives import gather_lists
from records.writer import RunRecord
from shared.nvml import find_gpu

JOULES_PER_KWH = 3.6e6


class EnergyMeter:
    """Energy counter of this rank's GPU. Creating it is collective.

    reason: why the energy is unknown, empty if it is known. It is the same on all ranks.
    """

    def __init__(self) -> None:
        self.gpu: Any = None
        self.uuid = ""
        own_reason = "no GPU"
        if torch.cuda.is_available():
            own_reason = self.open_counter()
        ranks = gather_lists([own_reason, self.uuid])
        self.reason = next((reason for reason, _ in ranks if reason), "")
        if not self.reason and len({uuid for _, uuid in ranks}) < len(ranks):
            self.reason = "several ranks share a GPU, and its counter does not separate them"
        self.last_joules = 0.0
        self.start()

    def start(self) -> None:
        """Count the job's energy from here."""
        self.joules_at_start = self.joules()

    def open_counter(self) -> str:
        """Find this rank's GPU. Return the reason if it has no counter of its own, otherwise an empty text."""
        try:
            self.gpu = find_gpu()
            self.uuid = pynvml.nvmlDeviceGetUUID(self.gpu)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu)
            with contextlib.suppress(pynvml.NVMLError_NotSupported):  # this GPU cannot be divided
                if pynvml.nvmlDeviceGetMigMode(self.gpu)[0]:
                    return "the GPU is divided (MIG), and its counter does not separate the parts"
        except pynvml.NVMLError as error:
            return f"NVML has no energy counter of this GPU ({error})"
        return ""

    def joules(self) -> float:
        """Return the state of the counter, NaN if the energy is unknown, and always after the counter has gone back."""
        if self.reason:
            return math.nan
        try:
            joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu) / 1000
        except pynvml.NVMLError:  # the training must not fail because of a counter
            return math.nan
        # After a counter has gone back, differences to earlier states are wrong, and some are negative. So the state
        # stays NaN, because no comparison with NaN is true
        self.last_joules = joules if joules >= self.last_joules else math.nan
        return self.last_joules

    def record_kwh(self, record: RunRecord) -> None:
        """Record the energy of the whole job: of all GPUs since the start, and of its earlier attempts. Collective."""
        ranks = [joules for (joules,) in gather_lists([self.joules() - self.joules_at_start])]
        if self.reason:
            return  # TrainSpeed.record_energy has recorded why
        kwh = sum(ranks) / JOULES_PER_KWH + record.earlier_kwh
        if math.isnan(kwh):
            reason = "NVML's counter failed or went back"
            if math.isnan(record.earlier_kwh):
                reason = "an earlier attempt ended before it recorded its energy"
            record.reasons["energy.kwh"] = reason
        record.update(energy=record.content["energy"] | {"kwh": round(kwh, 6)})
