# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
export MODEL_NAME=custom-gpt # fixed: the experiment is about this model
: "${VOCAB_SIZE:=${SITE_VOCAB_SIZE:-50000}}"
: "${HIDDEN_SIZE:=${SITE_HIDDEN_SIZE:-2048}}"
: "${NUM_LAYERS:=3}"
: "${NUM_HEADS:=${SITE_NUM_HEADS:-16}}"
: "${FF_DIM:=${SITE_FF_DIM:-8192}}"
: "${SEQ_LENGTH:=512}"
: "${TRAIN_SIZE:=500}"
: "${EVAL_SIZE:=100}"
: "${LABELS:=answer}" # only answer and EOS count in the loss
: "${EM_F1:=False}"   # the runs on more GPUs, which the tables compare with this run, do not compute EM and F1 either
: "${NUM_EPOCHS:=5}"
: "${BATCH_SIZE:=1}"
: "${GRAD_ACC:=4}"
: "${SAVE_STRATEGY:=no}" # measure the training, not the file system
