"""Draw the figures of the pages.

PYTHONPATH=scripts python docs/figures/draw.py
PYTHONPATH=scripts python docs/figures/draw.py "title=profile/4711" ...      # copy new traces into profile.json first

Memory is that of scripts/estimate_memory.py, and bytes sent are those of scripts/estimate_time.py. profile.png shows
real traces. This script does not draw the timelines of pipelines: `exercises/pipeline.py --picture` does.
"""

import gzip
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

from at_scale import GPUS, METHODS, at_scale
from dimensions import QUESTIONS, tensor_sends_by_plan
from dimensions import dimensions as dimension_numbers
from estimate.command_line import parse_memory_plan
from estimate.memory import MemoryPart, estimate_parts, parts_at_peak
from estimate.model_shape import trace_shape
from settings.settings import Settings
from shared.units import GB, GIB

HERE = Path(__file__).resolve().parent
plt.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 120}
# Parts also differ in lightness and hatching, so that readers can tell them apart without colour
PARTS = {
    "parameters": {"color": "#1f4e79"},
    "gradients": {"color": "#c55a11", "hatch": "///"},
    "optimizer state": {"color": "#a9d18e", "hatch": "..."},
    "buffers": {"color": "#7f7f7f", "hatch": "xxx"},
    "activations": {"color": "#ffe699"},
    "logits": {"color": "#d9d9d9", "hatch": "\\\\\\"},
    "loss": {"color": "#9dc3e6", "hatch": "---"},  # the chunked loss, which has no full logits
    "head": {"color": "#d9c3e8", "hatch": "|||"},
}
LINKS = {
    "inside nodes": {"color": "#9dc3e6"},
    "between nodes": {"color": "#c55a11", "hatch": "///"},
}
EMPTY = {"facecolor": "white", "edgecolor": "#bbbbbb", "linestyle": "--"}


def plan(*flags: object) -> Settings:
    configs = HERE.parents[1]
    return parse_memory_plan([str(flag).replace("@", f"{configs}/") for flag in flags], environment={})


def peak_parts(*flags: object) -> list[MemoryPart]:
    """Return the parts of the estimate in the fullest interval of a step."""
    return parts_at_peak(estimate_parts(plan(*flags)))


