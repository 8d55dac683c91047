"""The metrics that a column of tables.yaml may name: values of a run, and relations between the values of two runs."""

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numpy import format_float_positional

from config import has_random_weights
from records.schema import Profile
from reporting.runs import Missing, ReportedRun
from tasks import TASKS
from tasks.passage import PASSAGE

MIB_PER_GIB = 1024
BYTES_PER_MIB = 2**20
HELD = {"parameters": "held_parameters", "gradients": "held_gradients", "optimizer state": "held_optimizer_state"}
MAX_EPOCHS = 20  # A table has at most this many columns for evaluation losses.

Value = Any  # a number, a text or a Missing
Read = Callable[[ReportedRun], Value]


@dataclass(frozen=True)
class Metric:
    header: str
    read: Read
    note: Callable[[ReportedRun], str] = lambda run: ""  # shown next to the value
    about: str = ""  # shown below a table with the metric


# --- values of a run


def recorded(path: str, scale: float = 1) -> Read:
    """A number of the run record."""

    def read(run: ReportedRun) -> Value:
        value = run.get(path)
        return value if scale == 1 or isinstance(value, Missing) else value / scale

    return read


def logged(kind: str, statistic: str, scale: float = 1) -> Read:
    """A number of the memory logs. kind: `gpu` or `cpu`. statistic: `peak`, `minimum` or `mean`."""

    def read(run: ReportedRun) -> Value:
        memory = getattr(run, kind)
        return memory if isinstance(memory, Missing) else getattr(memory, statistic) / scale

    return read


def eval_loss(epoch: int) -> Metric:
    """Loss of the n-th evaluation. Its note gives the exact epoch: the last evaluation may be at 2.93 instead of 3."""

    def read(run: ReportedRun) -> Value:
        evaluations = run.record.eval
        if run.completed and len(evaluations) < epoch:
            return Missing(f"evaluations: {len(evaluations)}")
        return run.get(f"eval.{epoch - 1}.loss")

    def note(run: ReportedRun) -> str:
        return f"epoch {run.record.eval[epoch - 1].epoch:.4g}"

    return Metric(f"Eval Loss (Epoch {epoch})", read, note)


def questions_note(run: ReportedRun) -> str:
    settings = run.record.settings
    random = has_random_weights(settings.model_name or "", bool(settings.from_scratch))
    reason = ", random weights" if random and run.record.f1 == 0 else ""
    rows = next((task.rows for task in TASKS if task.name == run.record.kind), PASSAGE.rows)
    return f"{run.record.eval_size} {rows}{reason}"


def score(name: str) -> Read:
    """Exact Match or F1, in percent."""

    def read(run: ReportedRun) -> Value:
        value = run.get(name)
        left_out = isinstance(value, Missing) and run.completed and run.record.settings.em_f1 is False
        return Missing("the run had EM_F1=False") if left_out else value

    return read


def combined(compute: Callable[..., float], *reads: Read) -> Read:
    """A number that is computed from others. If one of them is missing, so is this number, for the same reason."""

    def read(run: ReportedRun) -> Value:
        values = [each(run) for each in reads]
        return next((value for value in values if isinstance(value, Missing)), None) or compute(*values)

    return read


def profiled(number: Callable[[Profile], float]) -> Read:
    """Mean of a number over all ranks of a profiled run."""

    def read(run: ReportedRun) -> Value:
        if not run.record.profile:
            return Missing(run.record.missing.get("profile") or "the run had no --profile")
        return statistics.fmean(map(number, run.record.profile))

    return read


def share_of_step(part: str) -> Read:
    """Share of a step that one part takes, in percent."""
    return profiled(lambda rank: 100 * getattr(rank, part) / rank.seconds_per_step)


def largest(ranks: str, part: str, scale: float = 1) -> Read:
    """Maximum of a number over all ranks. ranks: a list in the run record with one entry per rank."""

    def read(run: ReportedRun) -> Value:
        found = [getattr(rank, part) for rank in getattr(run.record, ranks) or []]
        return max(found) / scale if found and None not in found else run.explain_missing(f"{ranks}.{part}")

    return read


def steady_energy(name: str) -> Read:
    """A value of the record's energy that is computed from the joules of the steady steps.

    The record has one reason for all of these values, under the name of the joules.
    """

    def read(run: ReportedRun) -> Value:
        value = run.get(f"energy.{name}")
        return run.explain_missing("energy.steady_joules") if isinstance(value, Missing) else value

    return read


