# shellcheck shell=bash
# Knobs of this training; docs/knobs.md lists all. A value given at submission has priority, then the site's value, then
# the value here. (The site laptop sets no model, data, sizes, learning rate or padding for a copy in experiments/own.)

# Change these two to names on the Hub or to absolute paths (relative ones would be relative to this folder)
: "${MODEL_NAME:=bigscience/bloom-560m}"
: "${DATASET:=squad}" # a CSV, TSV, JSON or SQuAD file; data/README.md shows the formats
# For a table with other names of columns than usual, and for rows that cannot be used:
# : "${TABLE_COLUMNS:=passage,query,reply}" "${BAD_ROWS:=skip}"
# All questions of a file are used. Of a dataset on the Hub, 500 and 100 are used, unless you set:
# : "${TRAIN_SIZE:=all}" "${EVAL_SIZE:=all}"

# Then try other values of these, the learning rate first
: "${LEARNING_RATE:=5e-5}"
: "${NUM_EPOCHS:=3}"
: "${BATCH_SIZE:=4}"   # the micro batch; lower it first if memory runs out
: "${GRAD_ACC:=1}"     # the global batch is BATCH_SIZE x GRAD_ACC x GPUs: 16 on 4 GPUs, as in a trial on one
: "${MAX_LENGTH:=512}" # tokens; longer passages are cut, and the log counts them
: "${SHOW:=5}"         # print five questions with the model's answers; they appear in the log

# Keep these: they make the training faster, and the model learns only the answers
: "${BF16:=True}" # delete this line on a V100 or T4, which have no bf16
: "${PADDING:=longest}"
: "${LOSS:=chunked}"
: "${LABELS:=answer}"
: "${SAVE_STRATEGY:=epoch}"
