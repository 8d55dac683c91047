"""Hints for variables and flags that do not work as people expect, each with what to do instead.

Most of these variables come from the workshop's original documents (docs/original-documents.md).
"""

import difflib
from collections.abc import Mapping

from config import KNOBS

UNREAD_VARIABLES = {
    "PER_DEVICE_BATCH_SIZE": "use BATCH_SIZE",
    "GRAD_ACC_STEPS": "use GRAD_ACC",
    "SAMPLING": "unset it; questions are always shuffled, and PADDING=none leaves out all padding",
    "LR": "use LEARNING_RATE",
    "LOG_DIR": "unset it; logs are in the experiment's folder, below log/",
    "CONDA_SH_PATH": "unset it; site_setup of the site file activates the environment",
    "CONDA_ENV": "unset it; site_setup of the site file activates the environment",
}
# These names cause only a warning, because shells and scripts use them for other purposes, too. job.sh exports every
# variable of a .slurm file
WARNED_VARIABLES = {
    "BATCHSIZE": "the knob is BATCH_SIZE",
    "DEEPSPEED": "the flag is --deepspeed",
    "EPOCHS": "the knob is NUM_EPOCHS",
    "FSDP": "the flag is --fsdp",
    "GRAD_ACCUM": "the knob is GRAD_ACC",
    "MAX_LEN": "the knob is MAX_LENGTH",
    "MAX_STEPS": "the flag is --max_steps",
    "MODEL": "the knob is MODEL_NAME",
    "RUN_NAME": "the knob is EXPERIMENT_NAME",
    "SEED": "the flag is --seed",
}
# The upper-case name of a knob's flag, if its variable has another name: NUM_TRAIN_EPOCHS for NUM_EPOCHS
UNREAD_VARIABLES |= {
    knob.flag.upper(): f"use {knob.variable}"
    for knob in KNOBS
    if knob.flag.upper() not in (knob.variable, *WARNED_VARIABLES)
}
# ps shows a flag to everybody on the node, and the run record keeps it
SECRET = "set the variable HF_TOKEN, or log in with hf auth login; others can read a secret in a flag"
# Flags of transformers 4 that version 5 removed, and of other training programs and launchers, with their replacements
FLAGS_OF_OTHER_PROGRAMS = {
    "adafactor": "use --optim adafactor",
    "evaluation_strategy": "use --eval_strategy",
    "fsdp_min_num_params": 'set "min_num_params" in the --fsdp_config file',
    "fsdp_transformer_layer_cls_to_wrap": 'set "transformer_layer_cls_to_wrap" in the --fsdp_config file',
    "group_by_length": "use --padding none --attention sdpa, which leaves out all padding",
    "half_precision_backend": "leave it out, there is only one backend",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "no_cuda": "use --use_cpu",
    "overwrite_output_dir": "use a new --output_dir, or --resume_from_checkpoint to resume",
    "per_gpu_eval_batch_size": "use --per_device_eval_batch_size",
    "per_gpu_train_batch_size": "use --per_device_train_batch_size",
    "push_to_hub_model_id": "upload the saved folder afterwards",
    "push_to_hub_token": SECRET,
    "save_safetensors": "leave it out, safetensors is the only format",
    "use_mps_device": "leave it out, the device is found automatically",
    "warmup_ratio": "use --warmup_steps with a fraction below 1",
    # Of other programs
    "epochs": "use --num_train_epochs",
    "lr": "use --learning_rate",
    "max_seq_length": "use --max_length",
    "mixed_precision": "use --fp16, --bf16, or --fp16 False for fp32",
    "model": "use --model_name",
    "nproc_per_node": "torchrun's flags come before the script: torchrun --nproc_per_node=2 scripts/train.py",
    "num_gpus": "start one process per GPU: torchrun --nproc_per_node=2 scripts/train.py",
    "precision": "use --fp16, --bf16, or --fp16 False for fp32",
    "resume": "use --resume_from_checkpoint",
}
# Flags of TrainingArguments that the parser accepts but that have no effect in this workshop
UNUSED_FLAGS = {
    "do_eval": "use --eval_strategy",
    "do_predict": "use scripts/evaluate.py",
    "do_train": "leave it out, training is what train.py does",
    "hub_model_id": "upload the saved folder afterwards",
    "hub_token": SECRET,
    "logging_nan_inf_filter": "leave it out; the log shows a loss that is not finite, and three in a row end the run",
    "push_to_hub": "upload the saved folder afterwards",
    "restore_callback_states_from_checkpoint": "leave it out; a resumed run always continues its counts",
}


def warn_of_unread_variables(environment: Mapping[str, str], origins: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each variable that is not read, but whose name is a mistake for a knob.

    origins: variable -> its origin. Other programs may read the variables of the user's shell, so only the variables
    that the site or the experiment sets are compared with the knobs.
    """
    remedies = {name: remedy for name, remedy in WARNED_VARIABLES.items() if environment.get(name)}
    knobs = {knob.variable.replace("_", ""): knob.variable for knob in KNOBS}
    for name in (name for name, origin in origins.items() if origin in ("site", "experiment")):
        # TRAINSIZE and NUM_EPOCH are almost a knob. SITE_LEARNING_RATE, which experiments read, and NUM_THREADS are not
        near = difflib.get_close_matches(name.replace("_", ""), knobs, n=1, cutoff=0.9)
        if near and name not in (*knobs.values(), *WARNED_VARIABLES):
            remedies[name] = f"did you mean {knobs[near[0]]}?"
    return tuple(f"{name}: this variable is not read; {remedy}" for name, remedy in remedies.items())
