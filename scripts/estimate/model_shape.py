"""Find the sizes of a model's parameters, activations and logits, without allocating memory for tensors."""

import contextlib
import json
import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import compress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from distributed.strategy import choose_strategy
from distributed.tensor_parallel import BY_INPUTS, BY_OUTPUTS, check_tensor_parallel_model, cut_parameters
from settings.settings import Precision, Settings
from shared.errors import WorkshopError

FP32 = 4  # bytes
HALF = 2  # bytes of fp16 and bf16
PASSES = ("loss", "blocks", "embedding")  # intervals of the forward and backward pass; run_passes defines them
# Autocast computes these functions in fp32 on a GPU, but not on the CPU (PyTorch's "Autocast Op Reference")
FP32_ON_GPU = {
    *("layer_norm", "rms_norm", "group_norm", "norm"),
    *("softmax", "log_softmax", "softplus", "logsumexp"),
    *("exp", "expm1", "log", "log1p", "log2", "log10"),
    *("pow", "__pow__", "reciprocal", "rsqrt"),
    *("sum", "cumsum", "prod", "cumprod", "cosine_similarity"),
    *("renorm", "dist", "cdist", "pdist"),
    *("kl_div", "acos", "asin", "cosh", "sinh", "tan", "erfinv"),
}


@dataclass(frozen=True)
class ForwardPass:
    """All inputs of the forward pass of one micro batch. The class is hashable, so that results can be cached.

    autocast: whether autocast casts fp32 weights to 16 bits for each operation. recomputes: whether the backward
    pass computes each block again. on_cpu: whether the training has no GPU. lora_rank: rank of the adapters, 0 without.
    one_row: whether the micro batch is one row without padding (models/padding_free.py).
    """

    config_json: str
    batch: int  # sequences
    length: int  # tokens of a sequence
    precision: Precision
    autocast: bool
    recomputes: bool
    attention: str | None
    loss: str
    tensor_parallel: int
    on_cpu: bool
    lora_rank: int = 0
    one_row: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes. For fp16 it is bf16, which has the same size."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16


class Alive(NamedTuple):
    """Bytes that the passes hold after an operation, beyond parameters and their gradients.

    head: 16-bit copies of the head's weight, and gradients of this weight that are not added up yet.
    """

    activations: float
    logits: float
    head: float


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and the memory that the passes of a micro batch need.

    With tensor parallelism these are the numbers of one rank.

    model: elements of all parameters, before tensor parallelism cuts them. uncut: elements of the parameters that every
    rank of a tensor group holds whole. exchanged: bytes that a rank of a tensor group sends for a micro batch; with n
    ranks it sends (n - 1) / n of these. sizes, block_sizes: elements of each parameter and of each block. history: for
    each of PASSES, the bytes alive after each operation. peaks: the largest entry of each history. rows: the first
    dimension of each parameter. blocks: the indices of each block's parameters in `sizes`. recomputes: whether the
    backward pass computes each block again. embedding: the index of the input embedding's weight, empty if the head has
    the same weight. trained: for each parameter, whether the optimizer updates it. Without LoRA, all are trained.
    """

    model: int
    uncut: int
    exchanged: int
    sizes: tuple[int, ...]
    block_sizes: tuple[int, ...]
    hidden: int
    layers: int
    history: dict[str, list[Alive]]
    peaks: dict[str, Alive]
    rows: tuple[int, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()
    recomputes: bool = False
    embedding: tuple[int, ...] = ()
    trained: tuple[bool, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(self.sizes)

    @property
    def trained_sizes(self) -> tuple[int, ...]:
        """Elements of each trained parameter."""
        return tuple(compress(self.sizes, self.trained)) if self.trained else self.sizes

    @property
    def frozen_sizes(self) -> tuple[int, ...]:
        return tuple(compress(self.sizes, (not trained for trained in self.trained)))

    @property
    def trainable(self) -> int:
        return sum(self.trained_sizes)

    @property
    def frozen(self) -> int:
        return self.parameters - self.trainable

    def trainable_elements(self, parameters: Iterable[int]) -> int:
        """Elements of those of the given parameters that are trained. parameters: indices in `sizes`."""
        return sum(self.sizes[n] for n in parameters if not self.trained or self.trained[n])

    @property
    def used_in_backward_pass(self) -> int:
        """Elements that the backward pass uses.

        These are all, except LoRA's frozen embedding. Activation checkpointing uses this one, too, because transformers
        then requires gradients of its output.
        """
        used = self.recomputes or self.trainable_elements(self.embedding)
        return self.parameters - (0 if used else sum(self.sizes[number] for number in self.embedding))

    def padded(self, ranks: int) -> "Shape":
        """Return the shape as FSDP2 shards it, with the rows of each parameter padded to a multiple of `ranks`."""
        padded_rows = (math.ceil(rows / ranks) * ranks for rows in self.rows)
        sizes = tuple(
            padded * (size // rows) for padded, size, rows in zip(padded_rows, self.sizes, self.rows, strict=True)
        )
        return replace(self, sizes=sizes, block_sizes=tuple(sum(sizes[n] for n in block) for block in self.blocks))


def trace_shape(settings: Settings, config_json: str | None = None) -> Shape:
    """Return the shape of the model that train.py would load, or of the model with this config.json.

    Raises WorkshopError (exit code 2) if the model does not exist or cannot be traced.
    """
    forward = forward_pass(settings, config_json)
    with tracing_errors(settings):
        return trace(forward)


def forward_pass(settings: Settings, config_json: str | None = None) -> ForwardPass:
    """Return the inputs of the forward pass. Raises WorkshopError (exit code 2) for a model that does not exist."""
    # This import takes seconds, because it loads transformers' models. So do it only after the flags are checked
    from model import load_config

    return ForwardPass(
        config_json=config_json or load_config(settings.model).to_json_string(use_diff=False),
        batch=settings.trainer.per_device_train_batch_size,
        length=settings.data.max_length,
        precision=settings.precision,
        autocast=choose_strategy(settings, settings.estimate.gpus).autocasts and settings.precision != "fp32",
        recomputes=recomputes_blocks(settings),
        attention=settings.model.attention,
        loss=settings.model.loss,
        tensor_parallel=settings.model.tensor_parallel,
        on_cpu=bool(settings.trainer.use_cpu),
        lora_rank=settings.model.lora_rank,
        one_row=settings.data.padding == "none",
    )


@contextlib.contextmanager
def tracing_errors(settings: Settings) -> Iterator[None]:
    """Replace an error that the model's own code raises on tensors without values by a WorkshopError (exit code 2)."""
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


