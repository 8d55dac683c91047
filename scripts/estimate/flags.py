"""The flags of the estimates, which train.py does not have."""

from dataclasses import dataclass

from config import COUNT, POSITIVE, knob


@dataclass(frozen=True)
class RankFlags:
    """The number of GPUs and nodes, which each estimate needs."""

    gpus: int = knob("", 1, "GPUs of the whole job, with one rank each.", limits=COUNT)
    nodes: int = knob("", 1, "Nodes, with the same number of GPUs each.", limits=COUNT)


@dataclass(frozen=True)
class EstimateArguments(RankFlags):
    """The flags of estimate_memory.py, which train.py does not have."""

    compare: bool = knob("", False, "List all config files, the fitting ones first.")
    knobs: bool = knob("", False, "First print all knobs, by where they come from, as a training run does.")
    gpu_memory: float | None = knob(
        "", None, "GiB of one GPU, for the verdict. Default: this machine's GPU.", limits=POSITIVE
    )
    cpu_memory: float | None = knob(
        "", None, "GiB of one node, as in --mem of sbatch, for the verdict.", limits=POSITIVE
    )
