"""Load, create and save models and tokenizers."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    set_seed,
)
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from config import CUSTOM_GPT, CUSTOM_SIZES, TINY_BLOOM, DataArguments, ModelArguments, has_random_weights
from data_loader import find_files, read_files, read_part
from models.bloom_sdpa import use_attention
from models.custom_model import CustomGPTConfig
from models.lora import ADAPTERS, merged_model, save_adapters
from shared.errors import WorkshopError
from shared.hub import check_files, check_relative_path, loading_errors, offline_without_network
from shared.paths import ADAPTER_CONFIG, ADAPTER_FOLDER
from tasks import task_of

# Hidden size, layers and heads (arXiv:2211.05100, table 3), so that --from_scratch needs no download
BLOOM_SIZES = {
    TINY_BLOOM: (64, 2, 4),
    "bigscience/bloom-560m": (1024, 24, 16),
    "bigscience/bloom-1b1": (1536, 24, 16),
    "bigscience/bloom-1b7": (2048, 24, 16),
    "bigscience/bloom-3b": (2560, 30, 32),
    "bigscience/bloom-7b1": (4096, 30, 32),
}
BLOOM_VOCABULARY = 250880  # 250,680 tokens, padded so that its authors' GPUs could divide it evenly
TINY_VOCABULARY = 2048
DRAWING = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)  # all of torch.nn.init call one of these
# In the order of BLOOM's ids 0 to 3
SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def load_tokenizer(model_args: ModelArguments, data_args: DataArguments) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer. It pads on the right and always has a pad token.

    The tokenizers of tiny-bloom and custom-gpt are trained on the whole training file, because there is none to
    download. With --from_scratch, the same happens if the tokenizer of a BLOOM model cannot be loaded.
    """
    name = model_args.tokenizer_name or model_args.model_name
    flag = "--tokenizer_name" if model_args.tokenizer_name else "--model_name"
    if name in (TINY_BLOOM, CUSTOM_GPT):
        return train_tokenizer(data_args, TINY_VOCABULARY if name == TINY_BLOOM else model_args.vocab_size)
    if not is_folder(flag, name):
        offline_without_network()
    try:
        with loading_errors(flag, name):
            # AutoTokenizer gives some models the rules of their family, such as Qwen2, even if the folder has others
            with_own_rules = get_tokenizer_config(name).get("tokenizer_class") == "TokenizersBackend"
            kind: Any = PreTrainedTokenizerFast if with_own_rules else AutoTokenizer
            tokenizer = kind.from_pretrained(name, trust_remote_code=False)
    except WorkshopError:
        if not (model_args.from_scratch and name in BLOOM_SIZES):
            raise
        print(f"no tokenizer for {name}: training one with {TINY_VOCABULARY} tokens on {data_args.dataset}")
        return train_tokenizer(data_args, TINY_VOCABULARY)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # transformers creates such an empty tokenizer if the file of GPT-2's tokenizer is missing
        remedy = "save one next to the model, or give --tokenizer_name"
        raise WorkshopError(flag, f"{name} contains no tokenizer", remedy)
    if tokenizer.eos_token_id is None:
        what = f"the tokenizer of {name} has no eos_token, by which the model learns to end an answer"
        raise WorkshopError(flag, what, "name one in its tokenizer_config.json")
    if tokenizer.pad_token is None:
        # Padding is masked by position, not by id, so the EOS at the end of an answer still counts
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def train_tokenizer(data_args: DataArguments, vocabulary: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer with BLOOM's special ids on all texts of the training file.

    The result is the same on every rank.
    """
    local = find_files(data_args.dataset)
    examples = read_files(data_args.dataset, data_args).examples if local else read_part("train", data_args).rows
    task = task_of(list(next(iter(examples))))
    texts = dict.fromkeys(text for example in examples for text in task.texts(example))
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "Question: Context: Answer:"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **SPECIAL_TOKENS)


def is_folder(flag: str, name: str) -> bool:
    """Return whether a model or tokenizer is a local folder, not a name on the Hub.

    Raise WorkshopError for the path of a missing folder (exit code 2), and for files that cannot be used.
    """
    check_files(name)
    check_relative_path(flag, name)
    if not os.path.isdir(name) and name.startswith((".", "/", "~", "output/")):
        raise WorkshopError(flag, f"there is no folder {name}", "give the folder of a saved model, or a Hub name")
    has_model = (Path(name) / "config.json").exists()
    if not has_model and any(Path(name, place, ADAPTER_CONFIG).exists() for place in (".", ADAPTER_FOLDER)):
        remedy = "add them to their base with PEFT's merge_and_unload, or give the merged model (SAVE_MERGED=True)"
        raise WorkshopError(flag, f"{name} has no model, only adapters in PEFT's format", remedy)
    checkpoints = sorted(path.name for path in Path(name).glob("checkpoint-*"))
    if checkpoints and not has_model:
        what = f"{name} has no model, only checkpoints ({', '.join(checkpoints)})"
        raise WorkshopError(flag, what, f"complete its run with --resume_from_checkpoint {name}")
    return os.path.isdir(name)


def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Raise WorkshopError (exit code 2) if the model has too few tokens or positions for the data.

    Without this check the first step fails with an IndexError, or on a GPU with a device-side assertion.
    """
    config = model.config.get_text_config()
    if len(tokenizer) > config.vocab_size:
        what = f"its tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}"
        raise WorkshopError("--model_name", what, "use a matching pair, or raise --vocab_size of custom-gpt")
    positions = getattr(config, "max_position_embeddings", None)
    if positions and max_length > positions and learns_positions(model, positions):
        what = f"{max_length} is more than the {positions} positions of the model"
        raise WorkshopError("--max_length", what, f"lower it to {positions}, or take a model with more")


def learns_positions(model: PreTrainedModel, positions: int) -> bool:
    """Return whether the model has a table of positions, not a formula for any number of positions (rotary, alibi).

    The tables of OPT and BART have two extra rows, which are not used for the tokens of a text.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    words = model.get_input_embeddings()
    return any(table.num_embeddings in (positions, positions + 2) for table in tables if table is not words)


def load_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Load a causal LM with fp32 weights: pretrained, or random for tiny-bloom, custom-gpt and --from_scratch.

    Create TrainingArguments first: with a ZeRO-3 config, transformers shards the weights while it loads them.
    """
    name = model_args.model_name
    config = load_config(model_args)
    random = has_random_weights(name, model_args.from_scratch)
    model = random_model(config, seed) if random else pretrained_model(name)
    use_attention(model, model_args.attention)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def pretrained_model(name: str) -> PreTrainedModel:
    with loading_errors("--model_name", name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch.float32,  # the default is the dtype of the file, and in fp16 small updates would be lost
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # weights of a wrong shape become random here, and are rejected below by name
            output_loading_info=True,
        )
    model, loading = loaded
    # Weights of a further layer are an error. transformers lists others in the log, such as those of a second head
    known = {re.sub(r"\d+", "", weight) for weight in model.state_dict()}
    surplus = {weight for weight in loading["unexpected_keys"] if re.sub(r"\d+", "", weight) in known}
    unlike = loading["missing_keys"] | {weight for weight, _, _ in loading["mismatched_keys"]} | surplus
    if unlike:
        what = f"the weights of {name} and its config.json differ in {min(unlike)}"
        raise WorkshopError("--model_name", what, "use config.json and weights of one model, saved as a causal LM")
    return model


def check_merged(name: str) -> None:
    """Raise WorkshopError (exit code 2) for a checkpoint of a run with LoRA: transformers would load only its base."""
    for path in Path(name).glob("*.safetensors"):  # none for a name on the Hub
        with loading_errors("--model_name", str(path)), safe_open(path, "pt") as file:
            weights = file.keys()
        if any(weight.endswith(ADAPTERS) for weight in weights):
            what = f"{name} is a checkpoint of a training run with LoRA, whose weights do not contain the adapters"
            remedy = "give the output folder of a completed run, or complete this one with --resume_from_checkpoint"
            raise WorkshopError("--model_name", what, remedy)


class DrawOnCPU(TorchDispatchMode):
    """Draw random numbers for tensors on a GPU on the CPU, where a seed gives the numbers of the other strategies.

    ZeRO-3 creates weights on the GPU.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWING and args[0].device.type != "cpu":
            on_cpu = torch.empty(args[0].shape, dtype=args[0].dtype)
            return args[0].copy_(func(on_cpu, *args[1:], **kwargs))
        return func(*args, **kwargs)


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model whose random weights depend only on the seed: not on the rank or the sharding strategy."""
    set_seed(seed)
    if is_deepspeed_zero3_enabled():
        with DrawOnCPU():
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    # ZeRO-3 draws no random numbers while it builds the modules. The other strategies must not draw any either,
    # otherwise their losses could not be compared with those of ZeRO-3
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.initialize_weights()
    model.tie_weights()
    return model


def build_meta_model(model_args: ModelArguments) -> PreTrainedModel:
    """Return the model on PyTorch's meta device, for checks: it has shapes, but no memory for its weights."""
    config = load_config(model_args)
    # from_config is not used here, because it would shard the model under ZeRO-3
    with torch.device("meta"), loading_errors("--model_name", model_args.model_name):
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = model_class(config)
    model.tie_weights()
    use_attention(model, model_args.attention)  # ends the run if the model does not support this attention
    return model


def load_config(model_args: ModelArguments) -> PreTrainedConfig:
    """Return the model's configuration. Raise WorkshopError for a model that cannot be used, before it is loaded."""
    name = model_args.model_name
    if name == CUSTOM_GPT:
        return CustomGPTConfig(**{size: getattr(model_args, size) for size in CUSTOM_SIZES})
    if name in BLOOM_SIZES:
        hidden_size, layers, heads = BLOOM_SIZES[name]
        return BloomConfig(
            vocab_size=TINY_VOCABULARY if name == TINY_BLOOM else BLOOM_VOCABULARY,
            hidden_size=hidden_size,
            n_layer=layers,
            n_head=heads,
            use_cache=False,
        )
    if not is_folder("--model_name", name):
        offline_without_network()
    check_merged(name)
    with loading_errors("--model_name", name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        what = f"{name} has quantised weights (quantization_config in its config.json), which cannot be trained"
        raise WorkshopError("--model_name", what, "use the model that they were made from")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or is_encoder(config):
        what = f"{name} is a {config.model_type} model, not a causal LM"
        raise WorkshopError("--model_name", what, "use a model that generates text")
    return config


def is_encoder(config: PreTrainedConfig) -> bool:
    """Return whether each token of the model can see later tokens, as in BERT.

    transformers loads such a model as a causal LM without an error.
    """
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    return masked and not getattr(config, "is_decoder", False)


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters. Tied parameters count once."""
    return sum(elements(parameter) for parameter in model.parameters())


def elements(parameter: torch.Tensor) -> int:
    """Return the number of elements of the whole parameter, even if ZeRO-3 keeps only a shard of it on this rank."""
    return getattr(parameter, "ds_numel", parameter.numel())


def save_model(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, output_dir: str, model_args: ModelArguments
) -> None:
    """Gather the trained weights from all ranks, and save them and the tokenizer for from_pretrained.

    LoRA's adapters are saved for PEFT if their base is a model that others can load. They are also added to the
    weights, unless --save_merged is False.
    """
    writes = trainer.is_world_process_zero()
    if trainer.is_fsdp_enabled:
        # With sharded checkpoints, the Trainer would write no weights here
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    if model_args.lora_rank:
        model: Any = trainer.model
        weights = trainer.accelerator.get_state_dict(trainer.deepspeed or model)
        if writes and has_random_weights(model_args.model_name, model_args.from_scratch):
            print("no adapters are saved, because their base started with random weights", flush=True)
        elif writes:
            folder = Path(output_dir, ADAPTER_FOLDER)
            save_adapters(weights, folder, base=model_args.model_name)
            share_weights(folder, ADAPTER_CONFIG)
            tokenizer.save_pretrained(folder)
        if writes and model_args.save_merged:
            merged_model(model, weights).save_pretrained(output_dir)
    else:
        trainer.save_model(output_dir)
    if writes and model_args.save_merged:
        share_weights(output_dir)
        tokenizer.save_pretrained(output_dir)
        print(f"Model saved to {output_dir}", flush=True)


def share_weights(folder: str | Path, config: str = "config.json") -> None:
    """Give the weights that were saved in a folder the mode of its config file, which follows the umask.

    safetensors 0.8 lets only the owner read its files, whatever the umask is.
    """
    with contextlib.suppress(OSError):  # some file systems have no modes
        for path in Path(folder).glob("*.safetensors"):
            path.chmod(Path(folder, config).stat().st_mode)
