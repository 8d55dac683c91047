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
    """NVML's energy counter against the mean of its power readings, over five seconds of three loads each."""
    import pynvml

    from shared.nvml import find_gpu

    gpu = find_gpu()
    x = random(8192, 8192, dtype=torch.bfloat16)
    loads = {"idle": lambda: time.sleep(0.05), "product": lambda: [x @ x for _ in range(20)]}
    loads["copy"] = lambda: [x.clone() for _ in range(200)]
    for name, load in loads.items():
        watts, start, joules = [], time.monotonic(), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
        while time.monotonic() < start + 5:
            seconds(load)
            watts.append(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
        joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000 - joules
        show(name, counter_watts=joules / (time.monotonic() - start), power_draw_watts=statistics.fmean(watts))


MEASUREMENTS = {each.__name__: each for each in (ceilings, losses, attention, gelu, energy)}

if __name__ == "__main__":
    MEASUREMENTS[sys.argv[1]]()
