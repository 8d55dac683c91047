"""The loss of a causal LM without its logits, for `--loss chunked`: `use_chunked_loss`.

The logits of a vocabulary of 250,880 tokens are the largest tensor of a training: 2,048 tokens have 0.96 GiB of them in
16 bit, 1.9 GiB once the loss has turned them into fp32, and as much again for their gradient. Most of these tokens are
padding, whose logits nobody needs. Here only the positions that count in the loss go through the head, in chunks. The
gradient of a chunk's loss is known as soon as its logits are (softmax minus one at the target), so it is multiplied
into the gradients of the hidden states and of the weight at once, and the chunk's memory is used for the next one.

Like Liger's FusedLinearCrossEntropy (arXiv:2410.10989, section 3.2) and torch.nn.functional.linear_cross_entropy;
docs/efficiency.md compares the three.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from data_loader import IGNORED
from shared.errors import WorkshopError

USE_FULL = "use --loss full"
CHUNK = 256  # tokens at least: with fewer, matrix products are slower, and the gradients' sums are more passes
# Matrices are multiplied with so many rows, or twice, three times as many. GPUs are faster then; on the CPU each other
# number would leave about a megabyte of compiled code behind (oneDNN, in 16 bit)
ROW_MULTIPLE = 64
FP16_TOKENS = 2 * ROW_MULTIPLE


@dataclass(frozen=True)
class Pieces:
    """What is computed at once. On the CPU it stays in the cache between one pass and the next."""

    logits: int  # elements of the fp32 copy of some rows of a chunk's logits
    vocabulary: int  # rows of the weight's gradient


CPU_PIECES = Pieces(logits=2**21, vocabulary=2**11)
GPU_PIECES = Pieces(logits=2**26, vocabulary=2**15)


def check_head(meta_model: PreTrainedModel) -> None:
    """Raises WorkshopError (exit code 2) unless the model's head is one linear layer.

    meta_model: the model without memory for its weights. Whether its logits are what the head returns, the first step
    tells.
    """
    head = meta_model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        what = f"chunked needs one linear layer without bias as head, {type(meta_model).__name__} has another"
        raise WorkshopError("--loss", what, USE_FULL)
    if "loss_function" not in inspect.unwrap(type(meta_model).forward).__code__.co_names:
        what = f"chunked is wrong for {type(meta_model).__name__}, which has a loss of its own"
        raise WorkshopError("--loss", what, USE_FULL)


def use_chunked_loss(model: PreTrainedModel) -> None:
    """Let a causal LM compute its loss in its head, chunk by chunk, in each forward pass that is given labels."""
    LossInHead(model)


def computes_loss_in_head(model: Any) -> bool:
    return isinstance(getattr(model.get_output_embeddings().forward, "__self__", None), LossInHead)


def add_label_counts(batches: list[Any]) -> None:
    """Add to each micro batch of an optimizer step the number of its labels that count.

    Without these numbers, each forward pass would wait for the GPU to count the labels. Here the CPU reads all numbers
    of the step at once. It waits little: copying the batches to the GPU has just waited for the steps before.
    """
    counts = torch.stack([(next_tokens_of(batch["labels"]) != IGNORED).sum() for batch in batches])
    for batch, count in zip(batches, counts.tolist(), strict=True):
        batch["label_count"] = count


def next_tokens_of(labels: torch.Tensor) -> torch.Tensor:
    """Target of each position of a batch (batch, tokens), flattened. The last position of a sequence has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()


