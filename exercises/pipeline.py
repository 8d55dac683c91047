"""Pipeline parallelism by hand, from one micro batch at a time to 1F1B. Fill in the six gaps, and check each one.

    python exercises/check.py exercises/pipeline.py                          # which gaps are right
    python exercises/pipeline.py                                             # one process: works from the start
    torchrun --nproc_per_node=2 exercises/pipeline.py                        # two stages: after gap 3
    torchrun --nproc_per_node=4 exercises/pipeline.py --schedule gpipe       # after gap 4
    torchrun --nproc_per_node=4 exercises/pipeline.py --schedule 1f1b        # after gaps 5 and 6
    torchrun --nproc_per_node=4 exercises/pipeline.py --schedule 1f1b --library    # the same by PyTorch's own stages

A small GPT learns to count. Its layers are cut into stages, one for each rank. The losses must be those of one
process, whatever the schedule. The page docs/pipeline.md explains each gap.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from string import ascii_lowercase

# This exercise runs on the CPU, so hide GPUs before torch is imported. In torch 2.13 each Optimizer.step asks for the
# current CUDA stream, which starts CUDA. This is slow, and a GPU in exclusive-process mode rejects the second rank.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3
ROWS, TOKENS, WIDTH, VOCABULARY = 2, 16, 64, 32  # ROWS: sequences of a micro batch
BLOCKS = 12  # so that 2, 3 and 4 stages have the same number of them
# Seconds of a stage in one micro batch. It sleeps when it has computed: four ranks can sleep at the same time on one
# core, and cannot compute. A backward pass has twice the work of a forward pass
SECONDS = {"forward": 0.05, "backward": 0.1}


def own_layers(layers: nn.Sequential, rank: int, world: int) -> nn.Sequential:
    """Gap 1: the layers of this rank's stage. layers: the embedding, BLOCKS blocks, the head.

    All stages have the same number of blocks, in their order; the first one has the embedding, too, and the last one
    the head. A slice of an nn.Sequential is one.
    """
    raise NotImplementedError("gap 1")


class Stage:
    """The layers of one rank, and the micro batches that have been forward here and not yet backward."""

    def __init__(self, layers: nn.Sequential, rank: int, world: int):
        self.layers = layers
        self.rank = rank
        self.is_first = rank == 0
        self.is_last = rank == world - 1
        self.kept = {}  # of each micro batch, its inputs and outputs
        self.sent = []  # messages that may still be under way
        self.most_kept = 0
        self.spans = []  # (forward or backward, micro batch, begin, end in seconds)

    def forward(self, micro: int, batch: list[torch.Tensor]) -> None:
        """Gap 2: the forward pass of micro batch number `micro` through this stage's layers.

        Inputs: the first stage takes those of batch[micro], by `inputs_of`. Others `receive` them from the stage
        before, and call requires_grad_() on them, as that stage is going to ask for their gradient.
        Outputs: self.layers(inputs); on the last stage then their loss, by `loss_of`, divided by len(batch), as the
        loss of the batch is the mean. Measure this alone, as waiting for a message is no work: `with
        self.measured("forward", micro):`.
        Keep both for the backward pass: self.kept[micro] = inputs, outputs.
        All but the last stage `send` their outputs to the stage behind, by outputs.detach().
        """
        raise NotImplementedError("gap 2")

    def backward(self, micro: int) -> None:
        """Gap 3: the backward pass of the same micro batch. It takes the pair out of self.kept.

        The last stage begins with its loss. Others `receive` the gradient of their outputs from the stage behind, and
        begin with outputs.backward(gradient). Measure .backward alone: `with self.measured("backward", micro):`.
        Then each but the first stage sends the gradient of its inputs to the stage before.
        """
        raise NotImplementedError("gap 3")

    def receive(self, other: int) -> torch.Tensor:
        """What the other rank sends next: hidden states of a micro batch, or their gradient."""
        tensor = torch.empty(ROWS, TOKENS, WIDTH)
        dist.recv(tensor, other)
        return tensor

    def send(self, tensor: torch.Tensor, other: int) -> None:
        """Gap 6: send, and do not wait until the other rank has received.

        dist.send waits for that. It is good enough for the first two schedules, and hangs with 1F1B. Try that first:
        nothing is printed, and Ctrl-C ends it after half a minute. Then take dist.isend. It returns what one can wait
        for: append that to self.sent, and `by_stages` waits for it at the end of the step.
        """
        dist.send(tensor, other)

    @contextmanager
    def measured(self, what: str, micro: int):
        begin = time.monotonic()  # the same clock for all processes of a machine
        yield
        time.sleep(max(0.0, begin + SECONDS[what] - time.monotonic()))
        self.spans.append((what, micro, begin, time.monotonic()))


# Schedules: in which order a stage computes, as ("forward" or "backward", number of the micro batch)


def one_at_a_time(rank: int, world: int, micro_batches: int) -> list[tuple[str, int]]:
    order = []
    for micro in range(micro_batches):
        order += [("forward", micro), ("backward", micro)]
    return order


def gpipe(rank: int, world: int, micro_batches: int) -> list[tuple[str, int]]:
    """Gap 4: all micro batches forward, then all backward, the first one first."""
    raise NotImplementedError("gap 4")


def one_forward_one_backward(rank: int, world: int, micro_batches: int) -> list[tuple[str, int]]:
    """Gap 5: as GPipe, but no stage keeps more micro batches than it must.

    The last stage goes backward with each micro batch at once. The stage before it has sent one more forward by then,
    the one before that two more. From then on each stage alternates: one backward, one forward. At the end it goes
    backward with what it has kept. With few micro batches a stage may have all of them forward before its first
    backward.
    """
    raise NotImplementedError("gap 5")


# No gaps from here on

SCHEDULES = {"one_at_a_time": one_at_a_time, "gpipe": gpipe, "1f1b": one_forward_one_backward}


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) / 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.TransformerEncoderLayer):
    """Attention and feed-forward, as in the middle of every GPT."""

    def __init__(self):
        super().__init__(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0, batch_first=True, norm_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        nobody_looks_ahead = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        return super().forward(hidden, src_mask=nobody_looks_ahead, is_causal=True)


def whole_model() -> nn.Sequential:
    """The same weights in every process. The head has weights of its own: with those of the embedding, first and last
    stage would have to add up the gradients of both in each step."""
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, VOCABULARY))


def batch_of(step: int, micro_batches: int) -> list[torch.Tensor]:
    """Micro batches of ROWS sequences that count up, from a random number in steps of 1, 2 or 3."""
    random = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (micro_batches, ROWS, 1), generator=random)
    stride = torch.randint(1, 4, (micro_batches, ROWS, 1), generator=random)
    return list((first + stride * torch.arange(TOKENS + 1)) % VOCABULARY)


def inputs_of(sequences: torch.Tensor) -> torch.Tensor:
    return sequences[:, :-1]


def loss_of(logits: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Mean over the numbers of a micro batch: each is to be predicted from those before it."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def by_one_process(model: nn.Sequential, batch: list[torch.Tensor]) -> float:
    """Gradients of a whole batch. Returns its loss."""
    loss = 0.0
    for sequences in batch:
        part = loss_of(model(inputs_of(sequences)), sequences) / len(batch)
        part.backward()
        loss += part.item()
    return loss


def by_stages(stage: Stage, order: list[tuple[str, int]], batch: list[torch.Tensor]) -> float:
    """The same, each rank for its own layers. The last stage returns the loss, the others 0."""
    loss = 0.0
    stage.spans.clear()
    for what, micro in order:
        if what == "forward":
            stage.forward(micro, batch)
            stage.most_kept = max(stage.most_kept, len(stage.kept))
            loss += stage.kept[micro][1].item() if stage.is_last else 0
        else:
            stage.backward(micro)
    while stage.sent:
        stage.sent.pop().wait()
    return loss


def by_library(layers: nn.Sequential, rank: int, world: int, schedule: str, micro_batches: int) -> Callable:
    """The same by torch.distributed.pipelining: shapes, messages and their order are the library's business."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage = PipelineStage(layers, rank, world, torch.device("cpu"))
    pipeline = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, micro_batches, loss_fn=loss_of)

    def gradients(batch: list[torch.Tensor]) -> float:
        sequences = torch.cat(batch)  # the library cuts it into micro batches again
        losses = []
        if rank == 0:
            pipeline.step(inputs_of(sequences))
        else:
            pipeline.step(target=sequences, losses=losses)  # both are for the last stage alone
        return sum(loss.item() for loss in losses) / len(batch)

    return gradients


