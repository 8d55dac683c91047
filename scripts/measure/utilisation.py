"""Utilisation and memory after each step: of each rank's GPU, or of its process if there is no GPU."""

import statistics
from typing import Any

import psutil
import torch

from distributed.collectives import gather_lists
from records.writer import RunRecord


class Utilisation:
    """Samples of the steps, and their means."""

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
