"""What a column of tables.yaml may be: a value of a run with its unit, or its relation to another run."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from reporting.runs import Run

MIB_PER_GIB = 1024
MOST_EPOCHS = 20  # that a table can show one by one
LARGEST_IN_DIGITS = 1e15  # from which on a number is shown as 3.5e+38


@dataclass(frozen=True)
class Compared:
    """What a cell says beside the same cell of a reference report."""

    text: str  # such as "+3 % of 412"
    within: bool  # the tolerance band


@dataclass(frozen=True)
class Cell:
    """A value, and the reason why it is missing or the note that goes with it. `spread`, `count`: of repeats.

    compared: with the reference report, None without one.
    """

    value: float | int | str | None
    note: str = ""
    spread: float | None = None
    count: int = 1
    compared: Compared | None = None

    @property
    def number(self) -> float | None:
        """The value, where it is one to compute with."""
        return self.value if isinstance(self.value, int | float) else None

    @property
    def text(self) -> str:
        if self.spread is None:
            return shown(self.value)
        spread = f"{self.spread:,.0f}" if self.spread >= 10 else f"{self.spread:.2g}"
        return f"{shown(self.value)} ± {spread} ({self.count})"

    def with_decimals(self, places: int) -> str:
        """The text with this number of decimals, as `decimals` gives it for a column."""
        if self.number is None:
            return shown(self.value)
        text = rounded(self.number, places)
        return text if self.spread is None else f"{text} ± {rounded(self.spread, places)} ({self.count})"


@dataclass(frozen=True)
class Metric:
    header: str
    read: Callable[[Run], Cell]


def shown(value: float | int | str | None) -> str:
    """A number with four significant digits at least, and no digit of a whole part lost."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}" if value >= 1_000_000 else str(value)
    if math.isfinite(value) and abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"


def decimals(cells: Iterable[Cell], percent: bool = False) -> int:
    """How many decimals the numbers of a column get: four significant digits of each, at most five of the largest.

    Percentages have one, unless all of them are below 1.
    """
    sizes = [abs(c.number) for c in cells if c.number and math.isfinite(c.number) and abs(c.number) < 1_000_000]
    if not sizes:
        return 0
    most = 1 if percent and max(sizes) >= 1 else 4 - math.floor(math.log10(max(sizes)))
    return max(0, min(most, max(map(own_decimals, sizes))))


def own_decimals(size: float) -> int:
    """Decimals of four significant digits, zeros at the end left out."""
    text = f"{size:.{max(0, 3 - math.floor(math.log10(size)))}f}"
    return len(text.partition(".")[2].rstrip("0"))


def rounded(value: float, places: int) -> str:
    """A number with so many decimals; one that would be shown as zero and is none keeps two digits."""
    if not math.isfinite(value) or abs(value) >= LARGEST_IN_DIGITS:
        return f"{value:.4g}"
    text = f"{value:.{places}f}"
    if value and float(text) == 0:
        return f"{value:.2g}"
    large = abs(value) >= (1_000_000 if isinstance(value, int) else 1000)
    return f"{value:,.{places}f}" if large else text


def recorded(path: str, scale: float = 1) -> Callable[[Run], Cell]:
    """A number of the run record."""

    def read(run: Run) -> Cell:
        value = run.get(path)
        if value is None:
            return Cell(None, run.why_missing(path))
        return Cell(value if scale == 1 else value / scale)

    return read


def logged(kind: str, which: str, scale: float = 1) -> Callable[[Run], Cell]:
    """`peak`, `minimum` or `mean` of a memory log."""

    def read(run: Run) -> Cell:
        memory = getattr(run, kind)
        value = getattr(memory, which)
        return Cell(None, memory.reason) if value is None else Cell(value / scale)

    return read