def train(layers: nn.Sequential, gradients: Callable, micro_batches: int) -> list[float]:
    """gradients: computes those of a batch, and returns its loss."""
    adam = torch.optim.Adam(layers.parameters(), lr=0.001)  # each rank's, for its own layers
    losses = []
    for step in range(1, STEPS + 1):
        adam.zero_grad()
        losses.append(gradients(batch_of(step, micro_batches)))
        adam.step()
    return losses


def show(losses: list[float]) -> None:
    for step, loss in enumerate(losses, start=1):
        print(f"step {step}: loss {loss:.6f}")


def timeline(spans: list[tuple], start: float) -> str:
    """A letter for each 0.05 s: small in the forward pass of micro batch a, b, c and so on, large in the backward."""
    line = []
    for what, micro, begin, end in spans:
        first, last = (round((moment - start) / SECONDS["forward"]) for moment in (begin, end))
        letter = ascii_lowercase[micro % 26]
        line += "." * (first - len(line))
        line += (letter if what == "forward" else letter.upper()) * (last - len(line))
    return "".join(line)


def show_time(spans: list[list[tuple]], kept: list[int], together: int) -> None:
    """together: micro batches that are in the pipeline in a row."""
    start = min(begin for of_rank in spans for _, _, begin, _ in of_rank)
    seconds = max(end for of_rank in spans for _, _, _, end in of_rank) - start
    for rank, of_rank in enumerate(spans):
        print(f"rank {rank} |{timeline(of_rank, start)}  kept at most {kept[rank]}")
    world = len(spans)
    busy = sum(end - begin for of_rank in spans for _, _, begin, end in of_rank)
    print(f"a step takes {seconds:.2f} s, of which a rank waits {1 - busy / world / seconds:.1%} in the mean;")
    print(f"(p - 1) / (m + p - 1) = {world - 1} / {together + world - 1} = {(world - 1) / (together + world - 1):.1%}")


