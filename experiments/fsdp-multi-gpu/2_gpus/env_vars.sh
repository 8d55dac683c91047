# shellcheck shell=bash
# Knobs of this experiment. A value given at submission comes first, then one of the site file.
: "${NUM_EPOCHS:=5}"
: "${BATCH_SIZE:=1}"
: "${GRAD_ACC:=4}"
: "${TRAIN_SIZE:=500}"
: "${EVAL_SIZE:=100}"
: "${LABELS:=answer}"    # only answer and EOS count in the loss
: "${SAVE_STRATEGY:=no}" # this measures training, not the file system
: "${EM_F1:=False}"