def eval_loss(epoch: int) -> Callable[[Run], Cell]:
    """Loss of the n-th evaluation: the last one of a run may stand at 2.93 epochs instead of 3."""

    def read(run: Run) -> Cell:
        entries = run.record.eval
        if len(entries) < epoch:
            reason = run.why_missing("eval") if not run.completed else f"evaluations: {len(entries)}"
            return Cell(None, reason)
        entry = entries[epoch - 1]
        return Cell(entry.loss, f"epoch {entry.epoch:.4g}" if entry.loss is not None else run.why_missing("eval"))

    return read


def score(name: str) -> Callable[[Run], Cell]:
    """Percent over the evaluation questions."""

    def read(run: Run) -> Cell:
        found = recorded(name)(run)
        return found if found.value is None else Cell(found.value, f"{run.record.eval_size} questions")

    return read


def padding(run: Run) -> Cell:
    """Share of padding in the tokens that went through the model."""
    train = run.record.train
    if train.real_tokens is None or train.padding_tokens is None or not train.real_tokens:
        return Cell(None, run.why_missing("train.padding_tokens"))
    return Cell(100 * train.padding_tokens / (train.real_tokens + train.padding_tokens))


def estimated(path: str) -> Callable[[Run], Cell]:
    """A number of the run's own prediction."""

    def read(run: Run) -> Cell:
        value = run.get(f"estimate.{path}")
        if value is not None:
            return Cell(value)
        if path == "gpu_mib" and run.record.hardware.gpus == 0:
            return Cell(None, "no GPU")
        missing = run.record.missing
        reason = (missing.get("estimate.step") if path.startswith("step.") else None) or missing.get("estimate")
        return Cell(None, reason or "the run did not predict it")

    return read


def difference(measured: Callable[[Run], Cell], predicted: Callable[[Run], Cell]) -> Callable[[Run], Cell]:
    """By how many percent of the prediction the measured value is above it."""

    def read(run: Run) -> Cell:
        found = measured(run)
        expected = predicted(run)
        if found.number is None or not expected.number:
            return Cell(None, found.note if found.number is None else expected.note)
        return Cell((found.number - expected.number) / expected.number * 100)

    return read


def share_of_step(part: str) -> Callable[[Run], Cell]:
    """Percent of a measured step that a part of the predicted one would take: `compute`, `optimizer` ...

    `rest` is what the measured step takes longer than the predicted one, less than nothing where it is faster.
    """

    def read(run: Run) -> Cell:
        predicted = estimated("step.samples_per_second")(run)
        measured = METRICS["steady_samples_per_second"].read(run)
        if not predicted.number or not measured.number:
            return Cell(None, measured.note if not measured.number else predicted.note)
        step = run.record.estimate.step
        measured_seconds = (step.seconds or 0) * predicted.number / measured.number
        if not measured_seconds:
            return Cell(None, "the run did not predict it")
        seconds = {name: getattr(step, name) or 0 for name in PARTS_OF_STEP}
        seconds["communication"] -= step.hidden
        seconds["rest"] = measured_seconds - sum(seconds.values())
        return Cell(100 * seconds[part] / measured_seconds)

    return read


def profiled(part: str) -> Callable[[Run], Cell]:
    """Percent of a profiled step, the mean over all ranks."""

    def read(run: Run) -> Cell:
        ranks = [of_rank for of_rank in run.record.profile if of_rank.seconds_per_step]
        if not ranks:
            return Cell(None, run.record.missing.get("profile") or "the run had no --profile")
        return Cell(statistics.fmean(100 * getattr(of_rank, part) / of_rank.seconds_per_step for of_rank in ranks))

    return read


def profiled_step(run: Run) -> Cell:
    """Milliseconds of a profiled step, the mean over all ranks."""
    ranks = run.record.profile
    if not ranks:
        return Cell(None, run.record.missing.get("profile") or "the run had no --profile")
    return Cell(statistics.fmean(1000 * of_rank.seconds_per_step for of_rank in ranks))