def recomputes_blocks(settings: Settings) -> bool:
    """Return whether activations are checkpointed, so that the backward pass computes each block again."""
    by_fsdp = (settings.fsdp_config or {}).get("activation_checkpointing", False)
    return bool(settings.trainer.activation_checkpointing or by_fsdp)


def weight_bytes(settings: Settings) -> int:
    """Bytes of a weight in the precision of the computation. A frozen weight always has this precision."""
    return FP32 if settings.precision == "fp32" else HALF


@contextlib.contextmanager
def model_without_storage(forward: ForwardPass) -> Iterator[Any]:
    """Create a model whose tensors have no storage."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import local_torch_dtype

    import models.custom_model  # noqa: F401 - registers custom-gpt with AutoConfig
    from measure.flops import tokens_in_sight
    from models.bloom_sdpa import attention_name, use_attention
    from models.lora import add_adapters
    from models.padding_free import check_padding_free, use_padding_free

    # For an operation without a rule for such tensors, PyTorch raises an exception and also logs a traceback
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    config = AutoConfig.for_model(**json.loads(forward.config_json))
    # PyTorch's product for experts has no rule for fp32 tensors without storage. transformers' own product has one, and
    # needs the same memory
    with FakeTensorMode(), patch("transformers.integrations.moe._can_use_grouped_mm", return_value=False):
        # Do not use from_config, which would shard the model under ZeRO-3
        with no_init_weights(), local_torch_dtype(torch.float32 if forward.autocast else forward.dtype):
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            if model_class.config_class is type(config).sub_configs.get("text_config"):  # the model also reads images
                config = config.get_text_config()
            model = model_class(config).train()
            model.tie_weights()
            use_attention(model, forward.attention)
        if forward.one_row:
            sees_all = tokens_in_sight(model, forward.length) == forward.length
            check_padding_free(model, attention_name(model), sees_all)
            use_padding_free(model)
        if forward.lora_rank:
            add_adapters(model, forward.lora_rank, forward.dtype)
            if not forward.autocast:  # DeepSpeed casts adapters, and FSDP does so when it gathers them
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(forward.dtype)
        if forward.recomputes:
            for block in named_blocks(model).values():
                # Tensors without values draw no random numbers, so there is no state to save
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        yield model


def named_blocks(model: Any) -> dict[str, Any]:
    """Return the model's blocks by their names."""
    types = model._no_split_modules or []
    return {name: module for name, module in model.named_modules() if type(module).__name__ in types}