class LossInHead:
    """What a model's head does instead of returning logits, while the model has labels.

    The head's own forward method reads the weight, so that the hooks of FSDP and ZeRO-3 have gathered it, also where it
    is tied to the embedding. The model hands what the head returns on to its loss function, which returns it.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.head: nn.Linear = model.get_output_embeddings()
        self.logits = self.head.forward
        self.counted: torch.Tensor | None = None  # which of all positions count, None if the model has no labels
        self.loss: torch.Tensor | None = None  # of the last forward pass
        self.checked = False
        model.register_forward_pre_hook(self.note_labels, with_kwargs=True)
        model.loss_function = self.loss_function
        self.head.forward = self.forward

    def note_labels(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        labels = kwargs.get("labels")
        self.number_of_labels = kwargs.get("num_items_in_batch")
        label_count = kwargs.pop("label_count", None)  # the model itself has no such argument
        self.counted = None
        if labels is not None:
            next_tokens = next_tokens_of(labels)
            is_counted = next_tokens != IGNORED
            # Without a label count (in an evaluation, or without the Trainer) nonzero waits for the GPU
            positions = is_counted.nonzero() if label_count is None else is_counted.nonzero_static(size=label_count)
            self.counted = positions.flatten()
            self.targets = next_tokens[self.counted]  # the next token of each of them
        return args, kwargs

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (batch, tokens, hidden size) -> loss (), in fp32; logits if the model has no labels.

        Sum over the labels that count / the number of them in the optimizer step, which the Trainer passes; without
        that, as in evaluation, their mean.
        """
        if self.counted is None:
            return self.logits(hidden)
        total = CrossEntropyOfHead.apply(
            hidden.flatten(0, 1)[self.counted], self.head.weight, self.targets, torch.is_grad_enabled()
        )
        loss = total / (len(self.targets) if self.number_of_labels is None else self.number_of_labels)
        self.loss = loss.detach()
        return loss

    def loss_function(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's: its `logits` are the loss, unless the model has changed them on the way."""
        if not self.checked:
            own = self.loss
            # a loss that is no number is for FiniteLossCallback to tell
            if own is None or own.shape != logits.shape or not torch.allclose(own, logits, 0, 0, equal_nan=True):
                what = f"chunked is wrong for {type(self.model).__name__}, which scales or caps its logits"
                raise WorkshopError("--loss", what, USE_FULL)
            self.checked = True  # once is enough, as it waits for the GPU
        return logits


class CrossEntropyOfHead(torch.autograd.Function):
    """Sum of the cross entropy over tokens, with the gradients computed in the forward pass.

    hidden: (tokens, hidden size). weight: (vocabulary, hidden size). targets: (tokens), int64. Products are in the
    dtype of autocast if it is on, else in that of the weight; softmax, loss and the sums over chunks in fp32. Gradients
    have the dtype of what they belong to. Backward works once, as it uses them up.
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
        chunk = chunk_of(tokens, hidden_size)
        hidden = F.pad(hidden, (0, 0, 0, -tokens % ROW_MULTIPLE))
        pieces = CPU_PIECES if device == "cpu" else GPU_PIECES
        loss = torch.zeros((), device=hidden.device)
        logits_buffer = torch.empty(chunk, vocabulary, dtype=dtype, device=hidden.device)
        # fp16 ends at 65,504: the fewer tokens are summed up in it, the more their gradients can be scaled
        summed = FP16_TOKENS if dtype == torch.float16 else chunk
        scale = gradient_scale(hidden, summed)
        if with_gradients:
            hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            for start in range(0, tokens, chunk):
                part = hidden[start : start + chunk]
                logits = torch.mm(part, weight.T, out=logits_buffer[: len(part)])
                real = min(len(logits), tokens - start)
                own_targets = targets[start : start + real]
                loss += loss_and_gradient(logits[:real], own_targets, scale, pieces.logits, with_gradients)
                if not with_gradients:
                    continue
                logits[real:] = 0
                gradient = logits  # loss_and_gradient has put it there
                for first in range(0, vocabulary, pieces.vocabulary):
                    rows = slice(first, first + pieces.vocabulary)
                    hidden_gradient[start : start + chunk] += gradient[:, rows] @ weight[rows]
                    for begin in range(0, len(part), summed):
                        some = slice(begin, begin + summed)
                        weight_gradient[rows] += gradient[some, rows].T @ part[some]
        if with_gradients:
            ctx.save_for_backward(hidden_gradient[:tokens], weight_gradient, scale)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        *gradients, scale = ctx.saved_tensors
        factor = gradient / scale
        gradients = [kept.mul_(factor).to(dtype) for kept, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *gradients, None, None


def chunk_of(tokens: int, hidden_size: int) -> int:
    """Tokens in each of the fewest chunks of equal size, a multiple of ROW_MULTIPLE.

    Logits of `hidden_size` tokens are no larger than the head's weight, whose gradient needs that much in any case.
    """
    chunks = max(1, math.ceil(tokens / max(hidden_size, CHUNK)))
    return max(1, math.ceil(tokens / chunks / ROW_MULTIPLE)) * ROW_MULTIPLE


def bytes_of_chunk(tokens: int, weight: torch.Tensor, dtype: torch.dtype, pieces: Pieces) -> int:
    """Bytes of the logits of a chunk, of the fp32 copy of some of their rows, and of autocast's copy of the weight.

    weight: (vocabulary, hidden size), of the head. dtype: in which logits are computed.
    """
    vocabulary, hidden_size = weight.shape
    logits = chunk_of(tokens, hidden_size) * vocabulary
    copy = 0 if weight.dtype == dtype else weight.numel()
    return dtype.itemsize * (logits + copy) + 4 * min(pieces.logits, logits)


def loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, elements: int, with_gradient: bool
) -> torch.Tensor:
    """Summed cross entropy of logits (tokens, vocabulary); in their place is left their gradient, times `scale`.

    elements: of the logits that are copied to fp32 at once, whole rows of them.
    """
    tokens, vocabulary = logits.shape
    rows = min(tokens, max(1, elements // vocabulary))
    buffer = torch.empty(rows, vocabulary, device=logits.device)
    loss = torch.zeros((), device=logits.device)
    for start in range(0, tokens, rows):
        part = logits[start : start + rows]
        target = targets[start : start + rows, None]
        log_probabilities = buffer[: len(part)].copy_(part)
        torch.log_softmax(log_probabilities, dim=-1, out=log_probabilities)
        loss -= log_probabilities.gather(1, target).sum()
        if not with_gradient:
            continue
        gradient = log_probabilities.exp_()
        gradient.scatter_add_(1, target, gradient.new_full(target.shape, -1))
        part.copy_(gradient.mul_(scale) if logits.dtype == torch.float16 else gradient)
    return loss


def gradient_scale(hidden: torch.Tensor, summed: int) -> torch.Tensor:
    """A power of two to multiply the logits' gradient by before it is rounded to fp16, 1 for other dtypes.

    A softmax over 250,880 tokens is 4e-6 on average, near the smallest numbers of fp16, and the factor of loss scaling
    comes only with the backward pass. No sum over so many tokens as `summed` may be above the largest number of fp16.
    """
    one = torch.ones((), device=hidden.device)
    if hidden.dtype != torch.float16 or not len(hidden):
        return one
    largest_sum = summed * hidden.abs().amax().float()
    return torch.exp2(torch.floor(torch.log2(2**15 / largest_sum))).clamp(max=2**8)