def counted_by_pytorch(kind: str) -> Callable[[Run], Cell]:
    """Peak of the fullest GPU in MiB: `allocated` to tensors, or `reserved` from the driver."""

    def read(run: Run) -> Cell:
        values = [getattr(of_rank, f"{kind}_mib") for of_rank in run.record.peak_gpu_memory]
        if not values or None in values:
            return Cell(None, run.why_missing("peak_gpu_memory"))
        return Cell(max(values))

    return read


def gpu_hours(run: Run) -> Cell:
    return Cell(*run.gpu_hours())


def model(run: Run) -> Cell:
    return Cell(run.model or None, "" if run.model else run.why_missing("settings"))


PARTS_OF_STEP = ("compute", "optimizer", "communication")
METRICS = {
    "model": Metric("Model", model),
    "gpus": Metric("GPUs", recorded("world_size")),
    "parameters": Metric("Parameters", recorded("parameters")),
    "num_layers": Metric("Layers", recorded("settings.num_layers")),
    "batch_size": Metric("Batch per GPU", recorded("settings.per_device_train_batch_size")),
    "train_size": Metric("Train questions", recorded("train_size")),
    "steps_per_epoch": Metric("Steps per epoch", recorded("steps_per_epoch")),
    "train_loss": Metric("Train loss", recorded("train.loss_mean")),
    "eval_loss": Metric("Final eval loss", recorded("eval.-1.loss")),
    **{f"eval_loss_{n}": Metric(f"Eval Loss (Epoch {n})", eval_loss(n)) for n in range(1, MOST_EPOCHS + 1)},
    "runtime": Metric("Train runtime (s)", recorded("train.runtime_s")),
    "steps_per_second": Metric("Train steps/s", recorded("train.steps_per_second")),
    "samples_per_second": Metric("Train samples/s", recorded("train.samples_per_second")),
    "steady_samples_per_second": Metric("Steps alone, samples/s", recorded("train.steady_samples_per_second")),
    "tokens_per_second": Metric("Real tokens/s", recorded("train.steady_tokens_per_second")),
    "padding": Metric("Padding (%)", padding),
    "mfu": Metric("MFU (%)", recorded("train.mfu_percent")),
    "eval_samples_per_second": Metric("Eval samples/s", recorded("eval.-1.samples_per_second")),
    "exact_match": Metric("Exact Match (%)", score("exact_match")),
    "f1": Metric("F1 (%)", score("f1")),
    "peak_gpu": Metric("Peak GPU memory (MiB)", logged("gpu", "peak")),
    "low_gpu": Metric("Minimum GPU memory (MiB)", logged("gpu", "minimum")),
    "mean_gpu": Metric("Mean GPU memory (MiB)", logged("gpu", "mean")),
    "mean_gpu_gib": Metric("GPU memory, default (GiB)", logged("gpu", "mean", MIB_PER_GIB)),
    "peak_cpu": Metric("Peak CPU memory (MiB)", logged("cpu", "peak")),
    "mean_cpu": Metric("Mean CPU memory (MiB)", logged("cpu", "mean")),
    "callback_samples_per_second": Metric("Samples/s, callback", recorded("callbacks.train/samples_per_second_mean")),
    "callback_gpu_gib": Metric("GPU memory, callback (GiB)", recorded("callbacks.avg_mem_alloc_MB", MIB_PER_GIB)),
    "callback_gpu_mib": Metric("GPU memory allocated (MiB)", recorded("callbacks.avg_mem_alloc_MB")),
    "gpu_utilisation": Metric("GPU utilisation (%)", recorded("callbacks.avg_gpu_util_%")),
    "gpu_hours": Metric("GPU-hours", gpu_hours),
    "bus_bandwidth": Metric("Bus bandwidth (GB/s)", recorded("bandwidth.bus_bandwidth_gb_per_s")),
    "allocated_gpu": Metric("Allocated by PyTorch (MiB)", counted_by_pytorch("allocated")),
    "reserved_gpu": Metric("Reserved by PyTorch (MiB)", counted_by_pytorch("reserved")),
    "estimated_gpu": Metric("Estimated GPU memory (MiB)", estimated("gpu_mib")),
    "difference_gpu": Metric(
        "GPU memory: measured minus estimated (%)", difference(logged("gpu", "peak"), estimated("gpu_mib"))
    ),
    "estimated_cpu": Metric("Estimated CPU memory (MiB)", estimated("node_mib")),
    "difference_cpu": Metric(
        "CPU memory: measured minus estimated (%)", difference(logged("cpu", "peak"), estimated("node_mib"))
    ),
    "estimated_samples_per_second": Metric("Predicted samples/s", estimated("step.samples_per_second")),
    "difference_samples_per_second": Metric(
        "Samples/s: measured minus predicted (%)",
        difference(recorded("train.steady_samples_per_second"), estimated("step.samples_per_second")),
    ),
    "step_compute": Metric("Predicted: forward, backward (%)", share_of_step("compute")),
    "step_optimizer": Metric("Predicted: optimizer (%)", share_of_step("optimizer")),
    "step_communication": Metric("Predicted: communication (%)", share_of_step("communication")),
    "step_rest": Metric("Not predicted (%)", share_of_step("rest")),
    "profiled_step": Metric("Step (ms)", profiled_step),
    "profiled_data": Metric("Data (%)", profiled("data")),
    "profiled_forward": Metric("Forward (%)", profiled("forward")),
    "profiled_backward": Metric("Backward (%)", profiled("backward")),
    "profiled_communication": Metric("Communication (%)", profiled("communication")),
    "profiled_optimizer": Metric("Optimizer (%)", profiled("optimizer")),
    "profiled_other": Metric("Other (%)", profiled("other")),
    "profiled_hidden": Metric("Hidden communication (%)", profiled("hidden_communication")),
}


