# shellcheck shell=bash
# Knobs of this experiment. A value that you give at submission wins, then the site's value, then the value here.
: "${TRAIN_SIZE:=128}"
: "${EVAL_SIZE:=32}"
: "${LABELS:=sequence}"
: "${EM_F1:=False}"
: "${NUM_EPOCHS:=3}"
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=2}" # the global batch is 16
: "${FP16:=False}" # fp32: the losses agree in all digits that are shown
: "${BF16:=False}"
: "${SAVE_STRATEGY:=no}"