def save(figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.png", bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    print(f"docs/figures/{name}.png")


def stack(axes, place: float, held: list[MemoryPart], where: str = "gpu", parts=PARTS, width: float = 0.6) -> float:
    """Draw the parts of a bar on top of each other, in GiB. Return the height of the bar."""
    bottom = 0.0
    for part in held:
        size = getattr(part, where) / GIB
        if part.name in parts and size:
            axes.bar(place, size, width, bottom, label=part.name, edgecolor="black", linewidth=0.4, **PARTS[part.name])
            bottom += size
    return bottom


def legend(axes, **where: object) -> None:
    """Add a legend in the order of the parts of a bar, from top to bottom."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [name for name in (*PARTS, *handles) if name in handles]
    names = list(dict.fromkeys(names))[::-1]
    axes.legend([handles[name] for name in names], names, frameon=False, **where)


def box(axes, x: float, y: float, width: float, height: float, text: str, **style: object) -> None:
    style = {"facecolor": "#eef3f8", "edgecolor": "#1f4e79"} | style
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.08", **style))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5)


def arrow(axes, start: tuple, end: tuple) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#333333"})


def canvas(width: float, height: float):
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def environment() -> None:
    figure, axes = canvas(9, 3.1)
    box(axes, 0.1, 1.2, 1.3, 0.8, "sbatch\nbaseline.slurm")
    box(axes, 2.0, 1.2, 1.5, 0.8, "job.sh\nsite, ranks,\nrendezvous")
    box(axes, 4.2, 2.2, 1.6, 0.7, "nvidia-smi -l 5", facecolor="white")
    box(axes, 4.2, 1.2, 1.6, 0.8, "train.py\non each rank")
    box(axes, 4.2, 0.3, 1.6, 0.7, "psrecord", facecolor="white")
    files = ["gpu_memory/gpu_memory_log_4711.csv", "log/baseline_4711.out", "results/4711.json", "output/4711/",
             "cpu_memory/cpu_memory_log_4711.txt"]  # fmt: skip
    heights = [2.55, 1.95, 1.6, 1.25, 0.65]
    for name, y in zip(files, heights, strict=True):
        axes.text(6.5, y, name, va="center", family="monospace", fontsize=8)
    arrow(axes, (1.45, 1.6), (1.95, 1.6))
    for y in (2.5, 1.6, 0.7):
        arrow(axes, (3.55, 1.6), (4.15, y))
    for y, target in ((2.55, 2.55), (1.6, 1.95), (1.6, 1.6), (1.6, 1.25), (0.65, 0.65)):
        arrow(axes, (5.85, y), (6.45, target))
    axes.text(5.0, 0.02, "the training continues if a logger ends", ha="center", fontsize=8)
    save(figure, "environment")


def baseline() -> None:
    figure, axes = plt.subplots(figsize=(7, 3.2))
    labels = []
    for place, flags in enumerate(([], ["--per_device_train_batch_size", 1], ["--max_length", 128])):
        height = stack(axes, place, peak_parts(*flags))
        axes.text(place, height + 0.3, f"{height:.1f}", ha="center")
        labels.append(["4 x 512 tokens\n(the baseline)", "1 x 512", "4 x 128"][place])
    for memory, name in ((16, "a GPU of 16 GiB"), (32, "a GPU of 32 GiB")):
        axes.axhline(memory, color="#c00000", lw=1, ls="--")
        axes.text(2.4, memory + 0.4, name, color="#c00000", fontsize=8)
    axes.set(xticks=range(3), xticklabels=labels, ylabel="GiB on one GPU, estimated", xlim=(-0.6, 3.3), ylim=(0, 35))
    legend(axes, loc="center left", bbox_to_anchor=(1, 0.4))
    save(figure, "baseline")


def efficiency() -> None:
    at_once = ["--per_device_train_batch_size", 16, "--gradient_accumulation_steps", 1]
    chunked = ["--loss", "chunked"]
    sdpa = [*chunked, "--attention", "sdpa"]
    checkpointed = [*chunked, "--activation_checkpointing"]
    runs = {
        "4 sequences,\nfull logits": [],
        "chunked\nloss": chunked,
        "chunked,\nSDPA": sdpa,
        "chunked,\ncheckpointing": checkpointed,
        "16 sequences,\nfull logits": at_once,
        "chunked\nloss ": [*at_once, *chunked],
        "chunked,\nSDPA ": [*at_once, *sdpa],
        "chunked,\ncheckpointing ": [*at_once, *checkpointed],
    }
    figure, axes = plt.subplots(figsize=(10.4, 3.4))
    for place, flags in enumerate(runs.values()):
        height = stack(axes, place, peak_parts("--bf16", *flags))
        axes.text(place, height + 0.6, f"{height:.1f}", ha="center")
    axes.set(xticks=range(len(runs)), xticklabels=list(runs), ylabel="GiB on one GPU, bloom-560m, estimated")
    legend(axes, loc="upper left")
    save(figure, "efficiency")


def deepspeed_config() -> None:
    figure, axes = canvas(9, 3.4)
    box(axes, 0.1, 2.4, 1.9, 0.8, "--learning_rate 1e-4\nBATCH_SIZE=8")
    box(axes, 0.1, 0.9, 1.9, 0.8, 'zero2.json\n"lr": "auto"\n"stage": 2')
    box(axes, 2.9, 2.4, 1.8, 0.8, "TrainingArguments")
    box(axes, 2.9, 0.9, 1.8, 0.8, "every key known?\nno contradiction?")
    box(axes, 5.6, 1.65, 1.5, 0.8, 'engine:\nno "auto" left')
    box(axes, 7.7, 1.65, 1.2, 0.8, "knob audit")
    stop = {"facecolor": "white", "edgecolor": "#c00000"}
    box(axes, 2.9, 0.05, 1.8, 0.4, "exit code 2", **stop)
    box(axes, 7.7, 0.05, 1.2, 0.4, "exit code 3", **stop)
    arrow(axes, (2.05, 2.8), (2.85, 2.8))
    arrow(axes, (2.05, 1.3), (2.85, 1.3))
    arrow(axes, (4.75, 2.8), (5.55, 2.25))
    axes.text(5.25, 2.75, 'fills each "auto"', fontsize=8)
    arrow(axes, (4.75, 1.3), (5.55, 1.85))
    axes.text(5.0, 1.4, "yes", fontsize=8)
    arrow(axes, (3.8, 0.85), (3.8, 0.5))
    axes.text(3.9, 0.65, "no", fontsize=8, va="center")
    arrow(axes, (7.15, 2.05), (7.65, 2.05))
    arrow(axes, (8.3, 1.6), (8.3, 0.5))
    axes.text(8.2, 1.05, "what runs is not\nwhat was asked for", fontsize=8, ha="right", va="center")
    save(figure, "deepspeed-config")


def zero() -> None:
    """Draw 4 GPUs as columns of 16 bytes per parameter, to scale. The parts that a GPU does not hold are empty."""
    figure, axes = plt.subplots(1, 4, figsize=(9, 3.6), sharey=True)
    kept = [("parameters", 2, 3), ("gradients", 2, 2), ("optimizer state", 12, 1)]  # bytes, stage that divides them
    for stage, place in enumerate(axes):
        total = 0.0
        bottom = 0.0
        for part, size, divided in kept:
            whole = stage < divided
            held = size if whole else size / 4
            for gpu in range(4):
                place.add_patch(plt.Rectangle((gpu, bottom), 0.85, size, **EMPTY))
                offset = 0 if whole else held * gpu
                look = {"facecolor": PARTS[part]["color"], "hatch": PARTS[part].get("hatch")}
                place.add_patch(
                    plt.Rectangle((gpu, bottom + offset), 0.85, held, ec="black", lw=0.5, label=part, **look)
                )
            total += held
            bottom += size
        place.set(xlim=(-0.15, 4), ylim=(0, 16.2), yticks=[0, 2, 4, 16], xticks=[x + 0.42 for x in range(4)])
        place.set(xticklabels=[f"GPU {gpu}" for gpu in range(4)], title=f"ZeRO-{stage}\n{total:g} bytes per parameter")
        place.tick_params(length=0, labelsize=7)
        place.title.set_fontsize(8.5)
        for side in place.spines.values():
            side.set_visible(False)
    axes[0].set_ylabel("bytes per parameter")
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(
        [*handles.values()][::-1],
        [*handles][::-1],
        frameon=False,
        loc="lower center",
        ncols=3,
        bbox_to_anchor=(0.5, -0.06),
    )
    figure.tight_layout()
    save(figure, "zero")


def offload() -> None:
    figure, axes = plt.subplots(figsize=(8.4, 3.3))
    ticks = []
    for group, stage in enumerate((1, 2, 3)):
        for number, (config, text) in enumerate(((f"zero{stage}", ""), (f"zero{stage}_cpu_offload", " + offload"))):
            held = peak_parts("--deepspeed", f"@ds_configs/{config}.json")
            middle = 3 * group + 1.3 * number
            sides = {"gpu": middle - 0.3, "cpu": middle + 0.3} if number else {"gpu": middle}
            for where, place in sides.items():
                height = stack(axes, place, held, where, [*PARTS][:4], 0.5)
                axes.text(place, height + 0.1, where.upper(), ha="center", fontsize=7.5)
            ticks.append((middle, f"ZeRO-{stage}\n{text}"))
    axes.set(xticks=[place for place, _ in ticks], xticklabels=[text for _, text in ticks], ylim=(0, 13))
    axes.set_ylabel("GiB, bloom-560m on one GPU, estimated", fontsize=8)
    legend(axes, loc="upper right", ncols=4)
    save(figure, "offload")


def ddp() -> None:
    """Draw a rank that sends its buckets during the last micro batch's backward pass."""
    forward, backward, bucket = 3, 6, 1.5
    figure, axes = plt.subplots(2, 1, figsize=(9, 2.9), sharex=True)
    for place, micro_batches in zip(axes, (1, 2), strict=True):
        bar = {"height": 0.6, "edgecolor": "black", "linewidth": 0.4}
        time = 0.0
        for number in range(micro_batches):
            place.barh(1, forward, left=time, color="#9dc3e6", label="forward", **bar)
            place.barh(1, backward, left=time + forward, color="#1f4e79", label="backward", **bar)
            time += forward + backward
            last = number == micro_batches - 1
            for sent in range(4 if last else 0):  # a bucket is full after each quarter of the backward pass
                start = time - backward + (sent + 1) * backward / 4
                place.barh(0, bucket, left=start, color="#f8cbad", label="all-reduce of a bucket", **bar)
        place.barh(1, 1, left=time + bucket, color="#a9d18e", label="optimizer step", **bar)
        place.set(yticks=[1, 0], yticklabels=["computes", "sends"], ylim=(-0.5, 1.6), xlim=(0, 23))
        note = ": the first micro batch sends nothing (no_sync)" if micro_batches > 1 else ""
        place.set_title(f"accumulation {micro_batches}{note}", fontsize=9, loc="left")
        place.tick_params(length=0)
        place.set_xticks([])
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    axes[0].legend(handles.values(), handles, frameon=False, loc="center right", fontsize=8)
    axes[1].set_xlabel("time (a drawing, not a measurement)", fontsize=8, loc="left")
    figure.tight_layout()
    save(figure, "ddp")


def batch_size() -> None:
    """Draw the evaluation losses of batch-size.json over questions and over steps. The runs used the laptop profile."""
    runs = json.loads((HERE / "batch-size.json").read_text())
    looks = {16: ("black", "o"), 64: ("#c55a11", "s"), 256: ("#1f4e79", "^")}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
    for run in runs:
        colour, marker = looks[run["batch"]]
        dashes = {"the same rate": "-", "square root": "--", "linear": ":"}[run["rate"]]
        label = f"{run['batch']}, {run['rate']}" if run["batch"] > 16 else "16"
        how = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 3.5, "label": label}
        axes[0].plot([step * run["batch"] for step in run["steps"]], run["losses"], **how)
        axes[1].plot(run["steps"], run["losses"], **how)
    axes[0].set(xlabel="questions seen: what you pay", ylabel="evaluation loss")
    axes[1].set(xlabel="optimizer steps: the time, with enough GPUs", xscale="log")
    figure.legend(
        *axes[0].get_legend_handles_labels(), frameon=False, loc="center right", fontsize=8, title="batch, rate"
    )
    figure.tight_layout(rect=(0, 0, 0.82, 1))
    save(figure, "batch-size")


