"""LoRA (arXiv:2106.09685): freeze a model, and train two small matrices next to each of its linear layers.

A linear layer multiplies its input x by a weight W (outputs x inputs). With LoRA it computes W x + 2 B A x, where
A (rank x inputs) starts with random numbers, and B (outputs x rank) starts with zeros. So the first step sees the
unchanged model. W is frozen: only A and B need gradients and optimizer state, and with rank 8 they have about 1 % as
many elements as W. docs/lora.md is the section about it.

The library PEFT does the same for more kinds of layers. This module keeps all names of the model, so FSDP,
DeepSpeed, checkpoints and estimates work as without LoRA.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from shared.errors import WorkshopError
from shared.json_files import write_json
from shared.paths import ADAPTER_CONFIG

SCALE = 2  # alpha / rank in the paper's terms, for the usual choice alpha = 2 x rank
ADAPTERS = ("lora_a", "lora_b")  # the last part of a parameter's name


class LoraLinear(nn.Linear):
    """A linear layer with a frozen weight (outputs, inputs) and trainable adapters.

    lora_a: (rank, inputs). lora_b: (outputs, rank).
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output (..., outputs) for an input (..., inputs)."""
        return super().forward(x) + SCALE * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model: PreTrainedModel, rank: int, frozen_dtype: torch.dtype = torch.float32) -> None:
    """Freeze a causal LM, and add fp32 adapters to all its linear layers except the head.

    frozen_dtype: dtype of the frozen weights. Set the seed first. Raise WorkshopError (exit code 2) for a model without
    linear layers.
    """
    sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())  # by ZeRO-3, while it loaded them
    for parameter in model.parameters():
        parameter.requires_grad = False
        if not sharded:
            parameter.data = parameter.data.to(frozen_dtype)
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    if not layers:
        what = f"{type(model).__name__} has no layers of the class torch.nn.Linear to put adapters on"
        raise WorkshopError("--lora_rank", what, "leave it out, or use a BLOOM, Llama or Qwen")
    # The other ZeRO stages cast adapters, too, and ZeRO-3 would leave them in fp32. All stages add fp32 masters
    dtype = frozen_dtype if sharded else torch.float32
    for layer in layers:
        # With a new class instead of a new module, the layer and its weight keep their names
        layer.__class__ = LoraLinear
        # The weight's own shape is empty under ZeRO-3. On the CPU, a seed gives the same numbers for every device
        a = torch.empty(rank, layer.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))  # as nn.Linear initialises its weight
        layer.lora_a = nn.Parameter(a.to(layer.weight.device, dtype))
        layer.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=dtype, device=layer.weight.device))


def count_adapter_elements(model: nn.Module, rank: int) -> int:
    """Return the number of elements of all adapters, computed from the sizes of the layers."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def save_adapters(weights: dict[str, torch.Tensor], folder: Path, base: str) -> None:
    """Save the adapters without the model, in fp32, in the format of the library PEFT.

    weights: the complete state dict of a model with adapters. base: name or folder of the model that was frozen.
    """
    layers = [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]
    adapters = {
        f"base_model.model.{layer}.{name}.weight": weights[f"{layer}.{own_name}"].to("cpu", torch.float32).contiguous()
        for layer in layers
        for own_name, name in zip(ADAPTERS, ("lora_A", "lora_B"), strict=True)
    }
    rank = len(weights[f"{layers[0]}.lora_a"])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapters, folder / "adapter_model.safetensors", {"format": "pt"})
    write_json(
        folder / ADAPTER_CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": SCALE * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": layers,  # whole names, because the last part of a name could also match the head
        },
    )
    # In bf16 and fp16 the frozen base was rounded, and only with this base PEFT computes the same
    dtype = weights[f"{layers[0]}.weight"].dtype
    print(f"Adapters saved to {folder} for PEFT; load their base with dtype={dtype}, as in the training", flush=True)


def merged_model(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return a model of the original architecture to be saved, on the CPU, in fp32, whose weights contain the adapters.

    weights: the complete state dict of a model with adapters. It is emptied, because memory may not have room for a
    second copy of all weights. A merged weight is W + 2 B A. In 16 bits it would round most of B A away. Buffers that
    are not saved, such as those of rotary positions, stay on PyTorch's meta device.
    """
    tied = model.all_tied_weights_keys  # such as the weight of a head that is also the embedding's
    for name in tied:
        weights.pop(name)
    adapters = {name: weights.pop(name).to("cpu", torch.float32) for name in list(weights) if name.endswith(ADAPTERS)}
    merged = {}
    while weights:
        name, weight = weights.popitem()
        weight = weight.to("cpu", torch.float32)
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and f"{layer}.lora_a" in adapters:
            a, b = (adapters[f"{layer}.{adapter}"] for adapter in ADAPTERS)
            weight = weight + SCALE * b @ a  # a new tensor, because `weights` may be the live ones
        merged[name] = weight
    merged |= {name: merged[source] for name, source in tied.items()}
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    with torch.device("meta"):  # no memory for random weights
        whole = model_class(model.config)
    whole.load_state_dict(merged, assign=True)
    whole.tie_weights()
    whole.generation_config = model.generation_config
    return whole
