"""Judge whether a training run fits a GPU and a node, and compare all config files in this respect."""

from dataclasses import replace
from pathlib import Path

import torch

from distributed.collectives import ranks_per_gpu
from distributed.config_file import read_config_file
from estimate.memory import estimate_parts, totals
from estimate.model_shape import trace_shape
from settings.settings import Settings
from shared.errors import WorkshopError
from shared.paths import REPOSITORY
from shared.units import GIB

FITS = 0.9  # a training run fits up to this fraction of the memory, because the estimate does not count everything
VERDICTS = ("fits", "is tight", "does not fit")
WIDTH = 54  # characters of the column with the configs' names
# The order in which to try the methods, by the names of their config files. docs/comparison.md gives the reasons.
# The page "What fits where" sorts by this order
ORDER_TO_TRY = (
    *("DDP", "plain", "zero0"),
    "zero1",
    *("shard_grad_op", "zero2"),
    *("full_shard", "fsdp1_full_shard", "full_shard_activation_checkpointing", "zero3"),
    *("hybrid_shard", "hybrid_shard_2x2"),
    *("zero1_cpu_offload", "zero2_cpu_offload", "zero2_cpu_offload_pinned_memory"),
    *("zero3_cpu_offload", "ds_zero3_offload", "full_shard_cpu_offload"),
)


def verdict(what: str, needed: float, available: float | None) -> str:
    """Return a line with the needed memory, and whether it fits. needed: bytes. available: GiB, None if unknown."""
    if not available:
        return f"{what}: {needed / GIB:.1f} GiB needed"
    judged = VERDICTS[tightness(needed, available)]
    return f"{what}: {needed / GIB:.1f} GiB needed, {available:g} GiB there: {judged}"


def tightness(needed: float, available: float) -> int:
    """Return an index of VERDICTS, 0 to 2. needed: bytes. available: GiB."""
    if needed < FITS * available * GIB:
        return 0
    return 1 if needed < available * GIB else 2


def gpu_memory(settings: Settings) -> float | None:
    """Return a rank's part of a GPU's memory in GiB: of --gpu_memory, or of this machine's GPU. None if unknown.

    As many ranks share a GPU as the site allows (RANKS_PER_GPU).
    """
    here = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None
    memory = settings.estimate.gpu_memory or here
    sharing = min(ranks_per_gpu(), settings.estimate.gpus // settings.estimate.nodes)
    return memory and memory / sharing


def comparison(settings: Settings) -> str:
    """Return a table of plain training (or DDP) and all config files.

    Rows are sorted by verdict, then in the order in which to try them. The first config that fits is marked.
    """
    trainer = settings.trainer
    given = settings.estimate
    cut = settings.model.tensor_parallel > 1
    for flag, value in (("deepspeed", trainer.deepspeed), ("fsdp", trainer.fsdp), ("tensor_parallel", cut)):
        if value:
            raise settings.error(flag, "cannot be combined with --compare, which tries all configs", "leave it out")
    trace_shape(settings)  # a model that cannot be estimated causes one error here, for all configs
    rows = []
    refused = []
    for name, chosen in settings_by_config(settings).items():
        try:
            complete = read_config_file(chosen, given.gpus, given.gpus // given.nodes)
        except WorkshopError as error:
            refused.append(f"{name:{WIDTH}}{error.what}; {error.remedy}")
        else:
            rows.append(config_row(name, complete))
    gpus = f"{given.gpus} GPU(s) on {given.nodes} node(s)"
    batch = f"micro batch {trainer.per_device_train_batch_size} x {settings.data.max_length} tokens"
    lines = [
        f"{settings.model.model_name}, {settings.precision}, {batch}, {gpus}",
        f"{'config':{WIDTH}}{'GiB/GPU':>8}{'GiB/node':>10}  verdict",
        *(line for *_, line in sorted(rows)),
    ]
    if min(rows)[0] == 0:
        lines[2] += "  <- try first"
    if refused:
        lines += ["cannot be combined with these options:", *refused]
    hints = {
        "for a verdict: --gpu_memory, in GiB, and --cpu_memory": not gpu_memory(settings),
        "the memory of a node is not judged: give --cpu_memory, in GiB": gpu_memory(settings) and not given.cpu_memory,
    }
    return "\n".join([*lines, *(hint for hint, applies in hints.items() if applies)])


def settings_by_config(settings: Settings) -> dict[str, Settings]:
    """Return the settings with each config file, by name. The first entry is DDP or plain, without a file.

    The files are not read yet.
    """
    found = {"DDP" if settings.estimate.gpus > 1 else "plain": settings}
    for path in sorted((REPOSITORY / "ds_configs").glob("*.json")):
        found[f"ds_configs/{path.name}"] = replace(settings, trainer=replace(settings.trainer, deepspeed=str(path)))
    for path in sorted((REPOSITORY / "fsdp_configs").glob("*.json")):
        trainer = replace(settings.trainer, fsdp="True", fsdp_config=str(path))
        found[f"fsdp_configs/{path.name}"] = replace(settings, trainer=trainer)
    return found


def config_row(name: str, settings: Settings) -> tuple[int | None, int, str]:
    """Return the verdict of a config as an index of VERDICTS, its place in the order, and its line of the table.

    The verdict is None if no memory is known. The user's own configs have the last place.
    """
    on_gpu, on_node = totals(estimate_parts(settings), settings.estimate.gpus // settings.estimate.nodes)
    memories = ((on_gpu, gpu_memory(settings)), (on_node, settings.estimate.cpu_memory))
    tight = max([tightness(needed, available) for needed, available in memories if available], default=None)
    judged = "" if tight is None else VERDICTS[tight]
    line = f"{name:{WIDTH}}{on_gpu / GIB:8.1f}{on_node / GIB:10.1f}  {judged}"
    place = [*ORDER_TO_TRY, Path(name).stem].index(Path(name).stem)
    return tight, place, line.rstrip()