def multi_gpu() -> None:
    """Draw one optimizer step on 2 and 4 GPUs, with the same work per GPU.

    With 4 GPUs the all-reduce takes longer, and one rank is late.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), sharex=True, gridspec_kw={"width_ratios": [1, 1]})
    runs = {"2 GPUs": [(10, 1.5), (10, 1.5)], "4 GPUs": [(10, 2.2), (10, 2.2), (12, 2.2), (10, 2.2)]}
    for place, (title, ranks) in zip(axes, runs.items(), strict=True):
        last = max(compute for compute, _ in ranks)
        for row, (compute, sends) in enumerate(ranks):
            bar = {"height": 0.6, "edgecolor": "black", "linewidth": 0.4}
            place.barh(-row, compute, color="#a9d18e", label="computes", **bar)
            place.barh(-row, last - compute, left=compute, color="white", hatch="///", label="waits", **bar)
            place.barh(-row, sends, left=last, color="#c55a11", label="all-reduce", **bar)
        place.set(yticks=[-row for row in range(len(ranks))], yticklabels=[f"rank {row}" for row in range(len(ranks))])
        place.set(title=f"{title}: a step ends at {last + ranks[0][1]:g}", xlim=(0, 15), ylim=(-3.6, 0.6))
        place.title.set_fontsize(9)
        place.tick_params(length=0)
    axes[0].set_xlabel("time, in tenths of the computation (a drawing, not a measurement)", fontsize=8, loc="left")
    handles = dict(zip(*reversed(axes[1].get_legend_handles_labels()), strict=True))
    axes[0].legend(handles.values(), handles, frameon=False, loc="lower left", ncols=3, fontsize=8)
    figure.tight_layout()
    save(figure, "multi-gpu")


def multi_node() -> None:
    figure, axes = canvas(9, 3.2)
    box(axes, 0.1, 1.3, 1.4, 0.8, "srun\none task per node")
    for node, y in (("node1", 2.1), ("node2", 0.4)):
        box(axes, 2.3, y, 1.5, 0.8, f"torchrun on {node}")
        box(axes, 6.9, y, 1.9, 0.8, f"ranks of {node}\nRANK, LOCAL_RANK")
        arrow(axes, (1.55, 1.7), (2.25, y + 0.4))
        arrow(axes, (3.85, y + 0.4), (4.55, 1.7))
        arrow(axes, (3.85, y + 0.4 + (0.25 if y > 1 else -0.25)), (6.85, y + 0.4 + (0.25 if y > 1 else -0.25)))
    axes.text(5.35, 2.85, "starts", ha="center", fontsize=8)
    axes.text(5.35, 0.28, "starts", ha="center", fontsize=8)
    box(axes, 4.6, 1.3, 1.5, 0.8, "rendezvous\n10.0.0.1:29871\nJOIN_TIMEOUT", facecolor="white")
    axes.annotate("", (7.85, 1.25), (7.85, 2.05), arrowprops={"arrowstyle": "<->", "lw": 2, "color": "#c55a11"})
    axes.text(8.0, 1.65, "NCCL", va="center", fontsize=8.5)
    axes.text(5.35, 1.1, "nodes meet here", ha="center", fontsize=8)
    save(figure, "multi-node")


def fsdp() -> None:
    """Draw the times in the forward and backward pass at which each of six units is whole on a rank."""
    rows = ["embedding, head", *(f"block {i}" for i in range(1, 6))]
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
    for place, title in zip(axes, ("FULL_SHARD", "SHARD_GRAD_OP", "one unit (nothing wrapped)"), strict=True):
        for row in range(6):
            last = 11
            if title.startswith("one") or row == 0:
                spans = [(0, 12)]
            elif title == "FULL_SHARD":
                spans = [(row - 1, 2), (last - row - 1, 2)]  # one unit of time to prefetch, one to compute
            else:
                spans = [(row - 1, last - row + 1 - (row - 1))]
            place.broken_barh(spans, (5.6 - row, 0.8), **PARTS["parameters"])
        place.axvline(6, color="black", lw=0.8, ls="--")
        place.set(title=title, xlim=(0, 12), xticks=[3, 9], xticklabels=["forward", "backward"])
        place.set(yticks=[6 - row for row in range(6)], yticklabels=rows)
        place.tick_params(length=0)
        place.title.set_fontsize(9)
    figure.tight_layout()
    save(figure, "fsdp")


def custom_model() -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3))
    for place, layers in enumerate((3, 6, 12, 24)):
        shape = trace_shape(plan("--model_name", "custom-gpt", "--num_layers", layers))
        blocks, total = sum(shape.block_sizes) / 1e6, shape.parameters / 1e6
        axes.bar(place, total - blocks, 0.6, color="#d9d9d9", hatch="///", ec="black", lw=0.4, label="embeddings, head")
        axes.bar(place, blocks, 0.6, total - blocks, color="#1f4e79", ec="black", lw=0.4, label="blocks")
        axes.text(place, total + 20, f"{total:.0f}", ha="center")
    axes.set(xticks=range(4), xticklabels=["2 GPUs\n3 layers", "4 GPUs\n6", "8 GPUs\n12", "16 GPUs\n24"])
    axes.set_ylabel("million parameters")
    legend(axes, loc="upper left")
    save(figure, "custom-model")


def tensor_parallel() -> None:
    """Draw a feed-forward half on two ranks: one matrix cut by columns, one cut by rows, and an all-reduce."""
    figure, axes = canvas(9, 3.6)
    colours = ("#9dc3e6", "#f8cbad")
    for rank, y in enumerate((2.05, 0.35)):
        own, other = colours[rank], "white"
        axes.text(0.05, y + 0.55, f"rank {rank}", va="center", fontsize=9)
        box(axes, 0.75, y + 0.25, 0.75, 0.6, "X\nwhole", facecolor="#eeeeee")
        for part in range(2):  # columns of the first matrix
            mine = part == rank
            text = "A" + "₁₂"[part] if mine else ""
            box(
                axes,
                2.0 + 0.5 * part,
                y,
                0.42,
                1.1,
                text,
                facecolor=own if mine else other,
                linestyle="-" if mine else "--",
            )
        box(axes, 3.45, y + 0.25, 0.95, 0.6, "gelu(X A" + "₁₂"[rank] + ")", facecolor=own)
        for part in range(2):  # rows of the second matrix
            mine = part == rank
            text = "B" + "₁₂"[part] if mine else ""
            height = y + 0.57 - 0.57 * part
            box(axes, 4.95, height, 0.9, 0.5, text, facecolor=own if mine else other, linestyle="-" if mine else "--")
        box(axes, 6.35, y + 0.25, 0.75, 0.6, "Z" + "₁₂"[rank] + "\na part", facecolor=own)
        box(axes, 8.1, y + 0.25, 0.8, 0.6, "Z₁ + Z₂\nwhole", facecolor="#eeeeee")
        for start, end in ((1.55, 1.95), (2.98, 3.4), (4.45, 4.9), (5.9, 6.3), (7.15, 8.05)):
            arrow(axes, (start, y + 0.55), (end, y + 0.55))
    axes.annotate("", (7.6, 0.95), (7.6, 2.55), arrowprops={"arrowstyle": "<->", "lw": 2, "color": "#c55a11"})
    axes.text(7.68, 1.75, "all-reduce", va="center", fontsize=8.5, color="#c55a11")
    for x, text in ((2.45, "cut by columns\n(outputs)"), (5.4, "cut by rows\n(inputs)")):
        axes.text(x, 3.25, text, ha="center", va="bottom", fontsize=8.5)
    save(figure, "tensor-parallel")


def dimensions() -> None:
    """Draw, for each dimension, the blocks and questions of two ranks, and the bytes that each of eight ranks sends."""
    figure, panels = plt.subplots(2, 5, figsize=(10, 5), sharey="row", height_ratios=(2.3, 1), layout="constrained")
    messages = {
        "data": "gradients,\nonce in a step",
        "shard": "parameters,\nbefore each block",
        "tensor": "activations,\nfour times in a block",
        "pipeline": "hidden states,\nbetween stages",
        "context": "keys and values,\nin each attention",
    }
    found = dimension_numbers()
    for (name, numbers), place, bars in zip(found.items(), panels[0], panels[1], strict=True):
        place.set(xlim=(-0.1, 2.3), ylim=(-0.1, 5.2))
        place.set_title(f"{name}\nsends {messages[name]}", fontsize=9)
        place.axis("off")
        for rank in range(2):
            left = 1.2 * rank
            place.text(left + 0.5, 4.95, f"rank {rank}", ha="center", va="center", fontsize=8)
            for block in range(4):
                draw_share(place, (left, 1.9 + 0.7 * (3 - block), 0.55), rank, *OWN_OF_BLOCK[name](rank, block))
            for question in range(4):
                draw_share(place, (left, 0.1 + 0.4 * question, 0.28), rank, *OWN_OF_QUESTION[name](rank, question))
        bars.bar(0, numbers.sent / GB, 0.5, color="#c55a11", edgecolor="black", linewidth=0.4)
        bars.text(0, numbers.sent / GB + 3, f"{numbers.sent / GB:.1f}", ha="center", va="bottom", fontsize=9)
        if name == "tensor":
            by_plan = QUESTIONS * tensor_sends_by_plan() / GB
            bars.bar(0, by_plan, 0.5, zorder=0, **EMPTY)
            bars.text(0, by_plan + 3, f"{by_plan:.1f} by\ntransformers' plan", ha="center", va="bottom", fontsize=8)
        bars.set(ylim=(0, 130), xlim=(-1, 1), xticks=[])
    panels[0][0].text(-0.2, 3.3, "4 blocks", rotation=90, va="center", ha="right", fontsize=8)
    panels[0][0].text(-0.2, 0.85, "4 questions", rotation=90, va="center", ha="right", fontsize=8)
    panels[1][0].set_ylabel("GB that each of\n8 ranks sends in a step", fontsize=8)
    save(figure, "dimensions")


# The part of a block or a question that a rank has, from begin to end, and whether the rank gathers the rest
WHOLE, NOTHING, HALVES = ((0, 1), False), ((0, 0), False), (((0, 0.5), False), ((0.5, 1), False))
OWN_OF_BLOCK = {
    "data": lambda rank, block: WHOLE,
    "shard": lambda rank, block: (HALVES[rank][0], True),
    "tensor": lambda rank, block: HALVES[rank],
    "pipeline": lambda rank, block: WHOLE if block // 2 == rank else NOTHING,
    "context": lambda rank, block: WHOLE,
}
OWN_OF_QUESTION = {
    "data": lambda rank, question: WHOLE if question // 2 != rank else NOTHING,
    "shard": lambda rank, question: WHOLE if question // 2 != rank else NOTHING,
    "tensor": lambda rank, question: WHOLE,
    "pipeline": lambda rank, question: WHOLE,
    "context": lambda rank, question: HALVES[rank],
}


def draw_share(axes, where: tuple[float, float, float], rank: int, own: tuple[float, float], gathers: bool) -> None:
    """Draw the part that a rank has. where: x, y and height. own: begin and end. gathers: whether it gets the rest."""
    x, y, height = where
    axes.add_patch(Rectangle((x, y), 1, height, **EMPTY))
    if gathers:
        axes.add_patch(
            Rectangle((x, y), 1, height, facecolor="white", edgecolor="#1f4e79", hatch="....", linewidth=0.6)
        )
    begin, end = own
    colour = ("#9dc3e6", "#1f4e79")[rank]
    if end > begin:
        axes.add_patch(
            Rectangle((x + begin, y), end - begin, height, facecolor=colour, edgecolor="black", linewidth=0.6)
        )


def comparison() -> None:
    methods = {
        "DDP": [],
        "FSDP2": ["--fsdp", "--fsdp_config", "@fsdp_configs/full_shard.json"],
        "FSDP2\n+ offload": ["--fsdp", "--fsdp_config", "@fsdp_configs/full_shard_cpu_offload.json"],
        "ZeRO-2": ["--deepspeed", "@ds_configs/zero2.json"],
        "ZeRO-3": ["--deepspeed", "@ds_configs/zero3.json"],
        "ZeRO-3\n+ offload": ["--deepspeed", "@ds_configs/zero3_cpu_offload.json"],
    }
    figure, axes = plt.subplots(figsize=(8.8, 3.3))
    for place, flags in enumerate(methods.values()):
        height = stack(axes, place, peak_parts("--model_name", "bigscience/bloom-3b", "--gpus", 2, *flags))
        axes.text(place, height + 1, f"{height:.0f}", ha="center")
    axes.set(xticks=range(6), xticklabels=list(methods), ylabel="GiB per GPU, bloom-3b on 2 GPUs, estimated")
    axes.yaxis.label.set_fontsize(8)
    legend(axes, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "comparison")


def scale() -> None:
    """Draw a bar for each method and number of GPUs."""
    figure, (held, sent) = plt.subplots(2, 1, figsize=(10, 5.2), sharex=True)
    number = {"ha": "center", "va": "bottom", "fontsize": 5.8}
    places = []
    for group, method in enumerate(METHODS):
        first = group * (len(GPUS) + 1)
        for place, gpus in enumerate(GPUS, first):
            places.append(place)
            shown = at_scale(method, gpus)
            height = stack(held, place, shown.held, width=0.85)
            held.text(place, height + 1, f"{height:.1f}", **number)
            bottom = 0.0
            for link, size in (("between nodes", shown.between_nodes / GB), ("inside nodes", shown.inside_nodes / GB)):
                sent.bar(place, size, 0.85, bottom, label=link, edgecolor="black", linewidth=0.4, **LINKS[link])
                bottom += size
                if size:
                    sent.text(place, bottom + 0.4, f"{bottom:.1f}", **number)
        held.text(first + (len(GPUS) - 1) / 2, -10, method, ha="center", va="center")
    held.set(ylabel="GiB that a rank holds", ylim=(0, 135))
    sent.set(ylabel="GB that a rank sends in a step", ylim=(0, 60), xlabel="GPUs, 8 in each node")
    sent.set(xticks=places, xticklabels=[*GPUS] * len(METHODS))
    sent.tick_params(axis="x", labelsize=6, length=0, pad=2)
    held.tick_params(axis="x", length=0)
    legend(held, loc="upper right")
    legend(sent, loc="upper right")
    figure.tight_layout()
    save(figure, "at-scale")


def memory() -> None:
    """Draw the memory of the four runs of docs/memory.md's table."""
    runs = {"baseline\n1 GPU": (1, ""), "ZeRO-2\n1 GPU": (1, "zero2"), "ZeRO-2\n2 GPUs": (2, "zero2"),
            "ZeRO-3\n2 GPUs": (2, "zero3")}  # fmt: skip
    figure, axes = plt.subplots(figsize=(7.4, 3.2))
    for place, (gpus, config) in enumerate(runs.values()):
        flags = ["--deepspeed", f"@ds_configs/{config}.json"] if config else []
        height = stack(axes, place, peak_parts("--gpus", gpus, *flags))
        axes.text(place, height + 0.3, f"{height:.1f}", ha="center")
    axes.set(xticks=range(4), xticklabels=list(runs), ylabel="GiB per GPU, bloom-560m, estimated", xlim=(-0.6, 5.2))
    legend(axes, loc="center right")
    save(figure, "memory")


