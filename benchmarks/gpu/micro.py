"""Measure parts of a training step on the GPU: run.py starts each measurement of MEASUREMENTS by its name.

    python benchmarks/gpu/micro.py losses

It prints a RESULT line of JSON for each variant: the median milliseconds of ten calls, and the peak of the memory that
a call adds (`extra_gib`). Tensors are random, with the shapes of bloom-560m. Without a GPU they are tiny.
"""

import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
synchronize: Callable[[], None] = torch.cuda.synchronize if GPU else lambda: None


def show(variant: str, **numbers: object) -> None:
    rounded = {name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in numbers.items()}
    print("RESULT " + json.dumps({"variant": variant} | rounded), flush=True)


def seconds(call: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of some calls, up to the end of their kernels."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return time.perf_counter() - start


def measure(call: Callable[[], object]) -> dict[str, float]:
    """Return the time of the first call, the median time of later calls, and the memory that a call adds."""
    first = seconds(call)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # 0 without a GPU
    call()
    added = torch.cuda.max_memory_allocated() - before
    median = statistics.median(seconds(call) for _ in range(10 if GPU else 2))
    return {"ms": 1000 * median, "first_ms": 1000 * first, "extra_gib": added / 2**30}


def random(*shape: int, dtype: torch.dtype = torch.float32, gradient: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=gradient)


def ceilings() -> None:
    """Bandwidth of the memory, speed of large matrix products, and the time to start a small kernel."""
    size = 2**30 if GPU else 2**20
    source, target = random(size), torch.empty(size, device=DEVICE)
    ms = measure(lambda: target.copy_(source))["ms"]
    show("copy", ms=ms, tb_per_s=8 * size / ms / 1e9)
    size = 8192 if GPU else 128
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = random(size, size, dtype=dtype), random(size, size, dtype=dtype)
        ms = measure(lambda a=a, b=b: a @ b)["ms"]
        show(f"matrix product of {size}, {dtype}", ms=ms, tflops=2 * size**3 / ms / 1e9)
    one = torch.ones(1, device=DEVICE)
    show("start of a kernel", us=1e6 * seconds(lambda: one.add_(1), 2000) / 2000)


def losses() -> None:
    """Loss and gradients of bloom-560m's head, full and chunked: time, memory, and the error against fp32."""
    from models.chunked_loss import CrossEntropyOfHead

    vocabulary, hidden_size = (250_880, 1024) if GPU else (5000, 64)
    weight = random(vocabulary, hidden_size) * 0.02
    for tokens in (660, 2640, 10560) if GPU else (96, 128):  # 4, 16 and 64 questions
        hidden = random(tokens, hidden_size)
        targets = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
        functions: dict[str, Callable] = {
            "full": lambda h, w, t=targets: F.cross_entropy(F.linear(h, w).float(), t, reduction="sum"),
            "chunked": lambda h, w, t=targets: CrossEntropyOfHead.apply(h, w, t, True),
        }
        exact = run_loss(functions["full"], hidden, weight, None) if tokens < 1000 else ()
        for (name, function), dtype in itertools.product(functions.items(), (torch.float16, torch.bfloat16)):
            run = functools.partial(run_loss, function, hidden, weight, dtype)
            numbers = measure(run)
            if exact:
                errors = [float((x - y).norm() / y.norm()) for x, y in zip(run(), exact, strict=True)]
                numbers |= dict(zip(("loss_error", "hidden_error", "weight_error"), errors, strict=True))
            show(f"{name}, {dtype}, {tokens} tokens", **numbers)


def run_loss(
    loss_function: Callable, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, ...]:
    """Return the loss and its gradients. dtype: the precision of autocast; None: fp32."""
    h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.autocast(DEVICE.type, dtype) if dtype else nullcontext():
        loss = loss_function(h, w)
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


def attention() -> None:
    """Forward and backward pass of PyTorch's attention: BLOOM's with an additive mask, and a causal one without."""
    kinds = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    kinds |= {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    backends = {"default": None, **(kinds if GPU else {"math": SDPBackend.MATH})}
    for batch, heads, length, masked in ((16, 16, 176, True), (16, 16, 512, True), (4, 32, 512, False)):
        shape = (batch, heads, length, 64) if GPU else (1, 2, 32, 64)
        qkv = [random(*shape, dtype=torch.bfloat16, gradient=True) for _ in range(3)]
        later = torch.ones(shape[2], shape[2], device=DEVICE, dtype=torch.bool).triu(1)
        scores = random(*shape[:3], shape[2], dtype=torch.bfloat16)
        mask = scores.masked_fill(later, torch.finfo(scores.dtype).min) if masked else None
        for name, backend in backends.items():
            variant = f"{batch} x {heads} x {length}, {'mask' if masked else 'causal'}, {name}"
            with sdpa_kernel(backend) if backend else nullcontext():
                try:
                    show(variant, **measure(functools.partial(attend, qkv, mask)))
                except RuntimeError as error:  # this backend does not have this kind of attention
                    show(variant, unavailable=str(error)[:120])


def attend(qkv: list[torch.Tensor], mask: torch.Tensor | None) -> None:
    F.scaled_dot_product_attention(*qkv, mask, is_causal=mask is None).sum().backward()


def one_row() -> None:
    """Attention of a row of questions without padding, with alibi: as today, and with one kernel for all questions."""
    from data_loader import OneRow

    for questions in (4, 16, 64) if GPU else (2,):
        lengths = [60 + 53 * number % 223 for number in range(questions)]
        batch = OneRow()([dict.fromkeys(("input_ids", "labels"), [1] * length) for length in lengths])
        row = RowOfQuestions({name: tensor.to(DEVICE) for name, tensor in batch.items()}, lengths)
        for function in (row.today, row.make_block_mask, row.flex, row.varlen):
            variant = f"{questions} questions, {function.__name__}"
            try:
                show(variant, **measure(function))
            except (ImportError, TypeError, RuntimeError) as error:  # this device or this PyTorch has no such kernel
                show(variant, unavailable=str(error)[:120])


class RowOfQuestions:
    """Queries, keys and values of a row, with the heads of bloom-560m, and functions that attend forward and back."""

    def __init__(self, batch: dict[str, torch.Tensor], lengths: list[int]):
        from torch.nn.attention.flex_attention import flex_attention

        from models.padding_free import Layout

        self.layout = Layout()
        self.layout.rows, self.layout.places = batch["rows"].clamp(min=0), batch["places"]
        self.tokens, longest = batch["labels"].numel(), batch["rows"].shape[1]
        heads, size = (16, 64) if GPU else (2, 16)
        self.qkv = random(1, self.tokens, 3 * heads * size, dtype=torch.bfloat16, gradient=True)
        self.shape = (heads, 3, size)
        self.slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=DEVICE) / heads)  # (H)
        places = torch.arange(longest, device=DEVICE)
        distances = self.slopes[:, None, None] * (places - places[:, None])  # (H, L, L)
        later = places > places[:, None]
        self.mask = distances.masked_fill(later, torch.finfo(torch.bfloat16).min).bfloat16()[None]  # (1, H, L, L)
        ends = torch.tensor([*lengths, self.tokens - sum(lengths)], device=DEVICE).cumsum(0)  # padding is the last
        self.question = torch.bucketize(torch.arange(self.tokens, device=DEVICE), ends, right=True)  # (T)
        self.ends = F.pad(ends, (1, 0)).int()
        self.longest = max(longest, self.tokens - sum(lengths))
        self.flex_attention = torch.compile(flex_attention, dynamic=False) if GPU else flex_attention

    def heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        return [part.transpose(1, 2) for part in qkv.unflatten(-1, self.shape).unbind(-2)]  # (B, H, L, K)

    def today(self) -> None:
        out = F.scaled_dot_product_attention(*self.heads(self.layout.pad(self.qkv)), attn_mask=self.mask)
        self.layout.unpad(out.transpose(1, 2).flatten(2)).sum().backward()

    def make_block_mask(self) -> None:
        """Once for each micro batch, and not for each layer."""
        from torch.nn.attention.flex_attention import create_block_mask

        question = self.question
        own = lambda b, h, query, key: (query >= key) & (question[query] == question[key])  # noqa: E731
        self.block_mask = create_block_mask(own, None, None, self.tokens, self.tokens, device=DEVICE.type)

    def flex(self) -> None:
        slopes = self.slopes
        alibi = lambda score, b, h, query, key: score + slopes[h] * (key - query)  # noqa: E731
        out = self.flex_attention(*self.heads(self.qkv), score_mod=alibi, block_mask=self.block_mask)
        out.transpose(1, 2).flatten(2).sum().backward()

    def varlen(self) -> None:
        """Without alibi, as a model with RoPE needs it."""
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = self.qkv[0].unflatten(-1, self.shape).unbind(-2)  # (T, H, K)
        lengths = (self.ends, self.ends, self.longest, self.longest)
        varlen_attn(query, key, value, *lengths, window_size=(-1, 0)).sum().backward()


