"""Sizes of a model's parameters, activations and logits, found without memory for any of them."""

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from distributed.tensor_parallel import check_can_be_cut, cut_parameters
from settings.settings import Precision, Settings
from shared.errors import WorkshopError

FP32 = 4  # bytes
HALF = 2  # bytes of fp16 and bf16


@dataclass(frozen=True)
class ForwardPass:
    """All that the forward pass of one micro batch depends on. It is hashable, so that results can be cached.

    autocast: whether the weights are fp32 and autocast casts them for each operation.
    """

    config_json: str
    batch: int  # sequences
    length: int  # tokens of a sequence
    precision: Precision
    autocast: bool
    attention: str | None
    loss: str
    tensor_parallel: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes. bf16 stands for fp16 too: it has the same size."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Elements of each parameter, in order, and of each block; bytes that a forward pass leaves behind.

    With tensor parallelism these are the numbers of one rank. model: parameters before they are cut. uncut: parameters
    that every rank of a group holds. exchanged: bytes that each of very many ranks of a group sends for a micro batch.
    calls: the modules in the order in which the forward pass calls them, each as the indices of its own parameters in
    `sizes`. rows: the first dimension of each parameter. blocks: the indices of each block's parameters.
    embedding: the index of the input embedding, unless it is the head as well.
    """

    model: int
    uncut: int
    exchanged: int
    sizes: tuple[int, ...]
    block_sizes: tuple[int, ...]
    hidden: int
    layers: int
    activations: int
    block_input: int
    logits: int
    calls: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()
    embedding: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(self.sizes)

    def padded(self, ranks: int) -> "Shape":
        """Return the shape as FSDP2 shards it: it pads the rows of each parameter to a multiple of the ranks."""
        padded_rows = (math.ceil(rows / ranks) * ranks for rows in self.rows)
        sizes = tuple(
            padded * (size // rows) for padded, size, rows in zip(padded_rows, self.sizes, self.rows, strict=True)
        )
        return replace(self, sizes=sizes, block_sizes=tuple(sum(sizes[n] for n in block) for block in self.blocks))


def trace_shape(settings: Settings, config_json: str | None = None) -> Shape:
    """Return the shape of the model that train.py would load, or of the model with this config.json.

    Raises WorkshopError (exit code 2) when there is no such model, or when it cannot be traced.
    """
    forward = forward_pass(settings, config_json)
    with tracing_errors(settings):
        return trace(forward)


def forward_pass(settings: Settings, config_json: str | None = None) -> ForwardPass:
    """Raises WorkshopError (exit code 2) when there is no such model."""
    from model import load_config  # it imports transformers' models, for seconds: not before the flags are checked

    return ForwardPass(
        config_json=config_json or load_config(settings.model).to_json_string(use_diff=False),
        batch=settings.trainer.per_device_train_batch_size,
        length=settings.data.max_length,
        precision=settings.precision,
        autocast=uses_autocast(settings),
        attention=settings.model.attention,
        loss=settings.model.loss,
        tensor_parallel=settings.model.tensor_parallel,
    )


@contextlib.contextmanager
def tracing_errors(settings: Settings) -> Iterator[None]:
    """Turn any error of a model's own code, which runs on tensors without values, into one line.

    Raises WorkshopError (exit code 2).
    """
    try:
        yield
    except WorkshopError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"the forward pass of {settings.model.model_name} cannot be traced ({reason})"
        raise WorkshopError(
            "--model_name", what, "measure its memory with a run of a few steps: --max_steps 3"
        ) from error


def uses_autocast(settings: Settings) -> bool:
    """Whether autocast casts fp32 weights for each operation (Trainer, DDP, tensor parallelism).

    DeepSpeed keeps weights in the precision itself, and FSDP casts them when it gathers them.
    """
    if settings.model.tensor_parallel > 1:
        return True
    return settings.deepspeed_config is None and settings.fsdp_config is None


def recomputes_blocks(settings: Settings) -> bool:
    """Whether activations are checkpointed: the backward pass then computes each block again."""
    by_fsdp = (settings.fsdp_config or {}).get("activation_checkpointing", False)
    return bool(settings.trainer.activation_checkpointing or by_fsdp)


def weight_bytes(settings: Settings) -> int:
    """Bytes of a weight in the precision in which the model computes."""
    return FP32 if settings.precision == "fp32" else HALF


@contextlib.contextmanager
def model_without_storage(forward: ForwardPass) -> Iterator[Any]:
    """Make a model whose tensors have no storage, under autocast if the training uses it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import local_torch_dtype

    import custom_model  # noqa: F401 - it makes custom-gpt known to AutoConfig
    from training.bloom_sdpa import use_attention

    # PyTorch logs an operation without a rule for such tensors with a traceback, and raises an exception, too
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    config = AutoConfig.for_model(**json.loads(forward.config_json))
    with FakeTensorMode():
        # Do not use from_config: with ZeRO-3 it would shard the model
        with no_init_weights(), local_torch_dtype(torch.float32 if forward.autocast else forward.dtype):
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            if model_class.config_class is type(config).sub_configs.get("text_config"):  # if it also reads images
                config = config.get_text_config()
            model = model_class(config).train()
            model.tie_weights()
            use_attention(model, forward.attention)
        casts = forward.autocast and forward.precision != "fp32"
        with torch.autocast("cpu", dtype=forward.dtype, enabled=casts):
            yield model