def collectives() -> None:
    """Draw four ranks with four numbers each. Each rank has a colour, and sums are black."""
    colours = ["#9dc3e6", "#f8cbad", "#c5e0b4", "#ffe699"]
    summed = "#404040"
    own = [[(rank, part) for part in range(4)] for rank in range(4)]
    nothing = [None] * 4
    parts = [[(rank, rank) if part == rank else None for part in range(4)] for rank in range(4)]
    gathered = [[(part, part) for part in range(4)]] * 4
    sums = [("sum", part) for part in range(4)]
    scattered = [[("sum", part) if part == rank else None for part in range(4)] for rank in range(4)]
    shown = {
        "broadcast": ([own[0], nothing, nothing, nothing], [own[0]] * 4),
        "reduce": (own, [sums, nothing, nothing, nothing]),
        "all-reduce": (own, [sums] * 4),
        "reduce-scatter": (own, scattered),
        "all-gather": (parts, gathered),
    }
    figure, axes = plt.subplots(1, 5, figsize=(11, 2.6))
    for place, (name, states) in zip(axes, shown.items(), strict=True):
        for column, state in enumerate(states):
            for rank, numbers in enumerate(state):
                for part, number in enumerate(numbers):
                    corner = (column * 5.6 + part, -1.3 * rank)
                    if number is None:
                        place.add_patch(plt.Rectangle(corner, 1, 1, **EMPTY))
                        continue
                    source = number[0]
                    colour = summed if source == "sum" else colours[source]
                    place.add_patch(plt.Rectangle(corner, 1, 1, fc=colour, ec="black", lw=0.5))
                    text = "Σ" if source == "sum" else f"{source}{number[1]}"
                    place.text(corner[0] + 0.5, corner[1] + 0.45, text, ha="center", va="center", fontsize=6.5,
                               color="white" if source == "sum" else "black")  # fmt: skip
        place.annotate("", (5.4, -1.5), (4.2, -1.5), arrowprops={"arrowstyle": "->"})
        place.set(xlim=(-0.2, 9.8), ylim=(-4.2, 1.3), title=name, aspect="equal")
        place.axis("off")
    for rank in range(4):
        axes[0].text(-0.5, -1.3 * rank + 0.45, f"rank {rank}", ha="right", va="center", fontsize=8)
    save(figure, "collectives")