def activity(part: str) -> Read:
    """Mean activity of a part of the GPU over the first GPU of each node, in percent. part: a field of GpuActivity."""

    def read(run: ReportedRun) -> Value:
        nodes = run.record.gpu_activity
        return statistics.fmean(getattr(node, part) for node in nodes) if nodes else run.explain_missing("gpu_activity")

    return read


def peak_process(run: ReportedRun) -> Value:
    """Largest resident memory of a rank's process, as the kernel counts it."""
    return max(run.record.peak_process_mib or [], default=run.explain_missing("peak_process_mib"))


@cache
def predict_memory(record: str) -> Any:
    """Predict the memory of a run. record: the part of its run record that the prediction needs, as JSON.

    The cache makes runs with equal settings share one prediction.
    """
    from estimate.predict_from_record import predicted_memory  # This import takes seconds.

    return predicted_memory(json.loads(record))


def estimated(part: str) -> Read:
    """A prediction of estimate_memory.py for the settings of the run. part: a field of Predicted."""

    def read(run: ReportedRun) -> Value:
        if not run.record.configs:
            return Missing("no GPU" if part == "gpu_mib" and run.record.hardware.gpus == 0
                           else "the run record has no configs to predict from")  # fmt: skip
        needed = run.record.model_dump(mode="json", include={"configs", "settings", "world_size", "hardware"})
        # The number of nodes without their names, which would make the cache miss for runs with equal settings
        needed["nodes"] = ["a node"] * len(run.record.nodes)
        found = predict_memory(json.dumps(needed, sort_keys=True))
        if not found:
            return Missing("the memory of this training cannot be predicted")
        return Missing("no GPU") if getattr(found, part) is None else getattr(found, part)

    return read


def difference(measured: Read, predicted: Read) -> Read:
    """Measured minus predicted value, in percent of the prediction."""
    return combined(lambda found, expected: (found - expected) / expected * 100, measured, predicted)


