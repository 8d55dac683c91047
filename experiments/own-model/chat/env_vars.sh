# shellcheck shell=bash
# Knobs of this training; docs/knobs.md lists all. A value given at submission has priority, then the site's value, then
# the value here. data/README.md shows the formats of conversations.

# Change these two to names on the Hub or to absolute paths (relative ones would be relative to this folder)
: "${MODEL_NAME:=HuggingFaceTB/SmolLM2-135M-Instruct}" # an instruct model brings its chat template
: "${DATASET:=$ROOT/data/conversations.jsonl}"         # 24 conversations about this workshop

# Only the assistant's turns count in the loss, because these rows are conversations (docs/knobs.md, LABELS)
: "${LEARNING_RATE:=1e-4}"
: "${NUM_EPOCHS:=3}"
: "${BATCH_SIZE:=2}"   # the micro batch; lower it first if memory runs out
: "${GRAD_ACC:=2}"     # the global batch is BATCH_SIZE x GRAD_ACC x GPUs
: "${MAX_LENGTH:=512}" # tokens; a longer conversation loses its oldest turns, and the log counts them
: "${SHOW:=3}"         # print three questions with the right and the model's answer; they appear in the log
# LoRA also saves its adapters for PEFT. It needs LEARNING_RATE=1e-3 above:
# : "${LORA_RANK:=8}"

# Keep these: they make the training faster
: "${BF16:=True}" # delete this line on a V100 or T4, which have no bf16
: "${PADDING:=longest}"
: "${LOSS:=chunked}"
: "${SAVE_STRATEGY:=epoch}"