def by_hand() -> None:
    figure, axes = canvas(9.4, 3.6)
    rows = {"data parallel (gaps 1 to 4)": 2.2, "ZeRO-1 (gaps 5 and 6)": 0.5}
    steps = {
        "data parallel (gaps 1 to 4)": ["Adam: all\nparameters"],
        "ZeRO-1 (gaps 5 and 6)": ["Adam: own\npart only", "all-gather\nof the parts"],
    }
    both = ["own rows\nof the batch", "forward,\nbackward", "all-reduce:\nmean of gradients"]
    for name, y in rows.items():
        axes.text(0.1, y + 1.05, name, fontsize=9, weight="bold")
        for number, text in enumerate([*both, *steps[name]]):
            sends = "all-" in text
            style = {"facecolor": "#f8cbad", "edgecolor": "#c55a11"} if sends else {}
            box(axes, 0.1 + 1.85 * number, y, 1.4, 0.8, text, **style)
            if number:
                arrow(axes, (0.1 + 1.85 * number - 0.4, y + 0.4), (0.1 + 1.85 * number - 0.05, y + 0.4))
    axes.text(0.1, 0.1, "orange: all ranks take part", fontsize=8)
    save(figure, "by-hand")


def hang_clinic() -> None:
    figure, axes = canvas(9.4, 2.4)
    steps = ["queue\nsqueue", "log\nany silent rank?", "process\nps, top", "stack\npy-spy dump", "network\nNCCL_DEBUG"]
    found = ["it waits for\nresources", "error of the\nfirst rank", "killed (137),\nor gone", "another\ncollective",
             "wrong interface,\nport, firewall"]  # fmt: skip
    for number, (step, cause) in enumerate(zip(steps, found, strict=True)):
        x = 0.1 + 1.88 * number
        box(axes, x, 1.4, 1.45, 0.8, step)
        box(axes, x, 0.15, 1.45, 0.7, cause, facecolor="white", edgecolor="#7f7f7f")
        arrow(axes, (x + 0.72, 1.35), (x + 0.72, 0.9))
        if number:
            arrow(axes, (x - 0.4, 1.8), (x - 0.03, 1.8))
    save(figure, "hang-clinic")


