"""Check the defaults of config.py that pages show. tables.py checks the table of docs/knobs.md.

Add a line to SHOWN for a page that shows a default, with the variable (or flag) in place of the value.
"""

import re
from collections.abc import Iterator

from config import HUB_SIZES, KNOBS, OTHER_DEFAULTS
from helpers import REPOSITORY

SHOWN = {
    "README.md": ["then it is {MODEL_NAME}."],
    "docs/baseline.md": [
        "is padded to {MAX_LENGTH} tokens",
        "Put the next {BATCH_SIZE} questions into a batch",
        "After {GRAD_ACC} batches (*accumulation*)",
        "Every {logging_steps} steps: print the loss",
        "| `eval_strategy` | `{eval_strategy}` |",
        "| `save_strategy` | `{SAVE_STRATEGY}` |",
        "`..._eval_...` | {BATCH_SIZE} |",
        "| `gradient_accumulation_steps` | {GRAD_ACC} |",
        "| `num_train_epochs` | {NUM_EPOCHS} |",
        "| `learning_rate` | {LEARNING_RATE} |",
        "| `weight_decay` | {WEIGHT_DECAY} |",
        "`learning_rate` x {WEIGHT_DECAY} of itself",
        "micro batch {BATCH_SIZE}, accumulation {GRAD_ACC}. So {TRAIN_SIZE} questions are",
        "remembers the {TRAIN_SIZE} questions",
    ],
    "docs/cluster.md": ["`HANG_TIMEOUT` seconds ({HANG_TIMEOUT})"],
    "docs/ddp.md": [
        "With {TRAIN_SIZE} questions the last step",
        "the default is `{ddp_find_unused_parameters}`",
    ],
    "docs/efficiency.md": ["question is padded to {MAX_LENGTH} tokens"],
    "docs/environment.md": ['knob("MAX_LENGTH", {MAX_LENGTH}, ...)'],
    "docs/instructor/README.md": ["{MODEL_NAME} with {TRAIN_SIZE} questions"],
    "docs/knobs.md": [
        "LOSS={LOSS} MAX_LENGTH={MAX_LENGTH} ...",
        "--save_total_limit {save_total_limit}`, `--logging_steps {logging_steps}`",
    ],
    "docs/memory.md": ["fp16, micro batch {BATCH_SIZE} x {MAX_LENGTH} tokens"],
    "docs/multi-node.md": ["`HANG_TIMEOUT` seconds ({HANG_TIMEOUT})"],
    "docs/instructor/answers.md": ["bloom-560m on {TRAIN_SIZE} questions"],
    "docs/offload.md": [
        "a training run of {NUM_EPOCHS} epochs",
        *(f"bloom-560m, {{TRAIN_SIZE}} | {stage} + offload" for stage in (1, 2, 3)),
    ],
    "docs/reliability.md": ["by default an [{SAVE_STRATEGY}]"],
    "docs/zero.md": ["Model and data: {MODEL_NAME}, {TRAIN_SIZE} questions"],
    "experiments/baseline/baseline.slurm": ["on {TRAIN_SIZE} SQuAD questions"],
    "experiments/efficiency/recipe/efficiency_recipe.slurm": ["padded to {MAX_LENGTH} tokens"],
}
DEFAULTS = {knob.variable: knob.default for knob in KNOBS} | OTHER_DEFAULTS
DEFAULTS |= {"TRAIN_SIZE": HUB_SIZES["train"], "EVAL_SIZE": HUB_SIZES["eval"]}


def findings() -> Iterator[str]:
    for page, phrases in SHOWN.items():
        text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
        for phrase in phrases:
            words = re.split(r"\{(\w+)\}", phrase)  # every second element is a variable
            found = re.search(r"(\S+?)".join(map(re.escape, words[::2])), text)
            if not found:
                yield f"{page}: has no phrase like {phrase}, tests/text_checks/defaults.py expects it; correct either"
                continue
            for variable, shown in zip(words[1::2], found.groups(), strict=True):
                if not is_shown(DEFAULTS[variable], shown):
                    yield f"{page}: says {found[0]}, config.py says {variable}={DEFAULTS[variable]}"


def is_shown(default: object, shown: str) -> bool:
    """Return True if the text is this default or its short form, such as bloom-560m or 5e-5."""
    return shown in (str(default), str(default).rpartition("/")[2], str(default).replace("e-0", "e-"))
