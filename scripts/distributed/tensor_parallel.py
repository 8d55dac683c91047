"""Tensor parallelism: the ranks of a group cut each matrix by columns or rows, and compute as one.

transformers cuts the model by the plan in its config (`base_model_tp_plan`). With --fsdp there are several such groups:
PyTorch's fully_shard divides the part of each rank once more, over the ranks with the same part in the other groups.
"""

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from settings.settings import Settings
from shared.errors import WorkshopError

# Styles of a plan, by what is cut of weight and bias. Others are refused: experts, fused layers, and the norms of Qwen3
# (replicated_with_grad_allreduce), whose gradients transformers 5.23 sums over the ranks anew in each micro batch
BY_OUTPUTS = {"colwise", "colwise_gather_output", "embedding_rowwise"}
BY_INPUTS = {"rowwise"}  # the weight alone: each rank has the whole bias


def check_tensor_parallel(settings: Settings, ranks: int) -> None:
    """Raises WorkshopError (exit code 2) for ranks, or a way of saving, that do not go with it."""
    check_groups(settings, ranks)
    if settings.model.tensor_parallel == 1:
        return
    if settings.trainer.save_strategy != "no":
        way_out = "give --save_strategy no (SAVE_STRATEGY=no): the whole weights are saved at the end"
        raise settings.error("tensor_parallel", "transformers writes no checkpoints of a model that is cut", way_out)
    if settings.trainer.resume_from_checkpoint:
        raise settings.error("resume_from_checkpoint", "there are none with --tensor_parallel", "leave it out")


def check_groups(settings: Settings, ranks: int) -> None:
    """Raises WorkshopError (exit code 2) for ranks that do not make up tensor groups, or have nothing to do."""
    size = settings.model.tensor_parallel
    if size == 1:
        return
    if ranks % size:
        raise settings.error(
            "tensor_parallel", f"{size} does not divide {ranks} rank(s)", f"start {size}, or a multiple"
        )
    if ranks > size and not settings.trainer.fsdp:
        what = f"{size} of {ranks} ranks cut the matrices, and nobody uses the others"
        raise settings.error("tensor_parallel", what, f"start {size} ranks, or add --fsdp")
    if ranks == size and settings.trainer.fsdp:
        what = f"--tensor_parallel {size} leaves no ranks to shard over"
        raise settings.error("fsdp", what, "leave it out, or start more ranks")


def check_can_be_cut(model: PreTrainedModel, tensor_parallel: int) -> None:
    """Raises WorkshopError (exit code 2) for a model that cannot be cut over so many ranks. It needs no weights."""
    name = type(model).__name__
    other = "leave it out, or take custom-gpt, a Llama or a Qwen2"
    if not model.tp_plan:
        raise WorkshopError("--tensor_parallel", f"transformers has no plan by which to cut {name}", other)
    unknown = set(model.tp_plan.values()) - BY_OUTPUTS - BY_INPUTS
    if unknown:
        raise WorkshopError("--tensor_parallel", f"{name} is cut by {min(unknown)}, which is not known here", other)
    config = model.config.get_text_config()
    heads = {"attention heads": config.num_attention_heads}
    heads["key/value heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for kind, number in heads.items():
        if number % tensor_parallel:
            what = f"{tensor_parallel} does not divide the model's {number} {kind}"
            raise WorkshopError("--tensor_parallel", what, "choose a divisor")


def cut_parameters(model: PreTrainedModel) -> set[str]:
    """Names of the parameters of which each rank of a group holds a part."""
    names = set()
    for name, _ in model.named_parameters():
        module, _, kind = name.rpartition(".")
        style = model.tp_plan.get(replace_layer_number_by_wildcard(module))
        if style in BY_OUTPUTS or (style in BY_INPUTS and kind == "weight"):
            names.add(name)
    return names


def apply_tensor_parallel(model: Any, tensor_parallel: int, fsdp_config: dict | None, device: torch.device) -> None:
    """Leave each rank its part of a model that it has loaded whole into the node's memory. Collective.

    transformers would also shard, but a head that is tied to the embedding would be sharded apart from it.
    """
    shards = fsdp_config["dp_shard_size"] if fsdp_config else 1
    config = DistributedConfig(tp_size=tensor_parallel, fsdp_size=shards)
    mesh = model.prepare_distribute_model(config)[-1]
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach())  # transformers cuts each, and cannot cut one twice
    model.maybe_distribute_model(model, DistributedConfig(tp_size=tensor_parallel), mesh)
    model.tie_weights()
    model.config.distributed_config = config
    model.to(device)
    if shards > 1:
        blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        for unit in (*blocks, model):
            fully_shard(unit, mesh=mesh.get_mesh("fsdp"))