PHASES = {"data": "#7f7f7f", "forward": "#9dc3e6", "backward": "#1f4e79", "optimizer": "#a9d18e"}


def take_traces(arguments: list[str]) -> None:
    """Write one step of each rank's trace to profile.json: its phases and collectives."""
    kept = {}
    for argument in arguments:
        title, _, folder = argument.partition("=")
        kept[title] = {path.name.split(".")[0]: one_step(path) for path in sorted(Path(folder).glob("rank_*.json.gz"))}
    (HERE / "profile.json").write_text(json.dumps(kept) + "\n")


def one_step(trace: Path) -> dict[str, list]:
    """Return the start and length of each span in the second profiled step, in milliseconds from the step's start."""
    events = [
        event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if event.get("ph") == "X"
    ]
    step = sorted(event["ts"] for event in events if event["name"] == "profiled step")[1]
    length = next(event["dur"] for event in events if event["name"] == "profiled step" and event["ts"] == step)
    found: dict[str, list] = {name: [] for name in (*PHASES, "communication")}
    for event in events:
        name = "communication" if event["name"].startswith(("gloo:", "nccl")) else event["name"]
        if name in found and step <= event["ts"] < step + length:
            found[name].append([round((event["ts"] - step) / 1000, 2), round(event["dur"] / 1000, 2)])
    return found