def weights() -> None:
    """Copies of the matrices of bloom-560m's blocks in bf16, as autocast makes them, and a step of AdamW over them."""
    size, layers = (1024, 24) if GPU else (32, 2)
    shapes = [(3 * size, size), (size, size), (4 * size, size), (size, 4 * size)] * layers
    matrices = [torch.nn.Parameter(random(*shape)) for shape in shapes]
    show("copies in bf16", **measure(lambda: [matrix.bfloat16() for matrix in matrices]))
    for matrix in matrices:
        matrix.grad = torch.zeros_like(matrix)
    for flag in ("fused", "foreach"):
        show(f"{flag} AdamW", **measure(torch.optim.AdamW(matrices, **{flag: True}).step))


def gelu() -> None:
    """Forward and backward pass of BLOOM's own GELU and of PyTorch's."""
    from transformers.models.bloom.modeling_bloom import BloomGelu

    functions = {"BloomGelu": BloomGelu().train(), "F.gelu": lambda x: F.gelu(x, approximate="tanh")}
    for rows in (2640, 10560) if GPU else (64,):
        x = random(rows, 4096 if GPU else 256, dtype=torch.bfloat16, gradient=True)
        ones = torch.ones_like(x)
        for name, function in functions.items():
            show(f"{name}, {rows} rows", **measure(lambda f=function, x=x, ones=ones: f(x).backward(ones)))


def energy() -> None:
    """NVML's energy counter against the mean of its power readings, over three seconds of three loads each."""
    import pynvml

    from shared.nvml import find_gpu

    gpu = find_gpu()
    x = random(8192, 8192, dtype=torch.bfloat16)
    loads = {"idle": lambda: time.sleep(0.05), "product": lambda: [x @ x for _ in range(20)]}
    loads["copy"] = lambda: [x.clone() for _ in range(200)]
    for name, load in loads.items():
        watts, start, joules = [], time.monotonic(), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
        while time.monotonic() < start + 3:
            seconds(load)
            watts.append(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
        joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000 - joules
        show(name, counter_watts=joules / (time.monotonic() - start), power_draw_watts=statistics.fmean(watts))


MEASUREMENTS = {each.__name__: each for each in (ceilings, losses, attention, one_row, weights, gelu, energy)}

if __name__ == "__main__":
    MEASUREMENTS[sys.argv[1]]()
