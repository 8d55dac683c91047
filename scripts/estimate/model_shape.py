"""Sizes of a model's parameters, activations and logits, found without memory for any of them."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from distributed.tensor_parallel import check_can_be_cut, cut_parameters
from settings.command_line import Options, precision_name
from shared.errors import WorkshopError

T = TypeVar("T")
FP32 = 4  # bytes
HALF = 2  # bytes of fp16 and bf16


@dataclass(frozen=True)
class Shape:
    """Elements of each parameter, in order, and of each block; bytes that a forward pass leaves behind.

    With tensor parallelism they are those of one rank. model: parameters before they are cut; uncut: those that every
    rank of a group holds; exchanged: bytes that a micro batch costs each of very many ranks of a group to send.
    calls: of each module, as the forward pass calls one after the other, which of `sizes` are its own parameters.
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

    @property
    def parameters(self) -> int:
        return sum(self.sizes)


def shape_for(options: Options) -> Shape:
    """Shape of the model that train.py would load. Raises WorkshopError (exit code 2) when there is no such model."""
    return shape_of(config_of(options), options)


def shape_of(config_json: str, options: Options) -> Shape:
    """Shape of the model of this config.json. Raises WorkshopError (exit code 2) when it cannot be traced."""
    values = options.values
    return traced(
        trace,
        options,
        config_json,
        values["per_device_train_batch_size"],
        values["max_length"],
        precision_name(values),
        casts_as_it_computes(options),
        values["attention"],
        values["loss"],
        values["tensor_parallel"],
    )


def config_of(options: Options) -> str:
    """The config.json of these options' model. Raises WorkshopError (exit code 2) when there is no such model."""
    from model import load_config  # with transformers' models, seconds: not before the command line was right

    values: Any = SimpleNamespace(**options.values)
    return load_config(values).to_json_string(use_diff=False)


def traced(trace: Callable[..., T], options: Options, *arguments: object) -> T:
    """`trace`, of these arguments. Raises WorkshopError (exit code 2) when the model cannot be traced."""
    try:
        return trace(*arguments)
    except WorkshopError:
        raise
    except Exception as error:  # whatever a model's own code raises on tensors without values
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"the forward pass of {options.values['model_name']} cannot be traced ({reason})"
        raise WorkshopError(
            "--model_name", what, "measure its memory with a run of a few steps: --max_steps 3"
        ) from error


def casts_as_it_computes(options: Options) -> bool:
    """Whether the weights are fp32 and cast for each operation (Trainer, DDP), or in the precision itself (DeepSpeed;
    FSDP, as it gathers them)."""
    if options.values["tensor_parallel"] > 1:
        return True
    return not options.deepspeed_config and options.fsdp_config is None


