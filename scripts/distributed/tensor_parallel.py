"""Tensor parallelism: each matrix is cut by columns or rows over the ranks of a tensor group.

transformers cuts the model according to the plan in its config (`base_model_tp_plan`). With --fsdp there are several
tensor groups. PyTorch's fully_shard then shards each part over the ranks that hold the same part in all groups.
"""

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from distributed.strategy import Degrees
from settings.settings import Settings
from shared.errors import WorkshopError

# Styles of a plan that cut a weight and its bias by outputs, or only the weight by inputs. Other styles are rejected:
# experts, fused layers, and the norms of Qwen3 (replicated_with_grad_allreduce). transformers 5.23 sums the accumulated
# gradients of these norms over the ranks again in each micro batch
BY_OUTPUTS = {"colwise", "colwise_gather_output", "embedding_rowwise"}
BY_INPUTS = {"rowwise"}  # only the weight is cut, and each rank has the whole bias


def check_saving_flags(settings: Settings) -> None:
    """Raise WorkshopError (exit code 2) for a flag for saving or resuming that does not work with --tensor_parallel."""
    if settings.model.tensor_parallel == 1:
        return
    if settings.trainer.save_strategy != "no":
        remedy = "give --save_strategy no (SAVE_STRATEGY=no): the whole weights are saved at the end"
        raise settings.error("tensor_parallel", "transformers writes no checkpoints of a model that is cut", remedy)
    if settings.trainer.resume_from_checkpoint:
        raise settings.error("resume_from_checkpoint", "--tensor_parallel writes no checkpoints", "leave it out")


def check_groups(settings: Settings, ranks: int) -> None:
    """Check that the ranks form whole tensor groups and that each group has work.

    Raises WorkshopError (exit code 2) otherwise.
    """
    size = settings.model.tensor_parallel
    if size == 1:
        return
    if ranks % size:
        raise settings.error(
            "tensor_parallel", f"{size} does not divide {ranks} rank(s)", f"start {size}, or a multiple"
        )
    if ranks > size and not settings.trainer.fsdp:
        what = f"{size} of {ranks} ranks cut the matrices, and the other ranks have no work"
        raise settings.error("tensor_parallel", what, f"start {size} ranks, or add --fsdp")
    if ranks == size and settings.trainer.fsdp:
        what = f"--tensor_parallel {size} leaves no ranks to shard over"
        raise settings.error("fsdp", what, "leave it out, or start more ranks")


def check_tensor_parallel_model(model: PreTrainedModel, tensor_parallel: int) -> None:
    """Check that tensor parallelism can cut this model over this number of ranks. Its weights need not exist.

    Raises WorkshopError (exit code 2) otherwise.
    """
    name = type(model).__name__
    other = "leave it out, or use custom-gpt, a Llama or a Qwen2 model"
    if not model.tp_plan:
        raise WorkshopError("--tensor_parallel", f"transformers has no tensor parallel plan for {name}", other)
    unknown = set(model.tp_plan.values()) - BY_OUTPUTS - BY_INPUTS
    if unknown:
        raise WorkshopError(
            "--tensor_parallel", f"the plan for {name} has the style {min(unknown)}, which is not supported", other
        )
    config = model.config.get_text_config()
    heads = {"attention heads": config.num_attention_heads}
    heads["key/value heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for kind, number in heads.items():
        if number % tensor_parallel:
            what = f"{tensor_parallel} does not divide the model's {number} {kind}"
            raise WorkshopError("--tensor_parallel", what, "choose a divisor")


def cut_parameters(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that tensor parallelism cuts."""
    names = set()
    for name, _ in model.named_parameters():
        module, _, kind = name.rpartition(".")
        style = model.tp_plan.get(replace_layer_number_by_wildcard(module))
        if style in BY_OUTPUTS or (style in BY_INPUTS and kind == "weight"):
            names.add(name)
    return names


def apply_tensor_parallel(model: Any, degrees: Degrees, device: torch.device) -> None:
    """Cut a model that each rank has loaded whole into CPU memory, so that each rank keeps only its part. Collective.

    The last lines shard for FSDP. transformers can also do this, but it shards a head and a tied embedding separately.
    """
    config = DistributedConfig(tp_size=degrees.tensor, fsdp_size=degrees.shards)
    mesh = model.prepare_distribute_model(config)[-1]
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach())  # transformers cannot cut one parameter twice
    model.maybe_distribute_model(model, DistributedConfig(tp_size=degrees.tensor), mesh)
    model.tie_weights()
    model.config.distributed_config = config
    model.to(device)
    embedding = model.get_input_embeddings().weight
    if isinstance(embedding, DTensor):
        # PyTorch computes the gradient of a cut embedding whole, on each rank. Keep only this rank's part
        embedding.register_hook(lambda gradient: gradient.redistribute(placements=embedding.placements))
    if degrees.shards > 1:
        blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        for unit in (*blocks, model):
            fully_shard(unit, mesh=mesh.get_mesh("fsdp"))
