"""ZeRO-3 (FSDP) by hand: each rank keeps a part of every layer. Fill in the four gaps, and check each one.

    python exercises/check.py exercises/shard.py                      # which gaps are right
    python exercises/shard.py                                         # works from the start, without the gaps
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/shard.py  # works after gap 4
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 exercises/shard.py

The network and the data are those of data_parallel.py, so one, two and four processes must compute the losses that
data_parallel.py prints. At the end the program prints the bytes that rank 0 held and sent. The page docs/by-hand.md
explains each gap.
"""

import argparse
import gc
import os
from collections import Counter
from collections.abc import Callable

# This exercise runs on the CPU, so hide GPUs before torch is imported. In torch 2.13 each Optimizer.step asks for the
# current CUDA stream, which starts CUDA. This is slow, and a GPU in exclusive-process mode rejects the second rank.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Let OpenMP's threads wait only briefly in a loop. Otherwise one process is many times slower next to other programs
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
from torch import nn

STEPS = 60
BATCH = 16  # rows of one step, for all ranks together


def shard(flat: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Gap 1: return this rank's part of a flat tensor.

    All parts must be equally long, so append as few zeros as possible until the length is a multiple of `world`. Rank 0
    has the first part, rank 1 has the next, and so on.
    """
    raise NotImplementedError("gap 1")


class ShardedLinear(nn.Module):
    """A linear layer whose weight and bias are one flat tensor, of which each rank keeps a part.

    self.part    this rank's part, always in memory. Adam updates it, because it is the layer's only nn.Parameter
    self.whole   the parts of all ranks, one after the other. It has memory only while the layer computes
    """

    def __init__(self, linear: nn.Linear, rank: int, world: int):
        super().__init__()
        self.world = world
        self.rows, self.columns = linear.weight.shape
        flat = torch.cat([linear.weight.detach().flatten(), linear.bias.detach()])
        self.part = nn.Parameter(shard(flat, rank, world).clone())
        self.whole = torch.empty(len(self.part) * world, requires_grad=True)
        free(self.whole)
        self.call_around_passes()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Gap 2: gather the layer, compute its outputs, free the layer, and return the outputs.

        1. Give self.whole memory: allocate(self.whole).
        2. Collect the parts of all ranks in it: dist.all_gather_single(self.whole.data, self.part.data). With `.data`,
           autograd ignores this step.
        3. Compute the outputs: self.compute(inputs).
        4. Free self.whole, so that a rank holds only one whole layer at a time: free(self.whole).
        5. Return the outputs.
        """
        raise NotImplementedError("gap 2")

    def before_backward(self) -> None:
        """Gap 3: gather the layer again. Its backward pass also needs the weights, but forward() has freed them.

        loss.backward() calls this function when it reaches the layer. self.whole must have its memory and the parts of
        all ranks again, as in steps 1 and 2 of gap 2.
        """
        raise NotImplementedError("gap 3")

    def after_backward(self) -> None:
        """Gap 4: give each rank its part of the mean gradient, and free the rest.

        loss.backward() calls this function after the layer's backward pass. Then self.whole.grad is the gradient of the
        whole layer for this rank's rows of the batch.

        1. Give the part an empty gradient: self.part.grad = torch.empty_like(self.part).
        2. Store this rank's part of the sum over all ranks in it:
           dist.reduce_scatter_single(self.part.grad, self.whole.grad).
        3. Divide self.part.grad by self.world: the gradient of the whole batch is the mean over the ranks.
        4. Drop the gradient of the whole layer: self.whole.grad = None.
        5. Free self.whole.
        """
        raise NotImplementedError("gap 4")

    # All gaps are above.

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the layer with the weight and the bias that self.whole contains."""
        require_memory(self.whole, "forward() must gather self.whole before it calls compute()")
        self.watch("during the forward pass")
        weight = self.whole[: self.rows * self.columns].view(self.rows, self.columns)
        bias = self.whole[self.rows * self.columns :][: self.rows]
        return nn.functional.linear(inputs, weight, bias)

    def call_around_passes(self) -> None:
        """Let PyTorch call the functions above around the passes of this layer. FSDP uses hooks in the same way."""

        def before_forward(*_) -> None:
            self.watch("before the forward pass")

        def after_forward(layer: nn.Module, inputs: tuple, outputs: torch.Tensor) -> None:
            self.watch("after the forward pass")
            outputs.register_hook(before_backward)  # called when the gradient of the outputs is known

        def before_backward(gradient: torch.Tensor) -> None:
            self.watch("before the backward pass")
            self.before_backward()
            require_memory(self.whole, "before_backward() must gather self.whole")

        def after_backward(whole: torch.Tensor) -> None:
            self.watch("during the backward pass")
            self.after_backward()
            self.watch("after the backward pass")

        self.watch = lambda moment: None  # main() replaces it, to count bytes
        self.register_forward_pre_hook(before_forward)
        self.register_forward_hook(after_forward)
        self.whole.register_post_accumulate_grad_hook(after_backward)  # called when self.whole.grad is complete


def free(tensor: torch.Tensor) -> None:
    """Give back the memory of a tensor. The tensor remains, because the backward pass will use the same tensor."""
    tensor.untyped_storage().resize_(0)


def allocate(tensor: torch.Tensor) -> None:
    """Give a freed tensor memory again. Its numbers are undefined until something is copied into it."""
    tensor.untyped_storage().resize_(tensor.nbytes)


def require_memory(tensor: torch.Tensor, reason: str) -> None:
    """Raise an error if a tensor is freed. Without this check, computing with it crashes Python."""
    if bytes_in_memory(tensor) == 0:
        raise RuntimeError(f"the tensor is freed; {reason}")


def bytes_in_memory(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def count_held(layers: list[ShardedLinear], adam: torch.optim.Adam) -> tuple[int, int, int]:
    """Count the bytes of parameters, gradients and Adam's two moments that this rank has in memory."""
    parameters = [tensor for layer in layers for tensor in (layer.part, layer.whole)]
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [parameter.grad for parameter in parameters]
    return tuple(sum(map(bytes_in_memory, tensors)) for tensors in (parameters, gradients, moments))


def count_sent(collective: Callable, sent: Counter, world: int) -> Callable:
    """Return a function that calls the collective, and adds to `sent` the bytes that each rank sends in a ring.

    A rank sends (world - 1) / world of the largest tensor, which has the parts of all ranks. In an all-reduce it sends
    twice as much. (The gloo of torch 2.13 runs a reduce-scatter as an all-reduce, so it really sends twice as much.)
    """
    times = 2 if collective is dist.all_reduce else 1

    def call(*tensors, **options):
        sent[collective.__name__] += times * max(tensor.nbytes for tensor in tensors) * (world - 1) / world
        return collective(*tensors, **options)

    return call


def show_bytes(held: list[tuple], sent: Counter, numbers: int, world: int) -> None:
    """Print the counted bytes, and next to them the formulas of docs/zero.md for a model of `numbers` parameters."""
    print(f"\n{'bytes on rank 0 at layer 1':28}{'parameters':>12}{'gradients':>11}{'Adam':>7}{'sum':>7}")
    for moment, parameters, gradients, moments in held:
        total = parameters + gradients + moments
        print(f"{moment:28}{parameters:12}{gradients:11}{moments:7}{total:7}")
    print(f"{f'formula: 16 x {numbers} / {world} ranks':58}{16 * numbers / world:7.0f}")
    print("\nbytes that rank 0 sends in a step")
    for name, size in sent.items():
        print(f"{name:58}{size:7.0f}")
    print(f"{'sum':58}{sum(sent.values()):7.0f}")
    ddp = 2 * 4 * numbers * (world - 1) / world  # one all-reduce of all gradients
    print(f"{f'formula: 1.5 x {ddp:.0f}, the bytes of DDP':58}{1.5 * ddp:7.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.manual_seed(0)  # every rank begins with the same weights
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    rank, world = 0, int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
    layers, held, sent = [], [], Counter()
    if world > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        layers = [ShardedLinear(model[0], rank, world), ShardedLinear(model[2], rank, world)]
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
            setattr(dist, name, count_sent(getattr(dist, name), sent, world))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)  # with several ranks these parameters are the parts

    generator = torch.Generator().manual_seed(1)  # gives the same inputs on every rank
    for step in range(1, STEPS + 1):
        if world > 1 and step == STEPS:  # count the bytes of the last step
            sent.clear()
            layers[0].watch = lambda moment: held.append((moment, *count_held(layers, adam)))
        inputs = torch.randn(BATCH, 8, generator=generator)
        mine = inputs[rank::world]
        loss = nn.functional.mse_loss(model(mine), mine.sum(dim=1, keepdim=True))
        model.zero_grad()
        loss.backward()
        adam.step()
        sent_in_step = sent.copy()
        if world > 1:
            dist.all_reduce(loss.data)  # needed only for the printed loss
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item() / world:.5f}")
    if world > 1:
        if rank == 0:
            show_bytes(held, sent_in_step, numbers, world)
        dist.destroy_process_group()
        # Free what is left of the process group now. If one of its threads still runs when Python exits, Python aborts.
        gc.collect()


if __name__ == "__main__":
    main()
