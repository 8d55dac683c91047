"""Pipeline parallelism by hand, from one micro batch at a time to 1F1B. Fill in the six gaps, and check each one.

    python exercises/check.py exercises/pipeline.py                                       # which gaps are right
    python exercises/pipeline.py                                                          # works from the start
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/pipeline.py                   # works after gap 3
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 exercises/pipeline.py --schedule gpipe  # works after gap 4
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 exercises/pipeline.py --schedule 1f1b   # works after gaps 5 and 6
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 exercises/pipeline.py --schedule 1f1b --library

A small GPT learns to count. Its layers are cut into stages, one for each rank. With every schedule the losses must be
the same as in one process. The page docs/pipeline.md explains each gap.
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
# Let OpenMP's threads wait only briefly in a loop. Otherwise one process is many times slower next to other programs
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3
ROWS, TOKENS, WIDTH, VOCABULARY = 2, 16, 64, 32  # ROWS: sequences in a micro batch
BLOCKS = 12  # 2, 3 and 4 stages can have equal numbers of blocks
# Seconds that a stage takes for one micro batch. A stage computes, then sleeps for the rest of this time: on one core,
# four ranks can sleep at the same time, but they cannot compute at the same time. A backward pass has twice the work of
# a forward pass.
SECONDS = {"forward": 0.05, "backward": 0.1}


def own_layers(layers: nn.Sequential, rank: int, world: int) -> nn.Sequential:
    """Gap 1: return the layers of this rank's stage.

    layers: the embedding, then BLOCKS blocks, then the head.
    All stages have the same number of consecutive blocks. The first stage also has the embedding, and the last stage
    also has the head. A slice of an nn.Sequential is an nn.Sequential again.
    """
    blocks = BLOCKS // world
    begin = 0 if rank == 0 else 1 + rank * blocks
    end = len(layers) if rank == world - 1 else 1 + (rank + 1) * blocks
    return layers[begin:end]


class Stage:
    """The layers of one rank, and the micro batches that still need their backward pass."""

    def __init__(self, layers: nn.Sequential, rank: int, world: int):
        self.layers = layers
        self.rank = rank
        self.is_first = rank == 0
        self.is_last = rank == world - 1
        self.kept = {}  # number of a micro batch -> its inputs and outputs
        self.sent = []  # messages that may not have arrived yet
        self.max_kept = 0
        self.spans = []  # ("forward" or "backward", micro batch, begin and end in seconds)

    def forward(self, micro: int, batch: list[torch.Tensor]) -> None:
        """Gap 2: run the forward pass of micro batch number `micro` through this stage's layers.

        1. Inputs: the first stage uses input_tokens(batch[micro]). The other stages `receive` their inputs from the
           previous stage. They call requires_grad_() on them, because the previous stage will need their gradient.
        2. Outputs: self.layers(inputs). The last stage replaces them by compute_loss(outputs, batch[micro]), divided by
           len(batch), because the loss of a batch is the mean over its micro batches.
           Compute the outputs inside `with self.measured("forward", micro):`. Receive and send outside, because
           waiting for a message is not work.
        3. Keep inputs and outputs for the backward pass: self.kept[micro] = inputs, outputs.
        4. All stages except the last `send` outputs.detach() to the next stage.
        """
        inputs = input_tokens(batch[micro]) if self.is_first else self.receive(self.rank - 1).requires_grad_()
        with self.measured("forward", micro):
            outputs = self.layers(inputs)
            if self.is_last:
                outputs = compute_loss(outputs, batch[micro]) / len(batch)
        self.kept[micro] = inputs, outputs
        if not self.is_last:
            self.send(outputs.detach(), self.rank + 1)

    def backward(self, micro: int) -> None:
        """Gap 3: run the backward pass of micro batch number `micro`.

        1. Take the inputs and outputs of the micro batch out of self.kept.
        2. All stages except the last `receive` the gradient of their outputs from the next stage.
        3. Call outputs.backward(gradient). The last stage has no gradient to pass: its outputs are the loss.
           Measure only this call: `with self.measured("backward", micro):`.
        4. All stages except the first `send` the gradient of their inputs to the previous stage.
        """
        inputs, outputs = self.kept.pop(micro)
        gradient = None if self.is_last else self.receive(self.rank + 1)
        with self.measured("backward", micro):
            outputs.backward(gradient)
        if not self.is_first:
            self.send(inputs.grad, self.rank - 1)

    def receive(self, other: int) -> torch.Tensor:
        """Return the next message from the other rank: hidden states of a micro batch, or their gradient."""
        tensor = torch.empty(ROWS, TOKENS, WIDTH)
        dist.recv(tensor, other)
        return tensor

    def send(self, tensor: torch.Tensor, other: int) -> None:
        """Gap 6: send without waiting until the other rank has received the message.

        dist.send waits for the receiver. This works with the first two schedules, but hangs with 1F1B. Try 1F1B first:
        it prints nothing, and Ctrl-C ends it after half a minute. Then use dist.isend, which does not wait. Append the
        object that it returns to self.sent: `run_stages` waits for these messages at the end of the step.
        """
        # The exercise begins with: dist.send(tensor, other)
        self.sent.append(dist.isend(tensor, other))

    @contextmanager
    def measured(self, what: str, micro: int):
        """Record when the stage computes. Sleep until the pass has taken SECONDS[what]."""
        begin = time.monotonic()  # all processes of a machine share this clock
        yield
        time.sleep(max(0.0, begin + SECONDS[what] - time.monotonic()))
        self.spans.append((what, micro, begin, time.monotonic()))


# A schedule returns the order in which a stage computes: a list of ("forward" or "backward", micro batch number).


def one_at_a_time(rank: int, world: int, micro_batches: int) -> list[tuple[str, int]]:
    order = []
    for micro in range(micro_batches):
        order += [("forward", micro), ("backward", micro)]
    return order


def gpipe(rank: int, world: int, micro_batches: int) -> list[tuple[str, int]]:
    """Gap 4: return the forward passes of all micro batches, then all backward passes, in ascending order."""
    forward = [("forward", micro) for micro in range(micro_batches)]
    backward = [("backward", micro) for micro in range(micro_batches)]
    return forward + backward


def one_forward_one_backward(rank: int, world: int, micro_batches: int) -> list[tuple[str, int]]:
    """Gap 5: return the order of 1F1B, in which each stage keeps as few micro batches as possible.

    The last stage starts with one forward pass, the stage before it with two, the stage before that with three, and so
    on. Then each stage alternates: one backward pass, one forward pass. When no forward passes are left, it runs the
    remaining backward passes. With few micro batches, a stage may run all forward passes before its first backward
    pass.
    """
    ahead = min(micro_batches, world - rank)
    order = [("forward", micro) for micro in range(ahead)]
    for micro in range(micro_batches):
        order.append(("backward", micro))
        if ahead + micro < micro_batches:
            order.append(("forward", ahead + micro))
    return order


# All gaps are above.

SCHEDULES = {"one_at_a_time": one_at_a_time, "gpipe": gpipe, "1f1b": one_forward_one_backward}


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) / 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.TransformerEncoderLayer):
    """Attention and feed-forward layers, as in the blocks of every GPT."""

    def __init__(self):
        super().__init__(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0, batch_first=True, norm_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        causal_mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        return super().forward(hidden, src_mask=causal_mask, is_causal=True)


def whole_model() -> nn.Sequential:
    """Make a model with the same weights in every process.

    The head does not share the weights of the embedding. Otherwise the first and the last stage would have to add up
    the gradients of the shared weights in each step.
    """
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, VOCABULARY))


def make_batch(step: int, micro_batches: int) -> list[torch.Tensor]:
    """Make micro batches of ROWS sequences. A sequence counts up from a random number in steps of 1, 2 or 3."""
    random = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (micro_batches, ROWS, 1), generator=random)
    stride = torch.randint(1, 4, (micro_batches, ROWS, 1), generator=random)
    return list((first + stride * torch.arange(TOKENS + 1)) % VOCABULARY)


def input_tokens(sequences: torch.Tensor) -> torch.Tensor:
    return sequences[:, :-1]


def compute_loss(logits: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over a micro batch. The model predicts each number from the numbers before it."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def run_one_process(model: nn.Sequential, batch: list[torch.Tensor]) -> float:
    """Compute the gradients of a batch in one process. Return its loss."""
    loss = 0.0
    for sequences in batch:
        part = compute_loss(model(input_tokens(sequences)), sequences) / len(batch)
        part.backward()
        loss += part.item()
    return loss


def run_stages(stage: Stage, order: list[tuple[str, int]], batch: list[torch.Tensor]) -> float:
    """Compute the gradients of a batch for this rank's layers. The last stage returns the loss, the other stages 0."""
    loss = 0.0
    stage.spans.clear()
    for what, micro in order:
        if what == "forward":
            stage.forward(micro, batch)
            stage.max_kept = max(stage.max_kept, len(stage.kept))
            loss += stage.kept[micro][1].item() if stage.is_last else 0
        else:
            stage.backward(micro)
    while stage.sent:
        stage.sent.pop().wait()
    return loss