@contextlib.contextmanager
def model_without_storage(config_json: str, precision: str, autocast: bool, attention: str | None) -> Iterator[Any]:
    """A model whose tensors have no storage, and autocast around it where the training has that.

    attention: of --attention.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import local_torch_dtype

    import custom_model  # noqa: F401 - it makes custom-gpt known to AutoConfig
    from training.bloom_sdpa import use_attention

    # an operation without a rule for such tensors is logged with a traceback, and raised besides
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    dtype = dtype_of_computing(precision)
    config = AutoConfig.for_model(**json.loads(config_json))
    with FakeTensorMode():
        # not by from_config, which in a training with ZeRO-3 would shard it
        with no_init_weights(), local_torch_dtype(torch.float32 if autocast else dtype):
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            if model_class.config_class is type(config).sub_configs.get("text_config"):  # of a model that also sees
                config = config.get_text_config()
            model = model_class(config).train()
            model.tie_weights()
            use_attention(model, attention)
        with torch.autocast("cpu", dtype=dtype, enabled=autocast and precision != "fp32"):
            yield model


def dtype_of_computing(precision: str) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16  # fp16 has the same size


def cut_blocks(model: Any, tensor_parallel: int) -> None:
    """Leave each matrix of the blocks the part that one rank computes with. Embedding and head stay whole: what comes
    out of them is whole on every rank."""
    for name, module in model.named_modules():
        style = model.tp_plan.get(replace_layer_number_by_wildcard(name))
        if style == "colwise":
            for kind, parameter in list(module.named_parameters()):
                setattr(module, kind, torch.nn.Parameter(parameter[: len(parameter) // tensor_parallel]))
        if style == "rowwise":
            inputs = module.in_features // tensor_parallel
            module.weight = torch.nn.Parameter(module.weight[:, :inputs])


def exchanged_bytes(model: Any, tokens: int, compute_bytes: int) -> int:
    """What the ranks of a tensor group send each other for so many tokens, if they are very many (n - 1 of n parts).

    Behind each matrix cut by inputs, and behind the embedding, the outputs are summed; in the backward pass the
    gradient of the input of each matrix cut by outputs: a ring sends each twice. Logits are gathered, and sent once.
    """
    text = model.config.get_text_config()
    styles = [model.tp_plan.get(replace_layer_number_by_wildcard(name)) for name, _ in model.named_modules()]
    by_outputs = styles.count("colwise") + styles.count("colwise_gather_output")
    # norms and residuals are fp32 also under autocast, and so are their gradients
    summed = styles.count("rowwise") * compute_bytes + (styles.count("embedding_rowwise") + by_outputs) * FP32
    gathered = styles.count("colwise_gather_output") * text.vocab_size * compute_bytes
    return tokens * (2 * summed * text.hidden_size + gathered)


@lru_cache
def trace(
    config_json: str,
    batch: int,
    length: int,
    precision: str,
    autocast: bool,
    attention: str | None,
    loss: str,
    tensor_parallel: int,
) -> Shape:
    """Build the model and run its forward pass on tensors without storage, noting what autograd keeps of it.

    autocast: of `casts_as_it_computes`.
    """
    from training.chunked_loss import bytes_of_chunks

    saved: dict[int, torch.UntypedStorage] = {}
    with model_without_storage(config_json, precision, autocast, attention) as model:
        whole = {name: p.numel() for name, p in model.named_parameters()}
        held = whole
        cut: set[str] = set()
        exchanged = 0
        if tensor_parallel > 1:
            check_can_be_cut(model, tensor_parallel)
            cut = cut_parameters(model)
            held = whole | {name: whole[name] // tensor_parallel for name in cut}
            cut_blocks(model, tensor_parallel)
            exchanged = exchanged_bytes(model, batch * length, dtype_of_computing(precision).itemsize)
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
                saved[storage._cdata] = storage  # kept, so that no other takes its place
            return tensor

        tokens = torch.ones(batch, length, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            # the chunked loss leaves nothing behind but what is counted below
            model(input_ids=tokens, attention_mask=tokens, labels=tokens if loss == "full" else None)
    blocks = [name for name, m in model.named_modules() if type(m).__name__ in (model._no_split_modules or [])]
    text = model.config.get_text_config()
    compute_dtype = dtype_of_computing(precision)
    activations = sum(storage.nbytes() for storage in saved.values())
    if loss == "full":
        elements = batch * length * text.vocab_size
        activations -= 4 * elements  # their fp32 log-softmax
        # 16-bit logits stand beside their fp32 copy and its log-softmax, fp32 ones beside the latter alone; in the
        # backward pass their gradients take these places
        logits = elements * (8 if precision == "fp32" else 10)
    else:
        logits = bytes_of_chunks(batch * length, text.hidden_size, text.vocab_size, compute_dtype)
    return Shape(
        model=sum(whole.values()),
        uncut=sum(size for name, size in whole.items() if name not in cut),
        exchanged=exchanged,
        sizes=tuple(held.values()),
        block_sizes=tuple(sum(size for name, size in held.items() if name.startswith(f"{block}.")) for block in blocks),
        hidden=text.hidden_size,
        layers=len(blocks) or text.num_hidden_layers,
        activations=activations,
        block_input=batch * length * text.hidden_size * compute_dtype.itemsize,
        logits=logits,
        calls=tuple(calls),
    )