def save_picture(spans: list[list[tuple]], schedule: str, path: str) -> None:
    from matplotlib import pyplot

    start = min(begin for of_rank in spans for _, _, begin, _ in of_rank)
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.35 * len(spans)), layout="constrained")
    for rank, of_rank in enumerate(spans):
        for what, micro, begin, end in of_rank:
            letter = ascii_lowercase[micro % 26]
            face, ink = ("#9dc3e6", "black") if what == "forward" else ("#1f4e79", "white")
            axes.barh(rank, end - begin, left=begin - start, color=face, edgecolor="black", linewidth=0.4)
            axes.text((begin + end) / 2 - start, rank, letter, ha="center", va="center", color=ink, fontsize=8)
    axes.set(xlabel="seconds; letters are micro batches", yticks=range(len(spans)))
    axes.set_yticklabels(f"rank {rank}" for rank in range(len(spans)))
    axes.invert_yaxis()
    axes.set_title(f"{schedule}: light is forward, dark is backward, white is the bubble", fontsize=9, loc="left")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="one_at_a_time")
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--library", action="store_true", help="gpipe or 1f1b by torch.distributed.pipelining")
    parser.add_argument("--picture", metavar="FILE", help="save when each rank computed in the last step")
    arguments = parser.parse_args()
    schedule, micro_batches = arguments.schedule, arguments.micro_batches
    world = int(os.environ.get("WORLD_SIZE", 1))
    if BLOCKS % world:
        parser.error(f"{BLOCKS} blocks do not make {world} equal stages: start it by torchrun --nproc_per_node=4")
    if world == 1 and (arguments.library or arguments.picture):
        parser.error("--library and --picture need several stages: start it by torchrun --nproc_per_node=4")
    if arguments.library and schedule == "one_at_a_time":
        parser.error("--library has no such schedule: add --schedule gpipe or --schedule 1f1b")
    if micro_batches < 1:
        parser.error(f"--micro_batches: {micro_batches} is too few; give 1 or more")
    if arguments.library and schedule == "1f1b" and micro_batches < world:
        way_out = f"give {world} or more, or leave out --library"
        parser.error(f"--micro_batches: the library's 1F1B needs one for each of the {world} stages; {way_out}")

    layers = whole_model()
    if world == 1:
        show(train(layers, partial(by_one_process, layers), micro_batches))
        return

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = own_layers(layers, rank, world)
    stage = Stage(layers, rank, world)
    if arguments.library:
        gradients = by_library(layers, rank, world, schedule, micro_batches)
    else:
        gradients = partial(by_stages, stage, SCHEDULES[schedule](rank, world, micro_batches))
    losses = train(layers, gradients, micro_batches)

    everyone = [None] * world
    dist.all_gather_object(everyone, (losses, stage.spans, stage.most_kept))
    if rank == 0:
        show(everyone[-1][0])  # of the last stage
        if not arguments.library:
            spans, kept = [one[1] for one in everyone], [one[2] for one in everyone]
            show_time(spans, kept, 1 if schedule == "one_at_a_time" else micro_batches)
            if arguments.picture:
                save_picture(spans, schedule, arguments.picture)
    dist.destroy_process_group()
    # what is left of the group ends now: one of its threads that meets Python's own end aborts the process
    gc.collect()


if __name__ == "__main__":
    main()