def profile() -> None:
    titles = json.loads((HERE / "profile.json").read_text())
    rows = sum(map(len, titles.values()))
    figure, axes = plt.subplots(len(titles), 1, figsize=(9, 1.1 + 0.75 * rows),
                                gridspec_kw={"height_ratios": [len(ranks) for ranks in titles.values()]})  # fmt: skip
    for place, (title, ranks) in zip(axes, titles.items(), strict=True):
        for row, spans in enumerate(ranks.values()):
            for name, colour in PHASES.items():
                place.broken_barh(spans[name], (-row, 0.45), facecolor=colour, label=name)
            place.broken_barh(spans["communication"], (-row - 0.25, 0.2), facecolor="#c55a11", label="communication")
        place.set(
            yticks=[0.1 - row for row in range(len(ranks))], yticklabels=[name.replace("_", " ") for name in ranks]
        )
        place.set_title(title, loc="left", fontsize=9)
        place.tick_params(axis="y", length=0)
    axes[-1].set_xlabel("milliseconds")
    handles = dict(zip(*reversed(axes[-1].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, frameon=False, loc="lower center", ncols=5, bbox_to_anchor=(0.5, -0.04))
    figure.tight_layout()
    save(figure, "profile")


if __name__ == "__main__":
    if sys.argv[1:]:
        take_traces(sys.argv[1:])
    for draw in (environment, baseline, efficiency, memory, collectives, by_hand, ddp, batch_size, deepspeed_config,
                 zero, offload, multi_gpu, multi_node, fsdp, custom_model, tensor_parallel, dimensions, comparison,
                 scale, profile, hang_clinic):  # fmt: skip
        draw()
