"""Context parallelism by hand: the ranks of a ring share one text. Fill in the four gaps, and check each one.

    python exercises/check.py exercises/ring.py                      # which gaps are right
    python exercises/ring.py                                         # works from the start, without the gaps
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/ring.py  # works after gap 4
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 exercises/ring.py

Each rank has some tokens of the text. Keys and values travel around the ring, so each rank computes causal attention
of its own tokens with all earlier tokens. Output and gradients must be those of one process. At the end the program
prints what a rank sent and computed, next to the formulas. The page docs/long-texts.md explains each gap.
"""

import argparse
import gc
import os
from typing import NamedTuple

# This exercise runs on the CPU, so hide GPUs before torch is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Let OpenMP's threads wait only briefly in a loop. Otherwise one process is many times slower next to other programs
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
from torch.nn import functional as F

TOKENS, HEADS, HEAD_SIZE = 510, 4, 16


class Partial(NamedTuple):
    """Attention of some queries with a part of the keys: a softmax that is not complete.

    For each query (row) there is one maximum and one sum: maximum and total have the shape (..., queries, 1). output
    has the shape (..., queries, head size), and is not yet divided by total.

    maximum    the largest score of the row
    total      the sum of exp(score - maximum) over the keys
    output     the sum of exp(score - maximum) x value over the keys
    """

    maximum: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor


class Pair(NamedTuple):
    """A block of scores: the queries of one piece of the text with the keys of another piece, or of the same piece.

    The pieces are numbered from the beginning of the text. With `cut`, keys later than the query are hidden.
    """

    own: int  # piece of the queries
    other: int  # piece of the keys
    cut: bool


def merge(first: Partial, second: Partial) -> Partial:
    """Gap 1: return the partial result of the keys of both parts together.

    The new maximum is the larger one of the two, for each row. `total` and `output` of each part are sums of
    exp(score - maximum) with the part's own maximum: before you add them, multiply them by exp(old maximum - new
    maximum). Scores may be as large as 1,000, and exp(1000) is infinite.
    """
    raise NotImplementedError("gap 1")


def log_sum_exp(partial: Partial) -> torch.Tensor:
    """Gap 1: return the logarithm of the sum of exp(score) over the keys, for each row: (..., queries, 1).

    The backward pass needs only this number to compute the softmax of a row again. Do not compute exp(maximum).
    """
    raise NotImplementedError("gap 1")


def owner_of_block(turn: int, rank: int, world: int) -> int:
    """Gap 2: return the rank whose keys and values this rank has after `turn` turns.

    In each turn a rank sends the block that it has to the next rank (rank 0 after the last one), and receives the block
    of the previous rank. After 0 turns it has its own block.
    """
    raise NotImplementedError("gap 2")


def needed_pairs(own_pieces: list[int], other_pieces: list[int]) -> list[Pair]:
    """Gap 2: return the blocks of scores that a rank must compute, as Pair(own, other, cut).

    own_pieces: numbers of the rank's pieces of the text. other_pieces: numbers of the pieces whose keys are here.
    Attention is causal: a query may see only its own token and earlier tokens. Skip a block of which nothing is seen,
    and cut the one that is seen in part. With zigzag both lists have two numbers: compare each own piece with each
    other piece.
    """
    raise NotImplementedError("gap 2")


def exchange(block: torch.Tensor, following: int, previous: int) -> torch.Tensor:
    """Gap 2: send the block to the rank `following`, and return the block that the rank `previous` sends.

    All ranks call this function at the same time. If each rank first waits until its block is received, all ranks wait
    forever. dist.isend(tensor, rank) returns at once. Keep the object that it returns, and call its wait() after
    dist.recv(), so that the block is sent completely. dist.recv(tensor, rank) fills the tensor, so give it a new one of
    the same shape and dtype.
    """
    raise NotImplementedError("gap 2")