METRICS = {
    "model": Metric("Model", recorded("settings.model_name")),
    "gpus": Metric("GPUs", recorded("world_size")),
    "parameters": Metric("Parameters", recorded("parameters")),
    "trainable_parameters": Metric("Trainable parameters", recorded("trainable_parameters")),
    "num_layers": Metric("Layers", recorded("settings.num_layers")),
    "batch_size": Metric("Batch per GPU", recorded("settings.per_device_train_batch_size")),
    "global_batch": Metric("Global batch", recorded("knobs.global batch.effective")),
    "learning_rate": Metric("Learning rate", recorded("settings.learning_rate")),
    "steps": Metric("Steps", recorded("train.steps")),
    "steps_per_epoch": Metric("Steps per epoch", recorded("steps_per_epoch")),
    "train_loss": Metric("Train loss", recorded("train.loss_mean")),
    "eval_loss": Metric("Final eval loss", recorded("eval.-1.loss")),
    **{f"eval_loss_{epoch}": eval_loss(epoch) for epoch in range(1, MAX_EPOCHS + 1)},
    "runtime": Metric("Train runtime (s)", recorded("train.runtime_s")),
    "steps_per_second": Metric("Train steps/s", recorded("train.steps_per_second")),
    "samples_per_second": Metric("Train samples/s", recorded("train.samples_per_second")),
    "steady_samples_per_second": Metric("Steps alone, samples/s", recorded("train.steady_samples_per_second")),
    "tokens_per_second": Metric("Real tokens/s", recorded("train.steady_tokens_per_second")),
    "padding": Metric(
        "Padding (%)",  # The model processes real tokens and padding
        combined(
            lambda real, padded: 100 * padded / (real + padded),
            recorded("train.real_tokens"),
            recorded("train.padding_tokens"),
        ),
    ),
    "mfu": Metric("MFU (%)", recorded("train.mfu_percent")),
    "eval_samples_per_second": Metric("Eval samples/s", recorded("eval.-1.samples_per_second")),
    "exact_match": Metric("Exact Match (%)", score("exact_match"), questions_note),
    "f1": Metric("F1 (%)", score("f1"), questions_note),
    "peak_gpu": Metric("Peak GPU memory (MiB)", logged("gpu", "peak")),
    "low_gpu": Metric("Minimum GPU memory (MiB)", logged("gpu", "minimum")),
    "mean_gpu": Metric("Mean GPU memory (MiB)", logged("gpu", "mean")),
    "mean_gpu_gib": Metric("GPU memory, default (GiB)", logged("gpu", "mean", MIB_PER_GIB)),
    "peak_cpu": Metric(
        "Peak CPU memory (MiB)",
        logged("cpu", "peak"),
        about="Peak CPU memory is psrecord's largest sample of all processes of the training together. A sample taken "
        "while a process forks counts its memory twice, so it can be far too high.",
    ),
    "peak_process": Metric(
        "Peak CPU memory of a rank (MiB)",
        peak_process,
        about="Peak CPU memory of a rank is the kernel's own count for one process, so a fork does not change it.",
    ),
    "mean_cpu": Metric("Mean CPU memory (MiB)", logged("cpu", "mean")),
    "callback_samples_per_second": Metric("Samples/s, callback", recorded("callbacks.train/samples_per_second_mean")),
    "callback_gpu_gib": Metric("GPU memory, callback (GiB)", recorded("callbacks.avg_mem_alloc_MB", MIB_PER_GIB)),
    "callback_gpu_mib": Metric("GPU memory allocated (MiB)", recorded("callbacks.avg_mem_alloc_MB")),
    "gpu_utilisation": Metric("GPU utilisation (%)", recorded("callbacks.avg_gpu_util_%")),
    "gpu_hours": Metric("GPU-hours", ReportedRun.gpu_hours),
    "output_dir": Metric("Output folder", lambda run: run.output or run.explain_missing("output_dir")),
    "kwh": Metric("kWh", recorded("energy.kwh")),
    "joules_per_question": Metric("J per question", steady_energy("joules_per_question")),
    "joules_per_1000_tokens": Metric("J per 1,000 real tokens", steady_energy("joules_per_1000_tokens")),
    "mean_watts": Metric("Mean power of a GPU (W)", steady_energy("mean_watts")),
    "power_share": Metric(
        "Mean power, share of the limit (%)",
        combined(
            lambda watts, limit: 100 * watts / limit,
            steady_energy("mean_watts"),
            recorded("hardware.gpu_power_limit_w"),
        ),
    ),
    "sm_activity": Metric("SM activity (%)", activity("sm_percent")),
    "tensor_activity": Metric("Tensor core activity (%)", activity("tensor_percent")),
    "dram_activity": Metric("DRAM activity (%)", activity("dram_percent")),
    "bus_bandwidth": Metric("Bus bandwidth (GB/s)", recorded("bandwidth.bus_bandwidth_gb_per_s")),
    "allocated_gpu": Metric("Allocated by PyTorch (MiB)", largest("peak_gpu_memory", "allocated_mib")),
    "reserved_gpu": Metric("Reserved by PyTorch (MiB)", largest("peak_gpu_memory", "reserved_mib")),
    "estimated_gpu": Metric("Estimated GPU memory (MiB)", estimated("gpu_mib")),
    "difference_gpu": Metric(
        "GPU memory: measured minus estimated (%)", difference(logged("gpu", "peak"), estimated("gpu_mib"))
    ),
    "estimated_cpu": Metric("Estimated CPU memory (MiB)", estimated("node_mib")),
    "difference_cpu": Metric(
        "CPU memory: measured minus estimated (%)", difference(logged("cpu", "peak"), estimated("node_mib"))
    ),
    "held_parameters": Metric("Parameters (MiB)", largest("held", "parameters", BYTES_PER_MIB)),
    "held_gradients": Metric("Gradients (MiB)", largest("held", "gradients", BYTES_PER_MIB)),
    "held_optimizer_state": Metric("Optimizer state (MiB)", largest("held", "optimizer_state", BYTES_PER_MIB)),
    "held_state": Metric(
        "Model state (MiB)",
        combined(lambda *parts: sum(parts), *(largest("held", part.replace(" ", "_"), BYTES_PER_MIB) for part in HELD)),
    ),
    "estimated_parameters": Metric("Parameters, estimated (MiB)", estimated("parameters")),
    "estimated_gradients": Metric("Gradients, estimated (MiB)", estimated("gradients")),
    "estimated_optimizer_state": Metric("Optimizer state, estimated (MiB)", estimated("optimizer_state")),
    "profiled_step": Metric("Step (ms)", profiled(lambda rank: 1000 * rank.seconds_per_step)),
    "profiled_data": Metric("Data (%)", share_of_step("data")),
    "profiled_forward": Metric("Forward (%)", share_of_step("forward")),
    "profiled_backward": Metric("Backward (%)", share_of_step("backward")),
    "profiled_communication": Metric("Communication (%)", share_of_step("communication")),
    "profiled_optimizer": Metric("Optimizer (%)", share_of_step("optimizer")),
    "profiled_other": Metric("Other (%)", share_of_step("other")),
    "profiled_hidden": Metric("Hidden communication (%)", share_of_step("hidden_communication")),
}


