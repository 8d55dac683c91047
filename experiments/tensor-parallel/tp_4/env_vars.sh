# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
export MODEL_NAME=custom-gpt # fixed: BLOOM has no plan for tensor parallelism
export TENSOR_PARALLEL=4     # fixed: the experiment is about this number of ranks
: "${VOCAB_SIZE:=${SITE_VOCAB_SIZE:-50000}}"
: "${HIDDEN_SIZE:=${SITE_HIDDEN_SIZE:-2048}}"
: "${NUM_LAYERS:=3}"
: "${NUM_HEADS:=${SITE_NUM_HEADS:-16}}"
: "${FF_DIM:=${SITE_FF_DIM:-8192}}"
: "${SEQ_LENGTH:=512}"
: "${TRAIN_SIZE:=500}"
: "${EVAL_SIZE:=100}"
: "${LABELS:=answer}" # only answer and EOS count in the loss
: "${EM_F1:=False}"
: "${NUM_EPOCHS:=5}"
: "${BATCH_SIZE:=1}"
: "${GRAD_ACC:=4}"       # the global batch is 4 in the whole family: 1 x 4, because all GPUs compute the same questions
: "${SAVE_STRATEGY:=no}" # transformers requires this for tensor parallelism; the weights are saved at the end
