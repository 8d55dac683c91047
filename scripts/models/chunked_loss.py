"""The loss of a causal LM without the logits of all tokens, for `--loss chunked`: `use_chunked_loss`.

The logits of a vocabulary of 250,880 tokens dominate the memory of a training run. At the peak of the full loss, in the
backward pass of the log-softmax, three 4-byte tensors hold one number per logit: the saved log-softmax, its gradient,
and the gradient of the logits. These are 12 bytes per logit in every precision: 5.7 GiB for 2,048 tokens. Many of these
tokens are padding, whose logits are not needed.

Here the head computes logits only for the positions that count in the loss, chunk by chunk. The gradient of a chunk's
logits is known as soon as the logits are: it is their softmax, minus 1 at the target. So the head multiplies it into
the gradients of the hidden states and of the weight at once, and uses the chunk's memory again for the next chunk.

Shapes: B rows of a batch, L tokens of a row, C tokens that count, R = C rounded up to a multiple of ROW_MULTIPLE, P of
these in a chunk, U of them that count, D hidden size, V vocabulary. Q and W are the sizes of pieces of U and of V.

Liger's FusedLinearCrossEntropy (arXiv:2410.10989, section 3.2) and torch.nn.functional.linear_cross_entropy work in the
same way. docs/knobs.md compares them with this module and explains why `--loss chunked` does not call torch's function.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from config import IGNORED
from shared.errors import WorkshopError

USE_FULL = "use --loss full"
# Minimum number of tokens in a chunk, if a batch has that many. Smaller chunks make matrix products slower, and each
# chunk adds a pass over the weight's gradient
CHUNK = 256
# The number of rows of a chunk is a multiple of this, because matrix products on GPUs are then faster. On the CPU in
# 16 bit, oneDNN compiles code for each number of rows, and keeps about a megabyte for each. So few numbers must occur
ROW_MULTIPLE = 64
# Factor of the logits' gradient before it is rounded to fp16. A softmax over 250,880 tokens is 4e-6 on average, near
# the smallest numbers of fp16. Loss scaling comes too late, because its factor is known only in the backward pass
FP16_SCALE = 2**8


@dataclass(frozen=True)
class Pieces:
    """Sizes of the pieces in which a chunk is computed. On the CPU a piece fits into the cache."""

    logits: int  # elements of the fp32 copy of some rows of a chunk's logits
    vocabulary: int  # rows of the weight's gradient


CPU_PIECES = Pieces(logits=2**21, vocabulary=2**11)
GPU_PIECES = Pieces(logits=2**26, vocabulary=2**15)


def check_head(meta_model: PreTrainedModel) -> None:
    """Raise WorkshopError (exit code 2) unless the model's head is one linear layer.

    meta_model: the model without memory for its weights. The first step checks that the model returns the head's output
    unchanged.
    """
    head = meta_model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        what = f"chunked needs one linear layer without bias as head, {type(meta_model).__name__} has a different one"
        raise WorkshopError("--loss", what, USE_FULL)
    if "loss_function" not in inspect.unwrap(type(meta_model).forward).__code__.co_names:
        what = f"chunked is wrong for {type(meta_model).__name__}, which has a loss of its own"
        raise WorkshopError("--loss", what, USE_FULL)


def use_chunked_loss(model: PreTrainedModel) -> None:
    """Let the head of a causal LM compute the loss, chunk by chunk, in each forward pass that is given labels."""
    LossInHead(model)


def computes_loss_in_head(model: Any) -> bool:
    """Return whether `use_chunked_loss` has changed this model."""
    return isinstance(getattr(model.get_output_embeddings().forward, "__self__", None), LossInHead)


def add_label_counts(batches: list[Any]) -> None:
    """Add to each micro batch of an optimizer step the number of its labels that count.

    Without these numbers, each forward pass would wait for the GPU to count the labels. Here the CPU reads all numbers
    of the step at once. It waits little, because copying the batches to the GPU has just waited for the previous steps.
    """
    counts = torch.stack([(next_tokens(batch["labels"]) != IGNORED).sum() for batch in batches])  # (micro batches)
    for batch, count in zip(batches, counts.tolist(), strict=True):
        batch["label_count"] = count


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the target of each position of a batch (B, L), flattened to (B L). The last position has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()


class LossInHead:
    """Forward method of a model's head that returns the loss instead of logits if the model is given labels.

    The loss is computed inside the head's forward method, because there the hooks of FSDP and ZeRO-3 have gathered the
    weight, even if it is tied to the embedding. The model passes the head's output to its loss function. This class
    replaces that function by one that returns the output unchanged.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.head: nn.Linear = model.get_output_embeddings()
        self.compute_logits = self.head.forward
        self.counted: torch.Tensor | None = None  # indices of the positions that count; None without labels
        self.loss: torch.Tensor | None = None  # loss of the last forward pass
        self.checked = False
        model.register_forward_pre_hook(self.note_labels, with_kwargs=True)
        model.loss_function = self.loss_function
        self.head.forward = self.forward

    def note_labels(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Find the positions that count, before the model's forward pass."""
        labels = kwargs.get("labels")
        self.number_of_labels = kwargs.get("num_items_in_batch")
        label_count = kwargs.pop("label_count", None)  # the model itself has no such argument
        self.counted = None
        if labels is not None:
            targets = next_tokens(labels)  # (B L)
            is_counted = targets != IGNORED  # (B L)
            # Without a label count (in an evaluation, or without the Trainer) nonzero() waits for the GPU
            positions = is_counted.nonzero() if label_count is None else is_counted.nonzero_static(size=label_count)
            self.counted = positions.flatten()  # (C)
            self.targets = targets[self.counted]  # (C)
        return args, kwargs

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the loss (), in fp32, of hidden states (B, L, D). Without labels, return logits (B, L, V).

        The sum over the labels that count is divided by their number in the optimizer step, which the Trainer passes.
        Without that number, as in an evaluation, the loss is the mean.
        """
        if self.counted is None:
            return self.compute_logits(hidden)
        total = CrossEntropyOfHead.apply(
            hidden.flatten(0, 1)[self.counted], self.head.weight, self.targets, torch.is_grad_enabled()
        )  # ()
        loss = total / (len(self.targets) if self.number_of_labels is None else self.number_of_labels)
        self.loss = loss.detach()
        return loss

    def loss_function(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `logits`, which are the head's loss. Reject a model that has changed them."""
        if not self.checked:
            own = self.loss
            # A loss that is not finite passes, because WorkshopTrainer.check_loss reports it
            if own is None or own.shape != logits.shape or not torch.allclose(own, logits, 0, 0, equal_nan=True):
                what = f"chunked is wrong for {type(self.model).__name__}, which scales or caps its logits"
                raise WorkshopError("--loss", what, USE_FULL)
            self.checked = True  # one check is enough, because it waits for the GPU
        return logits


class CrossEntropyOfHead(torch.autograd.Function):
    """Sum of the cross entropy over tokens. Its gradients are computed in the forward pass.

    hidden: (C, D). weight: (V, D). targets: (C), int64. Matrix products use the dtype of autocast if it is on,
    otherwise that of the weight. Softmax, loss and sums over chunks are fp32. A gradient has the dtype of its tensor.
    The backward pass works once, because it overwrites the stored gradients. A frozen weight, as with LoRA, gets no
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_gradients: bool
    ) -> torch.Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        ctx.dtypes = hidden.dtype, weight.dtype
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
        tokens, hidden_size = hidden.shape
        vocabulary = len(weight)
        chunk = chunk_size(tokens, hidden_size)
        hidden = F.pad(hidden, (0, 0, 0, -tokens % ROW_MULTIPLE))  # (R, D)
        pieces = CPU_PIECES if device == "cpu" else GPU_PIECES
        loss = torch.zeros((), device=hidden.device)  # ()
        logits_buffer = torch.empty(chunk, vocabulary, dtype=dtype, device=hidden.device)  # (P, V)
        ctx.scale = FP16_SCALE if dtype == torch.float16 else 1
        if with_gradients:
            # (R, D) and (V, D)
            hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with torch.autocast(device, enabled=False):
            for start in range(0, tokens, chunk):
                part = hidden[start : start + chunk]  # (P, D); P may be smaller in the last chunk
                logits = torch.mm(part, weight.T, out=logits_buffer[: len(part)])  # (P, V)
                unpadded = min(len(part), tokens - start)
                part_targets = targets[start : start + unpadded]  # (U)
                loss += loss_and_gradient(logits[:unpadded], part_targets, ctx.scale, pieces.logits, with_gradients)
                if not with_gradients:
                    continue
                gradient = logits  # (P, V); loss_and_gradient has replaced the logits by their gradient
                gradient[unpadded:] = 0
                for first in range(0, vocabulary, pieces.vocabulary):
                    rows = slice(first, first + pieces.vocabulary)
                    # (P, D) += (P, W) (W, D)
                    add_product(hidden_gradient[start : start + chunk], gradient[:, rows], weight[rows])
                    if weight_gradient is not None:
                        # (W, D) += (W, P) (P, D)
                        add_product(weight_gradient[rows], gradient[:, rows].T, part)
        if with_gradients:
            ctx.save_for_backward(hidden_gradient[:tokens], weight_gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        factor = gradient / ctx.scale  # ()
        gradients = [  # (C, D) and (V, D)
            None if kept is None else kept.mul_(factor).to(dtype)
            for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add the product of two matrices to a matrix in fp32."""
    if total.device.type == "cuda" and a.dtype == torch.float16:
        # The matrix unit writes its fp32 sum, so that no sum can overflow in fp16. In bf16 a separate addition was up
        # to a tenth faster on an H200
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.dtype == torch.float16:  # the CPU, which only tests let compute in fp16, has no such kernel
        total += a.float() @ b.float()
    else:
        total += a @ b


def chunk_size(tokens: int, hidden_size: int) -> int:
    """Return the number of tokens of a chunk, a multiple of ROW_MULTIPLE. All chunks have about the same size.

    A chunk has at most about `hidden_size` tokens, or CHUNK if that is more. Its logits are then no larger than the
    head's weight, whose gradient always needs that much memory.
    """
    chunks = max(1, math.ceil(tokens / max(hidden_size, CHUNK)))
    return max(1, math.ceil(tokens / chunks / ROW_MULTIPLE)) * ROW_MULTIPLE


def chunk_bytes(tokens: int, weight: torch.Tensor, dtype: torch.dtype, pieces: Pieces) -> int:
    """Return the bytes of a chunk's logits, of the fp32 copy of some rows, and of autocast's copy of the weight.

    weight: the head's weight (V, D). dtype: the dtype of the logits.
    """
    vocabulary, hidden_size = weight.shape
    logits = chunk_size(tokens, hidden_size) * vocabulary
    copy = 0 if weight.dtype == dtype else weight.numel()
    return dtype.itemsize * (logits + copy) + 4 * min(pieces.logits, logits)


def loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, scale: int, elements: int, with_gradient: bool
) -> torch.Tensor:
    """Return the summed cross entropy () of logits (U, V). Overwrite them with their gradient x `scale`.

    targets: (U). elements: number of logits that are copied to fp32 at once. Only whole rows are copied.
    """
    tokens, vocabulary = logits.shape
    rows = min(tokens, max(1, elements // vocabulary))
    buffer = torch.empty(rows, vocabulary, device=logits.device)  # (Q, V)
    loss = torch.zeros((), device=logits.device)  # ()
    for start in range(0, tokens, rows):
        part = logits[start : start + rows]  # (Q, V); Q may be smaller in the last piece
        target = targets[start : start + rows, None]  # (Q, 1)
        log_probabilities = buffer[: len(part)].copy_(part)  # (Q, V)
        torch.log_softmax(log_probabilities, dim=-1, out=log_probabilities)
        loss -= log_probabilities.gather(1, target).sum()
        if not with_gradient:
            continue
        gradient = log_probabilities.exp_()  # (Q, V)
        gradient.scatter_add_(1, target, gradient.new_full(target.shape, -1))
        part.copy_(gradient if scale == 1 else gradient.mul_(scale))
    return loss