def metric_value(metric: str, run: ReportedRun) -> Value:
    """Return a number, a text or a Missing. Call this only for metrics that are shown, because a prediction is slow."""
    return METRICS[metric].read(run)


# --- relations between two runs


@dataclass(frozen=True)
class Relation:
    """A column ``relation.metric``. It is computed from the values and the GPU counts of the row and its reference."""

    header: str
    compute: Callable[[float, float, int, int], float]


RELATIONS = {
    "reference": Relation("{metric}, {reference}", lambda value, base, gpus, base_gpus: base),
    "saving": Relation("{metric}: saving (%)", lambda value, base, gpus, base_gpus: (base - value) / base * 100),
    "change": Relation("{metric}: change (%)", lambda value, base, gpus, base_gpus: (value - base) / base * 100),
    "factor": Relation("{metric}: scale factor", lambda value, base, gpus, base_gpus: value / base),
    "speedup": Relation("{metric}: scale factor", lambda value, base, gpus, base_gpus: base / value),
    "weak_efficiency": Relation("Efficiency, time (%)", lambda value, base, gpus, base_gpus: base / value * 100),
    "efficiency": Relation(
        "Efficiency, per GPU (%)", lambda value, base, gpus, base_gpus: (value / gpus) / (base / base_gpus) * 100
    ),
}


def column_header(column: str, reference: str = "") -> str:
    relation, _, metric = column.rpartition(".")
    name = METRICS[metric].header
    if not relation:
        return name
    short = name.replace("Train ", "").split(" (")[0] if relation != "reference" else name
    return RELATIONS[relation].header.format(metric=short[0].upper() + short[1:], reference=reference)


# --- cells


@dataclass(frozen=True)
class Cell:
    """A value with its note. Without a value, the note gives the reason.

    spread, count: sample standard deviation and number of repeats. versus: the difference from a reference report.
    """

    value: float | int | str | None
    note: str = ""
    spread: float | None = None
    count: int = 1
    versus: str = ""

    @property
    def number(self) -> float | None:
        """The value if it is a number, otherwise None."""
        return None if isinstance(self.value, str) else self.value

    def with_decimals(self, places: int) -> str:
        """Format the cell with this number of decimals. `decimals` returns the number for a whole column."""
        if self.number is None:
            return str(self.value or "")
        text = format_rounded(self.number, places)
        return text if self.spread is None else f"{text} ± {format_rounded(self.spread, places)} ({self.count})"


def build_metric_cell(metric: str, runs: list[ReportedRun]) -> Cell:
    """Build a cell with the value of one run, or with mean and sample standard deviation over several runs."""
    values = [metric_value(metric, run) for run in runs]
    found = [value for value in values if not isinstance(value, Missing)]
    if not found:
        return Cell(None, values[0].reason)
    note = "" if isinstance(values[0], Missing) else METRICS[metric].note(runs[0])
    if len(found) == 1 or (len(set(found)) == 1 and not isinstance(found[0], float)):
        return Cell(found[0], note)
    return Cell(statistics.fmean(found), note, statistics.stdev(found), len(found))


def relate(relation: str, own: Cell, base: Cell, gpus: int, base_gpus: int) -> Cell:
    """Compute a relation of two cells. The result is empty if one of the cells is."""
    if own.number is None or base.number is None:
        return Cell(None, own.note if own.number is None else base.note)
    try:
        return Cell(RELATIONS[relation].compute(own.number, base.number, gpus, base_gpus))
    except ZeroDivisionError:
        return Cell(None, "division by a value of 0")


# --- numbers as text


def decimals(cells: Iterable[Cell], percent: bool = False) -> int:
    """Return the number of decimals for a column.

    Each number keeps at least four significant digits, unless the largest one would then have more than five.
    Percentages have one decimal, unless all of them are below 1.
    """
    sizes = [abs(cell.number) for cell in cells if cell.number and math.isfinite(cell.number)]
    if not sizes:
        return 0
    limit = 1 if percent and max(sizes) >= 1 else 4 - math.floor(math.log10(max(sizes)))
    texts = [format_float_positional(size, precision=4, unique=False, fractional=False, trim="-") for size in sizes]
    return max(0, min(limit, max(len(text.partition(".")[2]) for text in texts)))


def format_rounded(value: float, places: int) -> str:
    """Format a number with this number of decimals. A small number that would look like zero gets two digits."""
    text = f"{value:,.{places}f}"
    return f"{value:.2g}" if value and not text.strip("-0.") else text


def format_number(value: float) -> str:
    """Format a number that is not part of a column."""
    return format_rounded(value, decimals([Cell(value)]))
