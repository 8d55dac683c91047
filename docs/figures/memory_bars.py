"""Figures that compare what GPUs hold as stacked bars. The memory is that of scripts/estimate_memory.py."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from at_scale import GPUS, METHODS, at_scale
from estimate.command_line import parse_memory_plan
from estimate.memory import MemoryPart, estimate_parts, parts_at_peak
from estimate.model_shape import trace_shape
from palette import EMPTY
from settings.settings import Settings
from shared.units import GB, GIB
from style import LINKS, PARTS, PHONE_WIDTH, RED, figure_with_legend

CONFIGS = Path(__file__).resolve().parents[2]
STATE = ("parameters", "gradients", "optimizer state", "buffers")
ROW, GAP = 0.24, 0.5  # inches from a bar to the next one; rows between two groups of bars
Bar = dict[str, float]  # sizes of the parts of a bar, from left to right
Groups = dict[str, dict[str, Bar]]  # heading of a group -> label of a bar -> the bar


def plan(*flags: object) -> Settings:
    """Read the flags of a run. An @ stands for the repository's folder."""
    return parse_memory_plan([str(flag).replace("@", f"{CONFIGS}/") for flag in flags], environment={})


def bar(parts: list[MemoryPart], where: str = "gpu", names: tuple[str, ...] = tuple(PARTS)) -> Bar:
    """Return the GiB of each part, in the order of PARTS. The part "loss" is the logits of one chunk."""
    sizes = dict.fromkeys(names, 0.0)
    for part in parts:
        name = "logits" if part.name == "loss" else part.name
        if name in sizes:
            sizes[name] += getattr(part, where) / GIB
    return {name: size for name, size in sizes.items() if size}


def peak(*flags: object) -> Bar:
    """Return the bar of one GPU in the fullest interval of a step."""
    return bar(parts_at_peak(estimate_parts(plan(*flags))))


def draw_groups(axes: Axes, groups: Groups, looks: dict[str, dict], total: str = "{:.1f}") -> None:
    """Draw the bars below each other. A group's heading is above its bars, and a bar's total is next to its end."""
    row = 0.0
    labels = {}
    for heading, bars in groups.items():
        if heading:
            axes.annotate(heading, (0, row), (3, 0), textcoords="offset points", va="center", weight="bold")
            row += 1
        for label, sizes in bars.items():
            end = 0.0
            for name, size in sizes.items():
                axes.barh(row, size, 0.75, end, **looks[name])
                end += size
            axes.annotate(total.format(end), (end, row), (3, 0), textcoords="offset points", va="center_baseline")
            labels[row] = label
            row += 1
        row += GAP
    axes.set(yticks=[*labels], yticklabels=labels.values(), ylim=(row - GAP - 0.4, -0.6))
    axes.tick_params(axis="y", length=0)


def rows(groups: Groups) -> float:
    return sum(len(bars) + bool(heading) + GAP for heading, bars in groups.items())


def memory_figure(groups: Groups, label: str, total: str = "{:.1f}", **names: str) -> tuple[Figure, Axes]:
    """Draw GiB per GPU. names: another name of a part in the legend."""
    shown = {part for bars in groups.values() for sizes in bars.values() for part in sizes}
    legend = {names.get(part, part): PARTS[part] for part in PARTS if part in shown}
    figure, axes = figure_with_legend(0.85 + ROW * rows(groups), legend)
    draw_groups(axes, groups, PARTS, total)
    longest = max(sum(sizes.values()) for bars in groups.values() for sizes in bars.values())
    axes.set(xlabel=label, xlim=(0, 1.07 * longest))
    axes.locator_params(axis="x", integer=True)
    return figure, axes


def baseline() -> Figure:
    batches = {"4 x 512 tokens\n(the baseline)": [], "1 x 512 tokens": ["--per_device_train_batch_size", 1],
               "4 x 128 tokens": ["--max_length", 128]}  # fmt: skip
    bars = {label: peak(*flags) for label, flags in batches.items()}
    figure, axes = memory_figure({"": bars}, "GiB on one GPU, bloom-560m, estimated")
    for memory in (16, 32):
        axes.axvline(memory, color=RED, linestyle="--", linewidth=1)
        axes.annotate(f"a GPU of {memory} GiB", (memory, 1), (0, 2), axes.get_xaxis_transform(),
                      textcoords="offset points", ha="center")  # fmt: skip
    axes.set(xlim=(0, 36))
    return figure


def efficiency() -> Figure:
    batches = {
        "4 sequences": [],
        "16 sequences": ["--per_device_train_batch_size", 16, "--gradient_accumulation_steps", 1],
    }
    chunked = ["--loss", "chunked"]
    runs = {
        "full logits": [],
        "chunked loss": chunked,
        "chunked loss, SDPA": [*chunked, "--attention", "sdpa"],
        "chunked loss, checkpointing": [*chunked, "--activation_checkpointing"],
    }
    groups = {
        f"{batch} in a micro batch": {label: peak("--bf16", *size, *flags) for label, flags in runs.items()}
        for batch, size in batches.items()
    }
    logits = "logits (chunked loss: of one chunk)"
    return memory_figure(groups, "GiB on one GPU, bloom-560m, estimated", logits=logits)[0]


