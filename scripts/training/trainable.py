"""Whether a training can be done as it is asked for: found before the model is loaded and anything is written."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from evaluate import load_metric
from model import check_model
from parallel.fsdp_config import check_wrap_classes
from parallel.tensor_parallel import check_can_be_cut
from shared.errors import WorkshopError
from shared.options import Options
from training.chunked_loss import check_head
from training.compiling import check_torch_compile


def check_trainable(
    options: Options, args: TrainingArguments, meta_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises WorkshopError (exit code 2) for a model that cannot be trained as the options say.

    meta_model: the model without memory for its weights.
    """
    values = options.values
    check_model(meta_model, tokenizer, values["max_length"])
    if values["loss"] == "chunked":
        check_head(meta_model)
    if values["activation_checkpointing"] and not meta_model.supports_gradient_checkpointing:
        what = f"{type(meta_model).__name__} cannot compute its blocks again"
        raise WorkshopError("--activation_checkpointing", what, "leave it out, or use FSDP's, in its config file")
    if options.fsdp_config is not None:
        check_wrap_classes(options.fsdp_config, values["fsdp_config"], meta_model)
    if values["tensor_parallel"] > 1:
        check_can_be_cut(meta_model, values["tensor_parallel"])
    if values["em_f1"]:
        load_metric()  # if it is missing, the run ends now and not after the training
    if args.torch_compile:
        check_torch_compile(args)