def autocast(forward: ForwardPass) -> torch.autocast:
    """Return the context of the forward pass.

    Like the Trainer, leave the context before the backward pass. At the exit autocast drops its copies of the weights.
    """
    return torch.autocast("cpu", dtype=forward.dtype, enabled=forward.autocast)


class GpuAutocast(TorchFunctionMode):
    """Apply the rules of a GPU's autocast to tensors on the CPU, wherever autocast is on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        in_fp32 = func.__name__ in FP32_ON_GPU and kwargs.get("dtype") is None
        if in_fp32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, cast_half, (args, kwargs))
        return func(*args, **kwargs)


def cast_half(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in 16-bit precision in fp32, and any other tensor as it is."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def device_rules(on_cpu: bool) -> contextlib.AbstractContextManager:
    """Return a context for both passes, in which autocast follows the rules of the device that is estimated."""
    return contextlib.nullcontext() if on_cpu else GpuAutocast()


def cut_matrices(model: Any, tensor_parallel: int) -> None:
    """Cut each matrix to the part of one rank. The logits keep their size, because ranks gather them."""
    for name, module in model.named_modules():
        style = model.tp_plan.get(replace_layer_number_by_wildcard(name))
        if style in BY_OUTPUTS:
            for kind, parameter in list(module.named_parameters()):
                setattr(module, kind, torch.nn.Parameter(parameter[: len(parameter) // tensor_parallel]))
        if style in BY_INPUTS:
            inputs = module.in_features // tensor_parallel
            module.weight = torch.nn.Parameter(module.weight[:, :inputs])
        if style == "colwise_gather_output":
            module.register_forward_hook(lambda head, _, part: pad(part, (0, head.out_features - part.shape[-1])))
    model.tie_weights()


def exchanged_bytes(model: Any, forward: ForwardPass) -> int:
    """Bytes that a rank of a tensor group sends for a micro batch. With n ranks it sends (n - 1) / n of these.

    The forward pass sums over the ranks the outputs of the embedding and of each matrix that is cut by inputs. The
    backward pass sums the gradients of the inputs of each matrix that is cut by outputs. A ring sends a summed
    tensor twice. Ranks gather the logits, which a ring sends once.
    """
    text = model.config.get_text_config()
    styles = [model.tp_plan.get(replace_layer_number_by_wildcard(name)) for name, _ in model.named_modules()]
    by_outputs = styles.count("colwise") + styles.count("colwise_gather_output")
    # Norms and residuals, and their gradients, are fp32 even under autocast
    compute_bytes = forward.dtype.itemsize
    summed = styles.count("rowwise") * compute_bytes + (styles.count("embedding_rowwise") + by_outputs) * FP32
    gathered = styles.count("colwise_gather_output") * text.vocab_size * compute_bytes
    return forward.tokens * (2 * summed * text.hidden_size + gathered)


@lru_cache
def trace(forward: ForwardPass) -> Shape:
    """Trace the passes of a micro batch on tensors without storage, and count the bytes that are alive."""
    with model_without_storage(forward) as model:
        whole = {name: p.numel() for name, p in model.named_parameters()}
        held = whole
        cut: set[str] = set()
        exchanged = 0
        if forward.tensor_parallel > 1:
            check_tensor_parallel_model(model, forward.tensor_parallel)
            cut = cut_parameters(model)
            held = whole | {name: whole[name] // forward.tensor_parallel for name in cut}
            cut_matrices(model, forward.tensor_parallel)
            exchanged = exchanged_bytes(model, forward)
        blocks = named_blocks(model)
        history = run_passes(model, list(blocks.values()), forward)
    text = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return Shape(
        model=sum(whole.values()),
        uncut=sum(size for name, size in whole.items() if name not in cut),
        exchanged=exchanged,
        sizes=tuple(held.values()),
        block_sizes=tuple(sum(size for name, size in held.items() if name.startswith(f"{block}.")) for block in blocks),
        hidden=text.hidden_size,
        layers=len(blocks) or text.num_hidden_layers,
        peaks={interval: max(states, key=sum) for interval, states in history.items() if states},
        history=history,
        rows=tuple(len(parameter) for parameter in model.parameters()),
        blocks=tuple(tuple(n for n, name in enumerate(held) if name.startswith(f"{block}.")) for block in blocks),
        recomputes=forward.recomputes,
        embedding=tuple(number for number, p in enumerate(model.parameters()) if p is embedding and not tied),
        trained=tuple(parameter.requires_grad for parameter in model.parameters()),
    )


class AliveBytes(TorchDispatchMode):
    """Count the bytes of all storages that are alive after each operation.

    scores: elements of the logits of all tokens. vocabulary: elements of the logits of one token. head: shape of the
    weight that computes the logits.
    """

    def __init__(self, scores: int, vocabulary: int, head: torch.Size):
        super().__init__()
        self.scores = scores
        self.vocabulary = vocabulary
        self.head = sorted(head)
        self.interval = PASSES[0]
        self.alive: Counter[str] = Counter()
        self.known: set[int] = set()
        self.history: dict[str, list[Alive]] = {interval: [] for interval in PASSES}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor, self.classify(tensor))
        self.note()
        return result

    def classify(self, tensor: torch.Tensor) -> str:
        if tensor.numel() == self.scores and tensor.shape[-1] == self.vocabulary:
            return "logits"
        return "head" if sorted(tensor.shape) == self.head else "activations"

    def add(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.known:
            self.known.add(address)
            self.alive[kind] += storage.nbytes()
            weakref.finalize(storage, self.remove, address, kind, storage.nbytes()).atexit = False

    def remove(self, address: int, kind: str, size: int) -> None:
        self.known.discard(address)
        self.alive[kind] -= size

    def note(self, more_logits: int = 0) -> None:
        """Append the bytes that are alive now. more_logits: bytes of logits that no tensor represents."""
        alive = self.alive
        self.history[self.interval].append(Alive(alive["activations"], alive["logits"] + more_logits, alive["head"]))

    def begin(self, interval: str) -> None:
        self.interval = interval


def run_passes(model: Any, blocks: list[Any], forward: ForwardPass) -> dict[str, list[Alive]]:
    """Run the forward and backward pass of a micro batch. Return the bytes alive after each operation, by interval.

    The interval "loss" is the forward pass, the loss, and the backward pass of the head. "blocks" begins with the
    gradient of the last block's output, and "embedding" with the gradient of the first block's input. Gradients of
    parameters exist from the start, as in each micro batch after the first one of a step.
    """
    from data_loader import OneRow
    from models.chunked_loss import CPU_PIECES, GPU_PIECES, chunk_bytes

    head = model.get_output_embeddings()
    vocabulary = head.out_features  # the whole vocabulary, even if tensor parallelism cuts the weight
    tokens = torch.ones(forward.batch, forward.length, dtype=torch.long)
    inputs = {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
    if forward.one_row:
        inputs = OneRow()([{"input_ids": row, "labels": row} for row in [[1] * forward.length] * forward.batch])
    counting = AliveBytes(inputs["input_ids"].numel() * vocabulary, vocabulary, head.weight.shape)
    for parameter in model.parameters():
        counting.add(parameter, "parameters and their gradients")
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            counting.add(parameter.grad, "parameters and their gradients")
    if forward.loss == "chunked":
        head.forward = lambda hidden: ChunkedHead.apply(hidden, head.weight)
        model.loss_function = lambda logits, *args, **kwargs: logits
    if blocks:
        begin_with_gradient(blocks[-1].register_forward_hook, "blocks", counting)
        begin_with_gradient(blocks[0].register_forward_pre_hook, "embedding", counting)
    with counting, device_rules(forward.on_cpu):
        with autocast(forward):
            loss = model(**inputs, use_cache=False).loss
            if forward.loss == "chunked":
                pieces = CPU_PIECES if forward.on_cpu else GPU_PIECES
                counting.note(chunk_bytes(forward.tokens, head.weight, forward.dtype, pieces))
        loss.backward()
    return counting.history


def begin_with_gradient(register_hook: Any, interval: str, counting: AliveBytes) -> None:
    """Begin `interval` when the backward pass has computed the gradient of a block's output or input.

    register_hook: the block's register_forward_hook for its output, or register_forward_pre_hook for its input.
    """

    def hook(module: Any, *values: Any) -> None:
        first = next(value for value in tree_leaves(values[-1]) if isinstance(value, torch.Tensor))
        if first.requires_grad:  # the output of a frozen embedding has no gradient
            first.register_hook(lambda _: counting.begin(interval))

    register_hook(hook)


class ChunkedHead(torch.autograd.Function):
    """Stand-in for models/chunked_loss.py that keeps the same fp32 gradients of hidden states and weight.

    A frozen weight has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        kept = [tensor for tensor in (hidden, weight) if tensor.requires_grad]
        ctx.save_for_backward(*(torch.empty_like(tensor, dtype=torch.float32) for tensor in kept))
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        gradients = [kept.to(dtype) for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=False)]
        return gradients[0], gradients[1] if len(gradients) > 1 else None
