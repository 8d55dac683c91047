"""Draw the figures of the pages. Bytes are those of scripts/estimate_memory.py; nothing in them is a measurement.

PYTHONPATH=scripts python docs/figures/draw.py
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from estimate_memory import GIB, estimate, read_options
from model_shape import shape_for

HERE = Path(__file__).resolve().parent
plt.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 120}
# Told apart without colour: lightness and hatching
PARTS = {
    "parameters": {"color": "#1f4e79"},
    "gradients": {"color": "#c55a11", "hatch": "///"},
    "optimizer state": {"color": "#a9d18e", "hatch": "..."},
    "buffers": {"color": "#7f7f7f", "hatch": "xxx"},
    "activations": {"color": "#ffe699"},
    "logits": {"color": "#d9d9d9", "hatch": "\\\\\\"},
    "loss": {"color": "#9dc3e6", "hatch": "---"},  # without logits
}
EMPTY = {"facecolor": "white", "edgecolor": "#bbbbbb", "linestyle": "--"}


def options(*flags: object):
    configs = HERE.parents[1]
    return read_options([str(flag).replace("@", f"{configs}/") for flag in flags], environment={})


def save(figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.png", bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    print(f"docs/figures/{name}.png")


def stack(axes, place: float, held: list, where: str = "gpu", parts=PARTS, width: float = 0.6) -> float:
    """One bar of GiB on top of each other; returns its height."""
    bottom = 0.0
    for part in held:
        size = getattr(part, where) / GIB
        if part.what in parts and size:
            axes.bar(place, size, width, bottom, label=part.what, edgecolor="black", linewidth=0.4, **PARTS[part.what])
            bottom += size
    return bottom


def legend(axes, **where: object) -> None:
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(list(handles.values())[::-1], list(handles)[::-1], frameon=False, **where)


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
    axes.text(5.0, 0.02, "loggers stand beside the training: it goes on when they die", ha="center", fontsize=8)
    save(figure, "environment")


def baseline() -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    labels = []
    for place, flags in enumerate(([], ["--per_device_train_batch_size", 1], ["--max_length", 128])):
        height = stack(axes, place, estimate(options(*flags)))
        axes.text(place, height + 0.2, f"{height:.1f}", ha="center")
        labels.append(["4 x 512 tokens\n(the baseline)", "1 x 512", "4 x 128"][place])
    axes.set(xticks=range(3), xticklabels=labels, ylabel="GiB on one GPU, estimated", xlim=(-0.6, 4.3))
    legend(axes, loc="center right")
    save(figure, "baseline")


def efficiency() -> None:
    at_once = ["--per_device_train_batch_size", 16, "--gradient_accumulation_steps", 1]
    chunked = ["--loss", "chunked"]
    checkpointed = [*chunked, "--activation_checkpointing"]
    runs = {
        "4 sequences,\nfull logits": [],
        "chunked\nloss": chunked,
        "+ activation\ncheckpointing": checkpointed,
        "16 sequences,\nfull logits": at_once,
        "chunked\nloss ": [*at_once, *chunked],
        "+ activation\ncheckpointing ": [*at_once, *checkpointed],
    }
    figure, axes = plt.subplots(figsize=(8.4, 3.4))
    for place, flags in enumerate(runs.values()):
        height = stack(axes, place, estimate(options("--bf16", *flags)))
        axes.text(place, height + 0.6, f"{height:.1f}", ha="center")
    axes.set(xticks=range(6), xticklabels=list(runs), ylabel="GiB on one GPU, bloom-560m, estimated")
    legend(axes, loc="upper left")
    save(figure, "efficiency")


def deepspeed_config() -> None:
    figure, axes = canvas(9, 2.9)
    box(axes, 0.1, 1.9, 1.9, 0.8, "--learning_rate 1e-4\nBATCH_SIZE=8")
    box(axes, 0.1, 0.4, 1.9, 0.8, 'zero2.json\n"lr": "auto"\n"stage": 2')
    box(axes, 2.9, 1.9, 1.8, 0.8, "TrainingArguments")
    box(axes, 2.9, 0.4, 1.8, 0.8, "every key known?\nevery value valid?")
    box(axes, 5.6, 1.15, 1.5, 0.8, 'engine:\nno "auto" left')
    box(axes, 7.7, 1.15, 1.2, 0.8, "knob audit\nexit code 3")
    arrow(axes, (2.05, 2.3), (2.85, 2.3))
    arrow(axes, (2.05, 0.8), (2.85, 0.8))
    arrow(axes, (4.75, 2.3), (5.55, 1.75))
    axes.text(5.25, 2.25, 'fills each "auto"', fontsize=8)
    arrow(axes, (4.75, 0.8), (5.55, 1.35))
    arrow(axes, (3.8, 1.25), (3.8, 1.85))
    axes.text(3.7, 1.55, "a literal that contradicts a flag:\nexit code 2", fontsize=8, va="center", ha="right")
    arrow(axes, (7.15, 1.55), (7.65, 1.55))
    save(figure, "deepspeed-config")


def zero() -> None:
    """4 GPUs, each a column of three rows; a share is a quarter of the row."""
    figure, axes = plt.subplots(1, 4, figsize=(9, 2.9))
    kept = [("parameters", 2, 3), ("gradients", 2, 2), ("optimizer state", 12, 1)]  # bytes, stage that divides them
    for stage, place in enumerate(axes):
        total = 0.0
        for row, (part, size, divided) in enumerate(kept):
            for gpu in range(4):
                whole = stage < divided
                place.add_patch(plt.Rectangle((gpu, 2 - row), 0.9, 0.8, **EMPTY))
                height, offset = (0.8, 0) if whole else (0.2, 0.2 * gpu)
                place.add_patch(plt.Rectangle((gpu, 2 - row + offset), 0.9, height, ec="black", lw=0.4, **PARTS[part]))
            total += size if whole else size / 4
        place.set(xlim=(-0.1, 4), ylim=(-0.2, 3), yticks=[], xticks=[x + 0.45 for x in range(4)])
        place.set(xticklabels=[f"GPU {gpu}" for gpu in range(4)], title=f"ZeRO-{stage}\n{total:g} bytes per parameter")
        place.tick_params(length=0, labelsize=7)
        place.title.set_fontsize(8.5)
        for side in place.spines.values():
            side.set_visible(False)
    axes[0].set(
        yticks=[2.4, 1.4, 0.4], yticklabels=["parameters\n(2 bytes)", "gradients\n(2)", "optimizer\nstate (12)"]
    )
    save(figure, "zero")


def offload() -> None:
    figure, axes = plt.subplots(figsize=(8.4, 3.3))
    ticks = []
    for group, stage in enumerate((1, 2, 3)):
        for number, (config, text) in enumerate(((f"zero{stage}", ""), (f"zero{stage}_cpu_offload", " + offload"))):
            held = estimate(options("--deepspeed", f"@ds_configs/{config}.json"))
            for where, shift in (("gpu", -0.17), ("cpu", 0.17)):
                place = 2.6 * group + 1.2 * number + 2 * shift
                height = stack(axes, place, held, where, [*PARTS][:4], 0.55)
                if height:
                    axes.text(place, height + 0.1, where.upper(), ha="center", fontsize=7.5)
            ticks.append((2.6 * group + 1.2 * number, f"ZeRO-{stage}\n{text}"))
    axes.set(xticks=[place for place, _ in ticks], xticklabels=[text for _, text in ticks], ylim=(0, 13))
    axes.set_ylabel("GiB, bloom-560m on one GPU, estimated")
    legend(axes, loc="upper right", ncols=4)
    save(figure, "offload")


def multi_gpu() -> None:
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.5))
    gpus = [2, 4, 6, 8]
    for place, (title, ideal, unit) in zip(
        axes,
        (
            ("runtime", [1, 1, 1, 1], "of the 2-GPU run"),
            ("samples/s, all GPUs", [1, 2, 3, 4], "of the 2-GPU run"),
            ("samples/s per GPU", [1, 1, 1, 1], "of the 2-GPU run"),
        ),
        strict=True,
    ):
        place.plot(gpus, ideal, "--", color="black")
        place.set(title=title, xticks=gpus, xlabel="GPUs, 250 questions each", ylim=(0, 4.4), ylabel=unit)
        place.title.set_fontsize(9)
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
    axes.text(5.35, 1.1, "who is there?", ha="center", fontsize=8)
    save(figure, "multi-node")


def fsdp() -> None:
    """Which of six units is whole on a rank, over the forward and the backward pass."""
    rows = ["embedding, head", *(f"block {i}" for i in range(1, 6))]
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
    for place, title in zip(axes, ("FULL_SHARD", "SHARD_GRAD_OP", "one unit (nothing wrapped)"), strict=True):
        for row in range(6):
            last = 11
            if title.startswith("one") or row == 0:
                spans = [(0, 12)]
            elif title == "FULL_SHARD":
                spans = [(row - 1, 2), (last - row - 1, 2)]  # its own time, and one before: prefetched
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
        shape = shape_for(options("--model_name", "custom-gpt", "--num_layers", layers))
        blocks, total = sum(shape.block_sizes) / 1e6, shape.parameters / 1e6
        axes.bar(place, total - blocks, 0.6, color="#d9d9d9", hatch="///", ec="black", lw=0.4, label="embeddings, head")
        axes.bar(place, blocks, 0.6, total - blocks, color="#1f4e79", ec="black", lw=0.4, label="blocks")
        axes.text(place, total + 20, f"{total:.0f}", ha="center")
    axes.set(xticks=range(4), xticklabels=["2 GPUs\n3 layers", "4 GPUs\n6", "8 GPUs\n12", "16 GPUs\n24"])
    axes.set_ylabel("million parameters")
    legend(axes, loc="upper left")
    save(figure, "custom-model")


def comparison() -> None:
    methods = {
        "DDP": [],
        "FSDP2": ["--fsdp", "--fsdp_config", "@fsdp_configs/full_shard.json"],
        "FSDP2\n+ offload": ["--fsdp", "--fsdp_config", "@fsdp_configs/full_shard_cpu_offload.json"],
        "ZeRO-2": ["--deepspeed", "@ds_configs/zero2.json"],
        "ZeRO-3": ["--deepspeed", "@ds_configs/zero3.json"],
        "ZeRO-3\n+ offload": ["--deepspeed", "@ds_configs/zero3_cpu_offload.json"],
    }
    figure, axes = plt.subplots(figsize=(8.4, 3.3))
    for place, flags in enumerate(methods.values()):
        height = stack(axes, place, estimate(options("--model_name", "bigscience/bloom-3b", "--gpus", 2, *flags)))
        axes.text(place, height + 1, f"{height:.0f}", ha="center")
    axes.set(xticks=range(6), xticklabels=list(methods), ylabel="GiB per GPU, bloom-3b on 2 GPUs, estimated")
    axes.yaxis.label.set_fontsize(8)
    legend(axes, loc="upper right")
    save(figure, "comparison")


def memory() -> None:
    """The four runs of the page's table."""
    runs = {"baseline\n1 GPU": (1, ""), "ZeRO-2\n1 GPU": (1, "zero2"), "ZeRO-2\n2 GPUs": (2, "zero2"),
            "ZeRO-3\n2 GPUs": (2, "zero3")}  # fmt: skip
    figure, axes = plt.subplots(figsize=(7.4, 3.2))
    for place, (gpus, config) in enumerate(runs.values()):
        flags = ["--deepspeed", f"@ds_configs/{config}.json"] if config else []
        height = stack(axes, place, estimate(options("--gpus", gpus, *flags)))
        axes.text(place, height + 0.3, f"{height:.1f}", ha="center")
    axes.set(xticks=range(4), xticklabels=list(runs), ylabel="GiB per GPU, bloom-560m, estimated", xlim=(-0.6, 5.2))
    legend(axes, loc="center right")
    save(figure, "memory")


if __name__ == "__main__":
    for draw in (environment, baseline, efficiency, deepspeed_config, zero, offload, multi_gpu, multi_node, fsdp,
                 custom_model, comparison, memory):  # fmt: skip
        draw()
