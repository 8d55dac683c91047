"""Models and tokenizers: `load_tokenizer`, `load_model`, `build_meta_model`, `save_model`."""

import os
import pickle
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
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

from config import CUSTOM_GPT, CUSTOM_SIZES, TINY_BLOOM, DataArguments, ModelArguments, has_random_weights
from custom_model import CustomGPTConfig
from data_loader import is_local, read_part, read_questions
from shared.errors import WorkshopError
from shared.hub import loading_error, offline_without_network
from training.bloom_sdpa import use_attention

# hidden size, layers and heads (arXiv:2211.05100, table 3): --from_scratch then needs no download
BLOOM_SIZES = {
    TINY_BLOOM: (64, 2, 4),
    "bigscience/bloom-560m": (1024, 24, 16),
    "bigscience/bloom-1b1": (1536, 24, 16),
    "bigscience/bloom-1b7": (2048, 24, 16),
    "bigscience/bloom-3b": (2560, 30, 32),
    "bigscience/bloom-7b1": (4096, 30, 32),
}
BLOOM_VOCABULARY = 250880  # 250,680 tokens, and padding, by which its authors' GPUs could divide it
TINY_VOCABULARY = 2048
# BLOOM's ids 0 to 3
SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def load_tokenizer(model_args: ModelArguments, data_args: DataArguments) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding on the right, with a pad token in any case.

    tiny-bloom has none to download: its own is trained on the whole training file. The same is done for
    --from_scratch when the named model's tokenizer is not at hand.
    """
    name = model_args.tokenizer_name or model_args.model_name
    flag = "--tokenizer_name" if model_args.tokenizer_name else "--model_name"
    if name in (TINY_BLOOM, CUSTOM_GPT):
        return train_tokenizer(data_args, TINY_VOCABULARY if name == TINY_BLOOM else model_args.vocab_size)
    if not is_folder(flag, name):
        offline_without_network()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if model_args.from_scratch and name in BLOOM_SIZES:
            print(f"no tokenizer of {name} here: training one of {TINY_VOCABULARY} tokens on {data_args.dataset}")
            return train_tokenizer(data_args, TINY_VOCABULARY)
        raise loading_error(flag, name, error) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # what transformers makes of GPT-2's tokenizer when its file is absent: every text has no tokens
        raise WorkshopError(flag, f"{name} holds no tokenizer", "save one beside the model, or give --tokenizer_name")
    if tokenizer.eos_token_id is None:
        what = f"the tokenizer of {name} has no eos_token, by which the model learns to end an answer"
        raise WorkshopError(flag, what, "name one in its tokenizer_config.json")
    if tokenizer.pad_token is None:
        # Padding is masked by position, not by id, so the EOS that ends an answer still counts.
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def train_tokenizer(data_args: DataArguments, vocabulary: int) -> PreTrainedTokenizerBase:
    """Byte-level BPE with BLOOM's special ids, from all texts of the training file: the same on every rank."""
    dataset = data_args.dataset
    questions = read_questions(dataset) if is_local(dataset) else read_part("train", data_args)
    texts = dict.fromkeys(text for row in questions for text in (row["context"], row["question"]))
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
    """Whether a model or tokenizer is a folder here. Raises WorkshopError (exit code 2) for a path without one."""
    if not os.path.isdir(name) and name.startswith((".", "/", "~")):
        raise WorkshopError(flag, f"there is no folder {name}", "give the folder of a saved model, or a Hub name")
    return os.path.isdir(name)


def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Raises WorkshopError (exit code 2) for a model with fewer tokens or positions than it will be given.

    In its first step the run would end with an IndexError, on a GPU with an assertion of the device.
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
    """Whether it has a table of its positions, and not a formula for any number of them (rotary, alibi).

    OPT and BART have two rows more, which they do not use for the tokens of a text.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    words = model.get_input_embeddings()
    return any(table.num_embeddings in (positions, positions + 2) for table in tables if table is not words)


def load_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A causal LM with fp32 weights: pretrained, or random for tiny-bloom and --from_scratch.

    With a ZeRO-3 config transformers shards the weights while it loads them, so this must come after
    TrainingArguments has been created.
    """
    name = model_args.model_name
    if has_random_weights(name, model_args.from_scratch):
        model = random_model(load_config(model_args), seed)
    else:
        model = pretrained_model(name)
    use_attention(model, model_args.attention)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def pretrained_model(name: str) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch.float32,  # the default is the checkpoint's own, and in fp16 small updates would be lost
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # such weights become random here, and are refused below by their name
            output_loading_info=True,
        )
    except pickle.UnpicklingError as error:
        what = f"a file of {name} holds other things than tensors, which are never loaded"
        raise WorkshopError("--model_name", what, "take a model saved as safetensors") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise loading_error("--model_name", name, error) from error
    model, loading = loaded
    unlike = loading["missing_keys"] | {weight for weight, _, _ in loading["mismatched_keys"]}
    if unlike:
        what = f"{name} has no {min(unlike)} of the shape that its config.json asks for"
        raise WorkshopError("--model_name", what, "take config.json and weights of one model, saved as a causal LM")
    return model


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """The same weights for a seed on every rank and under every sharding strategy."""
    set_seed(seed)
    if is_deepspeed_zero3_enabled():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    # ZeRO-3 draws no random numbers while it builds the modules: neither may the others, or the losses of
    # two stages could not be compared
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.initialize_weights()
    model.tie_weights()
    return model


def build_meta_model(model_args: ModelArguments) -> PreTrainedModel:
    """The model on PyTorch's meta device, with shapes and without memory for its weights: to look at its modules."""
    config = load_config(model_args)
    # not by from_config, which would shard it under ZeRO-3
    with torch.device("meta"):
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = model_class(config)
    model.tie_weights()
    use_attention(model, model_args.attention)  # or say that it has no such one
    return model


def load_config(model_args: ModelArguments) -> PreTrainedConfig:
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
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise loading_error("--model_name", name, error) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or is_encoder(config):
        what = f"{name} is a {config.model_type} model, not a causal LM"
        raise WorkshopError("--model_name", what, "take one that generates text")
    return config


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether its tokens see those behind them, as in BERT, which transformers loads as a causal LM all the same."""
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    return masked and not getattr(config, "is_decoder", False)


def count_parameters(model: torch.nn.Module) -> int:
    """All parameters, tied ones once."""
    return sum(elements(parameter) for parameter in model.parameters())


def elements(parameter: torch.Tensor) -> int:
    """Of the whole parameter, also while ZeRO-3 holds only this rank's share of it."""
    return getattr(parameter, "ds_numel", parameter.numel())


def save_model(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, output_dir: str) -> None:
    """Write the trained weights (gathered from all ranks) and the tokenizer, loadable by from_pretrained."""
    if trainer.is_fsdp_enabled:
        # with sharded checkpoints the Trainer would write no weights here
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(output_dir)
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(output_dir)
        print(f"Model saved to {output_dir}", flush=True)