def memory() -> Figure:
    """Draw the four runs of docs/memory.md's table."""
    runs = {"baseline, 1 GPU": (1, ""), "ZeRO-2, 1 GPU": (1, "zero2"), "ZeRO-2, 2 GPUs": (2, "zero2"),
            "ZeRO-3, 2 GPUs": (2, "zero3")}  # fmt: skip
    bars = {}
    for label, (gpus, config) in runs.items():
        flags = ["--deepspeed", f"@ds_configs/{config}.json"] if config else []
        bars[label] = peak("--gpus", gpus, *flags)
    return memory_figure({"": bars}, "GiB per GPU, bloom-560m, estimated")[0]


def comparison() -> Figure:
    methods = {
        "DDP": [],
        "FSDP2": ["--fsdp", "--fsdp_config", "@fsdp_configs/full_shard.json"],
        "FSDP2 + offload": ["--fsdp", "--fsdp_config", "@fsdp_configs/full_shard_cpu_offload.json"],
        "ZeRO-2": ["--deepspeed", "@ds_configs/zero2.json"],
        "ZeRO-3": ["--deepspeed", "@ds_configs/zero3.json"],
        "ZeRO-3 + offload": ["--deepspeed", "@ds_configs/zero3_cpu_offload.json"],
    }
    bars = {label: peak("--model_name", "bigscience/bloom-3b", "--gpus", 2, *flags) for label, flags in methods.items()}
    return memory_figure({"": bars}, "GiB per GPU, bloom-3b on 2 GPUs, estimated", "{:.0f}")[0]


def offload() -> Figure:
    groups: Groups = {}
    for stage in (1, 2, 3):
        whole, offloaded = (
            parts_at_peak(estimate_parts(plan("--deepspeed", f"@ds_configs/zero{stage}{suffix}.json")))
            for suffix in ("", "_cpu_offload")
        )
        groups[f"ZeRO-{stage}"] = {
            "GPU": bar(whole, "gpu", STATE),
            "with offload: GPU": bar(offloaded, "gpu", STATE),
            "with offload: CPU": bar(offloaded, "cpu", STATE),
        }
    return memory_figure(groups, "GiB, bloom-560m on one GPU, without activations and logits, estimated")[0]


def zero() -> Figure:
    """Draw 4 GPUs as columns of 16 bytes per parameter, to scale. The parts that a GPU does not hold are empty."""
    parts = {"parameters": (2, 3), "gradients": (2, 2), "optimizer state": (12, 1)}  # bytes, stage that divides them
    legend = {part: PARTS[part] for part in parts} | {"on another GPU": EMPTY}
    figure, panels = figure_with_legend(3.2, legend, ncols=4, sharey=True)
    for stage, axes in enumerate(panels):
        held = bottom = 0.0
        for part, (size, divided) in parts.items():
            share = size / 4 if stage >= divided else size
            for gpu in range(4):
                begin = bottom
                if share < size:
                    axes.add_patch(Rectangle((gpu, bottom), 0.85, size, **EMPTY))
                    begin += gpu * share
                axes.add_patch(Rectangle((gpu, begin), 0.85, share, **PARTS[part]))
            held += share
            bottom += size
        axes.set(xlim=(-0.15, 4), ylim=(0, 16.2), title=f"ZeRO-{stage}\n{held:g} bytes", xlabel="GPU")
        axes.set(yticks=[0, 2, 4, 16], xticks=[gpu + 0.42 for gpu in range(4)], xticklabels=range(4))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("bytes per parameter")
    return figure


def custom_model() -> Figure:
    looks = {"embeddings, head": PARTS["head"], "blocks": PARTS["parameters"]}
    bars = {}
    for gpus, layers in ((2, 3), (4, 6), (8, 12), (16, 24)):
        shape = trace_shape(plan("--model_name", "custom-gpt", "--num_layers", layers))
        blocks = sum(shape.block_sizes)
        sizes = ((shape.parameters - blocks) / 1e6, blocks / 1e6)
        bars[f"{gpus} GPUs, {layers} layers"] = dict(zip(looks, sizes, strict=True))
    figure, axes = figure_with_legend(0.85 + 4.5 * ROW, looks)
    draw_groups(axes, {"": bars}, looks, "{:,.0f}")
    axes.set(xlabel="million parameters", xlim=(0, 1420))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def scale() -> Figure:
    """Draw a bar for each method and number of GPUs. Telephones show it, so it is narrow and high."""
    held: Groups = {}
    sent: Groups = {}
    for method in METHODS:
        shown = {f"{gpus:,}": at_scale(method, gpus) for gpus in GPUS}
        held[method] = {gpus: bar(each.held) for gpus, each in shown.items()}
        sent[method] = {
            gpus: {"between nodes": each.between_nodes / GB, "inside nodes": each.inside_nodes / GB}
            for gpus, each in shown.items()
        }
    legend = {part: PARTS[part] for part in STATE} | LINKS
    figure, panels = figure_with_legend(1 + 0.16 * rows(held), legend, 3, PHONE_WIDTH, ncols=2)
    for axes, groups, looks, most in zip(panels, (held, sent), (PARTS, LINKS), (160, 68), strict=True):
        draw_groups(axes, groups, looks)
        axes.set(xlim=(0, most))
    panels[0].set(xlabel="GiB that a rank holds", ylabel="GPUs, 8 in each node")
    panels[1].set(xlabel="GB that it sends in a step", yticks=[])
    return figure


FIGURES = {
    "baseline": baseline,
    "efficiency": efficiency,
    "memory": memory,
    "zero": zero,
    "offload": offload,
    "comparison": comparison,
    "at-scale": scale,
    "custom-model": custom_model,
}
