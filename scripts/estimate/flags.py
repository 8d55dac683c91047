"""The flags of the estimates, which train.py does not have."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankFlags:
    """The number of GPUs and nodes, which each estimate needs."""

    gpus: int = field(default=1, metadata={"help": "GPUs of the whole job, with one rank each."})
    nodes: int = field(default=1, metadata={"help": "Nodes, with the same number of GPUs each."})


@dataclass(frozen=True)
class EstimateArguments(RankFlags):
    """The flags of estimate_memory.py, which train.py does not have."""

    compare: bool = field(default=False, metadata={"help": "List all config files, the fitting ones first."})
    knobs: bool = field(
        default=False, metadata={"help": "First print all knobs, by where they come from, as a training run does."}
    )
    gpu_memory: float | None = field(
        default=None, metadata={"help": "GiB of one GPU, for the verdict. Default: this machine's GPU."}
    )
    cpu_memory: float | None = field(
        default=None, metadata={"help": "GiB of one node, as in --mem of sbatch, for the verdict."}
    )