def cut_blocks(model: Any, tensor_parallel: int) -> None:
    """Cut each matrix of the blocks to the part that one rank computes with.

    Embedding and head stay whole: their outputs are whole on every rank.
    """
    for name, module in model.named_modules():
        style = model.tp_plan.get(replace_layer_number_by_wildcard(name))
        if style == "colwise":
            for kind, parameter in list(module.named_parameters()):
                setattr(module, kind, torch.nn.Parameter(parameter[: len(parameter) // tensor_parallel]))
        if style == "rowwise":
            inputs = module.in_features // tensor_parallel
            module.weight = torch.nn.Parameter(module.weight[:, :inputs])


def exchanged_bytes(model: Any, forward: ForwardPass) -> int:
    """Bytes that a rank of a tensor group sends for a micro batch, if the ranks are very many (n - 1 of n parts).

    The outputs of each matrix that is cut by inputs, and those of the embedding, are summed. In the backward pass the
    gradients of the inputs of each matrix that is cut by outputs are summed. A ring sends both twice. Logits are
    gathered, and sent once.
    """
    text = model.config.get_text_config()
    styles = [model.tp_plan.get(replace_layer_number_by_wildcard(name)) for name, _ in model.named_modules()]
    by_outputs = styles.count("colwise") + styles.count("colwise_gather_output")
    # Norms and residuals are fp32 also under autocast, and so are their gradients
    compute_bytes = forward.dtype.itemsize
    summed = styles.count("rowwise") * compute_bytes + (styles.count("embedding_rowwise") + by_outputs) * FP32
    gathered = styles.count("colwise_gather_output") * text.vocab_size * compute_bytes
    return forward.tokens * (2 * summed * text.hidden_size + gathered)


def untied_embedding(model: Any) -> list[torch.nn.Parameter]:
    """The weight of the input embedding, unless it is the head as well."""
    head = model.get_output_embeddings()
    weight = model.get_input_embeddings().weight
    return [] if head is not None and head.weight is weight else [weight]


@lru_cache
def trace(forward: ForwardPass) -> Shape:
    """Run the forward pass on tensors without storage, and count what autograd keeps of it."""
    from training.chunked_loss import bytes_of_chunks

    saved: dict[int, torch.UntypedStorage] = {}
    with model_without_storage(forward) as model:
        whole = {name: p.numel() for name, p in model.named_parameters()}
        held = whole
        cut: set[str] = set()
        exchanged = 0
        if forward.tensor_parallel > 1:
            check_can_be_cut(model, forward.tensor_parallel)
            cut = cut_parameters(model)
            held = whole | {name: whole[name] // forward.tensor_parallel for name in cut}
            cut_blocks(model, forward.tensor_parallel)
            exchanged = exchanged_bytes(model, forward)
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        calls: list[tuple[int, ...]] = []
        for module in model.modules():
            module.register_forward_pre_hook(
                lambda module, _: calls.append(tuple(numbers[id(p)] for p in module.parameters(recurse=False)))
            )

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage  # keeps the storage alive, so that no other gets its address
            return tensor

        tokens = torch.ones(forward.batch, forward.length, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            # The chunked loss leaves nothing behind but what is counted below
            model(input_ids=tokens, attention_mask=tokens, labels=tokens if forward.loss == "full" else None)
    blocks = [name for name, m in model.named_modules() if type(m).__name__ in (model._no_split_modules or [])]
    text = model.config.get_text_config()
    activations = sum(storage.nbytes() for storage in saved.values())
    if forward.loss == "full":
        elements = forward.tokens * text.vocab_size
        activations -= 4 * elements  # their fp32 log-softmax
        # Memory holds 16-bit logits next to their fp32 copy and its log-softmax, but fp32 logits only next to the
        # log-softmax. In the backward pass their gradients take these places
        logits = elements * (8 if forward.precision == "fp32" else 10)
    else:
        logits = bytes_of_chunks(forward.tokens, text.hidden_size, text.vocab_size, forward.dtype)
    return Shape(
        model=sum(whole.values()),
        uncut=sum(size for name, size in whole.items() if name not in cut),
        exchanged=exchanged,
        sizes=tuple(held.values()),
        block_sizes=tuple(sum(size for name, size in held.items() if name.startswith(f"{block}.")) for block in blocks),
        hidden=text.hidden_size,
        layers=len(blocks) or text.num_hidden_layers,
        activations=activations,
        block_input=forward.tokens * text.hidden_size * forward.dtype.itemsize,
        logits=logits,
        calls=tuple(calls),
        # With tensor parallelism embedding and head are traced whole, but a rank holds a part of each
        rows=tuple(held[name] // (p.numel() // len(p)) for name, p in model.named_parameters()),
        embedding=tuple(numbers[id(each)] for each in untied_embedding(model)),
        blocks=tuple(tuple(n for n, name in enumerate(held) if name.startswith(f"{block}.")) for block in blocks),
    )