@dataclass(frozen=True)
class Relation:
    """A column ``name.metric``: computed from the row's value, the reference's, and the GPUs of both."""

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


def header(column: str, reference: str = "") -> str:
    relation, _, metric = column.rpartition(".")
    name = METRICS[metric].header
    if not relation:
        return name
    short = name.replace("Train ", "").split(" (")[0] if relation != "reference" else name
    return RELATIONS[relation].header.format(metric=short[0].upper() + short[1:], reference=reference)


def cell(column: str, runs: list[Run], base: list[Run], base_name: str, differ: str = "") -> Cell:
    """The cell of a column: of one run, or the mean over its repeats.

    base: runs to which relations refer. differ: in what these do not compare with the row's.
    """
    relation, _, metric = column.rpartition(".")
    own = over_repeats(METRICS[metric].read, runs)
    if not relation:
        return own
    if not base:
        return Cell(None, f"no completed run of {base_name}")
    reference = over_repeats(METRICS[metric].read, base)
    if relation == "reference":
        return reference
    for run in (runs[0], base[0]):
        if not run.completed:
            return Cell(None, f"the run's status is {run.status}")
    if differ:
        return Cell(None, f"does not compare with job {base[0].job_id} ({base_name}): {differ}")
    if own.number is None or reference.number is None:
        return Cell(None, own.note if own.number is None else reference.note)
    gpus, base_gpus = runs[0].record.world_size or 1, base[0].record.world_size or 1
    try:
        return Cell(RELATIONS[relation].compute(own.number, reference.number, gpus, base_gpus))
    except ZeroDivisionError:
        return Cell(None, "division by a value of 0")


def over_repeats(read: Callable[[Run], Cell], runs: list[Run]) -> Cell:
    """Mean and sample standard deviation over repeats of which all have the value."""
    cells = [read(run) for run in runs]
    values = [c.number for c in cells if c.number is not None]
    if len(values) < 2:
        return next((c for c in cells if c.value is not None), cells[0])
    if all(isinstance(value, int) for value in values) and len(set(values)) == 1:
        return cells[0]
    if not all(map(math.isfinite, values)):  # a loss that diverged
        return Cell(math.nan, cells[0].note, math.nan, len(values))
    return Cell(statistics.fmean(values), cells[0].note, statistics.stdev(values), len(values))
