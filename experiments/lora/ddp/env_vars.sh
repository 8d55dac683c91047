# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
: "${LORA_RANK:=8}"
: "${TRAIN_SIZE:=500}"
: "${EVAL_SIZE:=100}"
: "${LABELS:=answer}" # only answer and EOS count in the loss
: "${EM_F1:=False}"
: "${NUM_EPOCHS:=5}"
: "${BATCH_SIZE:=1}"
: "${GRAD_ACC:=4}"
: "${LEARNING_RATE:=1e-3}" # adapters need a larger learning rate than the 5e-5 of full training
: "${SAVE_STRATEGY:=no}"   # measure the training, not the file system