def make_library_runner(layers: nn.Sequential, rank: int, world: int, schedule: str, micro_batches: int) -> Callable:
    """Return a function like run_stages that uses torch.distributed.pipelining, which handles shapes and messages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage = PipelineStage(layers, rank, world, torch.device("cpu"))
    pipeline = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, micro_batches, loss_fn=compute_loss)

    def run_batch(batch: list[torch.Tensor]) -> float:
        sequences = torch.cat(batch)  # the library cuts the batch into micro batches again
        losses = []
        if rank == 0:
            pipeline.step(input_tokens(sequences))
        else:
            pipeline.step(target=sequences, losses=losses)  # only the last stage uses target and losses
        return sum(loss.item() for loss in losses) / len(batch)

    return run_batch


def train(layers: nn.Sequential, run_batch: Callable, micro_batches: int) -> list[float]:
    """Train the layers, and return the losses.

    run_batch: function that computes the gradients of a batch and returns its loss
    """
    adam = torch.optim.Adam(layers.parameters(), lr=0.001)  # each rank has its own Adam for its layers
    losses = []
    for step in range(1, STEPS + 1):
        adam.zero_grad()
        losses.append(run_batch(make_batch(step, micro_batches)))
        adam.step()
    return losses


def show(losses: list[float]) -> None:
    for step, loss in enumerate(losses, start=1):
        print(f"step {step}: loss {loss:.6f}")


def timeline(spans: list[tuple], start: float) -> str:
    """Draw one character for each 0.05 s.

    The micro batches are a, b, c and so on in the forward pass, and A, B, C in the backward pass. Dots mean waiting.
    """
    line = []
    for what, micro, begin, end in spans:
        first, last = (round((moment - start) / SECONDS["forward"]) for moment in (begin, end))
        letter = ascii_lowercase[micro % 26]
        line += "." * (first - len(line))
        line += (letter if what == "forward" else letter.upper()) * (last - len(line))
    return "".join(line)


def show_time(spans: list[list[tuple]], kept: list[int], consecutive: int) -> None:
    """Print when each rank computed, and how long it waited.

    consecutive: number of micro batches that follow each other without emptying the pipeline
    """
    start = min(begin for rank_spans in spans for _, _, begin, _ in rank_spans)
    seconds = max(end for rank_spans in spans for _, _, _, end in rank_spans) - start
    for rank, rank_spans in enumerate(spans):
        print(f"rank {rank} |{timeline(rank_spans, start)}  kept at most {kept[rank]}")
    world = len(spans)
    busy = sum(end - begin for rank_spans in spans for _, _, begin, end in rank_spans)
    print(f"a step takes {seconds:.2f} s, of which a rank waits {1 - busy / world / seconds:.1%} in the mean;")
    share = (world - 1) / (consecutive + world - 1)
    print(f"(p - 1) / (m + p - 1) = {world - 1} / {consecutive + world - 1} = {share:.1%}")


def save_picture(spans: list[list[tuple]], schedule: str, path: str) -> None:
    from matplotlib import pyplot

    pyplot.rcParams |= {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    start = min(begin for rank_spans in spans for _, _, begin, _ in rank_spans)
    figure, axes = pyplot.subplots(figsize=(7.36, 0.9 + 0.3 * len(spans)), layout="constrained")
    for rank, rank_spans in enumerate(spans):
        for what, micro, begin, end in rank_spans:
            letter = ascii_lowercase[micro % 26]
            face, ink = ("#c9c3e6", "black") if what == "forward" else ("#5f539c", "white")
            axes.barh(rank, end - begin, left=begin - start, color=face, edgecolor="black", linewidth=0.4)
            axes.text((begin + end) / 2 - start, rank, letter, ha="center", va="center", color=ink)
    axes.set(xlabel="seconds; letters are micro batches", yticks=range(len(spans)))
    axes.set_yticklabels(f"rank {rank}" for rank in range(len(spans)))
    axes.invert_yaxis()
    axes.set_title(f"{schedule}: light is forward, dark is backward, white is the bubble", fontsize=8, loc="left")
    figure.savefig(path, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="one_at_a_time")
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--library", action="store_true", help="run gpipe or 1f1b with torch.distributed.pipelining")
    parser.add_argument("--picture", metavar="FILE", help="save a picture of when each rank computed in the last step")
    arguments = parser.parse_args()
    schedule, micro_batches = arguments.schedule, arguments.micro_batches
    world = int(os.environ.get("WORLD_SIZE", 1))
    if BLOCKS % world:
        parser.error(f"{BLOCKS} blocks do not make {world} equal stages; start with torchrun --nproc_per_node=4")
    if world == 1 and (arguments.library or arguments.picture):
        parser.error("--library and --picture need several stages; start with torchrun --nproc_per_node=4")
    if arguments.library and schedule == "one_at_a_time":
        parser.error("--library does not have the schedule one_at_a_time; add --schedule gpipe or --schedule 1f1b")
    if micro_batches < 1:
        parser.error(f"--micro_batches: {micro_batches} is too few; give 1 or more")
    if arguments.library and schedule == "1f1b" and micro_batches < world:
        remedy = f"give {world} or more, or leave out --library"
        parser.error(f"--micro_batches: the library's 1F1B needs at least one for each of the {world} stages; {remedy}")

    layers = whole_model()
    if world == 1:
        show(train(layers, partial(run_one_process, layers), micro_batches))
        return

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = own_layers(layers, rank, world)
    stage = Stage(layers, rank, world)
    if arguments.library:
        run_batch = make_library_runner(layers, rank, world, schedule, micro_batches)
    else:
        run_batch = partial(run_stages, stage, SCHEDULES[schedule](rank, world, micro_batches))
    losses = train(layers, run_batch, micro_batches)

    results = [None] * world
    dist.all_gather_object(results, (losses, stage.spans, stage.max_kept))
    if rank == 0:
        show(results[-1][0])  # only the last stage knows the losses
        if not arguments.library:
            spans, kept = [each[1] for each in results], [each[2] for each in results]
            show_time(spans, kept, 1 if schedule == "one_at_a_time" else micro_batches)
            if arguments.picture:
                save_picture(spans, schedule, arguments.picture)
    dist.destroy_process_group()
    # Free what is left of the process group now. If one of its threads still runs when Python exits, Python aborts.
    gc.collect()


if __name__ == "__main__":
    main()