def attend_backward(
    scores: torch.Tensor,
    lse: torch.Tensor,
    output: torch.Tensor,
    gradient: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gap 3: return what one block of scores adds to the gradients of its queries, of its keys and of its values.

    Return these three in this order.
    scores: queries x keys of this block, already scaled and cut. lse: log_sum_exp of the complete rows, over the keys
    of all blocks. output: of the complete rows, already divided by total. gradient: of this output.

    1. The weights, which are a part of the complete softmax: exp(scores - lse).
    2. The gradient of the values: weights.mT @ gradient. (.mT exchanges the last two dimensions.)
    3. The gradient of the weights: gradient @ values.mT.
    4. The gradient of the scores: weights x (gradient of the weights - delta), with one delta for each row: the sum of
       gradient x output over the last dimension, with keepdim=True.
    5. A score is a query times a key, divided by the root of the head size, keys.shape[-1]. So the gradient of the
       queries is gradient of the scores @ keys, divided by this root. That of the keys is the same with the queries and
       the transposed gradient of the scores.
    """
    raise NotImplementedError("gap 3")


def ring_backward(
    ring: "Ring",
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gap 4: return the gradients of this rank's queries, of its keys and of its values.

    First read ring_forward() below: its loop is the same. All arguments belong to this rank's tokens.
    Every later rank computes a part of the gradients of your keys and values. So these gradients travel with the keys
    and values, each rank adds its part, and at the end they return to the owner of the keys.

    1. Make the block that travels: torch.stack() of keys, values, and zeros for the gradients of both.
    2. In each turn, call attend_backward() for each pair. Use split(), scores() and pass_on(), as ring_forward() does.
       Cut output, lse and gradient into pieces, too. Add the results to the pieces of the gradients: a piece is a view,
       so `piece += result` changes the whole tensor; `piece = piece + result` does not.
    3. Pass the block on between the turns. After the last turn the gradients are one rank away from their owner, and
       nobody needs the keys and values any more.
    """
    raise NotImplementedError("gap 4")


# All gaps are above.


class Ring:
    """The ranks that share a text, and a count of what this rank sends and computes.

    The text is cut into pieces of equal length. Each rank has one piece. With `zigzag` each rank has two pieces that
    are half as long, one from the front of the text and one from the back.
    """

    def __init__(self, rank: int, world: int, *, zigzag: bool):
        self.rank = rank
        self.world = world
        self.zigzag = zigzag
        self.sent = 0  # bytes
        self.computed = 0  # scores
        self.largest = 0  # scores that are in memory at once

    def pieces(self, rank: int) -> list[int]:
        """Return the numbers of a rank's pieces, counted from the beginning of the text."""
        return [rank, 2 * self.world - 1 - rank] if self.zigzag else [rank]

    def own_part(self, text: torch.Tensor) -> torch.Tensor:
        """Return this rank's pieces of a tensor of the whole text (..., tokens, numbers).

        Zeros at the end of the text make the pieces equally long. No token attends to this padding, because it is later
        than all tokens.
        """
        count = self.world * len(self.pieces(self.rank))
        pieces = F.pad(text, (0, 0, 0, -text.shape[-2] % count)).chunk(count, dim=-2)
        return torch.cat([pieces[number] for number in self.pieces(self.rank)], dim=-2)

    def split(self, rank: int, *tensors: torch.Tensor) -> dict[int, tuple[torch.Tensor, ...]]:
        """Cut tensors of a rank's tokens into its pieces. Return the number of each piece with its views."""
        numbers = self.pieces(rank)
        views = [tensor.chunk(len(numbers), dim=-2) for tensor in tensors]
        return {number: tuple(each[place] for each in views) for place, number in enumerate(numbers)}

    def pass_on(self, block: torch.Tensor) -> torch.Tensor:
        """Send a block to the next rank, and return the block of the previous rank."""
        if self.world == 1:
            return block
        self.sent += block.nbytes
        return exchange(block.contiguous(), (self.rank + 1) % self.world, (self.rank - 1) % self.world)

    def scores(self, queries: torch.Tensor, keys: torch.Tensor, pair: Pair) -> torch.Tensor:
        """Compute a block of scores: queries x keys, divided by the root of the head size, and cut."""
        scores = queries @ keys.mT / keys.shape[-1] ** 0.5
        self.computed += scores.numel()
        self.largest = max(self.largest, scores.numel())
        if pair.cut:
            positions = torch.arange(queries.shape[-2])
            own, other = pair.own * len(positions) + positions, pair.other * len(positions) + positions
            scores = scores.masked_fill(other > own[:, None], float("-inf"))
        return scores


def attend(scores: torch.Tensor, values: torch.Tensor) -> Partial:
    """Return the partial result of one block of scores."""
    lowest = torch.finfo(scores.dtype).min  # the maximum of a row in which all keys are hidden
    maximum = scores.amax(-1, keepdim=True).clamp(min=lowest)
    weights = (scores - maximum).exp()
    return Partial(maximum, weights.sum(-1, keepdim=True), weights @ values)


def ring_forward(
    ring: Ring, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of attention for this rank's tokens, and log_sum_exp for each row."""
    own = ring.split(ring.rank, queries)
    results = {}  # number of an own piece -> partial result of the keys that were here
    block = torch.stack((keys, values))
    for turn in range(ring.world):
        owner = owner_of_block(turn, ring.rank, ring.world)
        here = ring.split(owner, *block)
        for pair in needed_pairs(ring.pieces(ring.rank), ring.pieces(owner)):
            (q,) = own[pair.own]
            k, v = here[pair.other]
            result = attend(ring.scores(q, k, pair), v)
            results[pair.own] = merge(results[pair.own], result) if pair.own in results else result
        if turn < ring.world - 1:
            block = ring.pass_on(block)
    complete = [results[number] for number in ring.pieces(ring.rank)]
    output = torch.cat([each.output / each.total for each in complete], dim=-2)
    return output, torch.cat([log_sum_exp(each) for each in complete], dim=-2)


class RingAttention(torch.autograd.Function):
    """Causal attention of a ring, for autograd: RingAttention.apply(queries, keys, values, ring).

    The tensors are (..., tokens of this rank, head size). The backward pass keeps tensors of this size, and no scores.
    """

    @staticmethod
    def forward(ctx, queries, keys, values, ring):
        output, lse = ring_forward(ring, queries, keys, values)
        ctx.save_for_backward(queries, keys, values, output, lse)
        ctx.ring = ring
        return output

    @staticmethod
    def backward(ctx, gradient):
        return *ring_backward(ctx.ring, *ctx.saved_tensors, gradient), None


def attend_whole(tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Compute attention of the whole text in one process.

    Return queries, keys and values; the output and their gradients; and the gradient of the output.
    """
    random = torch.Generator().manual_seed(0)  # gives the same text on every rank
    shape = (HEADS, tokens, HEAD_SIZE)
    *inputs, gradient = (torch.randn(shape, dtype=torch.float64, generator=random) for _ in range(4))
    for tensor in inputs:
        tensor.requires_grad_()
    output = F.scaled_dot_product_attention(*inputs, is_causal=True)
    (output * gradient).sum().backward()
    return inputs, [output.detach(), *(tensor.grad for tensor in inputs)], gradient


def run_ring(ring: Ring, tokens: int) -> dict[str, float]:
    """Compute attention with the ring, and return what this rank counted, and its difference from one process."""
    inputs, expected, gradient = attend_whole(tokens)
    own = [ring.own_part(tensor.detach()).requires_grad_() for tensor in inputs]
    output = RingAttention.apply(*own, ring)
    found = {"forward": ring.sent, "computed": ring.computed, "largest": ring.largest}
    (output * ring.own_part(gradient)).sum().backward()
    # Rows of padding have an output, but nobody reads it
    real = ring.own_part(torch.ones(tokens, 1, dtype=torch.float64))
    results = [output.detach() * real, *(tensor.grad for tensor in own)]
    differences = [(each - ring.own_part(right)).abs().max() for each, right in zip(results, expected, strict=True)]
    return found | {"backward": ring.sent - found["forward"], "difference": max(differences).item()}


def show(found: list[dict[str, float]], ring: Ring, tokens: int) -> None:
    """Print what the ranks counted, and next to it the formulas."""
    n = len(found)
    count = n * len(ring.pieces(0))  # pieces of the text
    piece = -(-tokens // count)
    length = count // n * piece
    sent = 8 * length * HEADS * HEAD_SIZE  # bytes of a rank's keys
    if ring.zigzag:
        name, busiest, formula = "zigzag: two pieces", (2 * n + 1) * HEADS * piece**2, "(2 n + 1) H L^2 / 4"
        shares, share_formula = [1 / n] * n, "1 / n"
    else:
        name, busiest, formula = "one piece", n * HEADS * length**2, "n H L^2"
        shares, share_formula = [2 * (rank + 1) / n / (n + 1) for rank in range(n)], "(rank + 1) / (1 + ... + n)"
    rows = [
        ("scores held at once", found[0]["largest"], HEADS * piece**2, "H x (tokens of a piece)^2"),
        ("scores that the busiest rank computes", max(each["computed"] for each in found), busiest, formula),
    ]
    if n > 1:
        rows += [
            ("bytes that a rank sends, forward", found[0]["forward"], 2 * (n - 1) * sent, "2 (n - 1) L H d x 8"),
            ("bytes that a rank sends, backward", found[0]["backward"], (4 * n - 2) * sent, "(4 n - 2) L H d x 8"),
        ]
    print(f"\n{name} of {piece} token{'s' if piece > 1 else ''} for each rank, L = {length}")
    for text, counted, expected, formula in rows:
        print(f"{text:38}{counted:11,}   formula {expected:11,} = {formula}")
    total = sum(each["computed"] for each in found)
    print("share of the work, rank by rank:      ", *(f"{each['computed'] / total:.1%}" for each in found))
    print(f"{'':29}formula: ", *(f"{share:.1%}" for share in shares), f"= {share_formula}")
    print(f"largest difference from one process:   {max(each['difference'] for each in found):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"length of the text (default: {TOKENS})")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"--tokens: {arguments.tokens} is too few; give 1 or more")
    head = f"{arguments.tokens} tokens, H = {HEADS} heads of d = {HEAD_SIZE} numbers in float64 (8 bytes)"
    if "RANK" not in os.environ:  # torchrun sets it
        attend_whole(arguments.tokens)
        print(head)
        print(f"one process without a ring holds all scores at once: {HEADS * arguments.tokens**2:,}")
        return

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{head}, on n = {world} ranks")
    for zigzag in (False, True):
        ring = Ring(rank, world, zigzag=zigzag)
        found = [None] * world
        dist.all_gather_object(found, run_ring(ring, arguments.tokens))
        if rank == 0:
            show(found, ring, arguments.tokens)
    dist.destroy_process_group()
    # Free what is left of the process group now. If one of its threads still runs when Python exits, Python aborts.
    gc.collect()


if __name__ == "__main__":
    main()
