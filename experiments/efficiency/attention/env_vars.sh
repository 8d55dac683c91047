# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
: "${ATTENTION:=sdpa}"
: "${PADDING:=longest}"
: "${EM_F1:=False}"
: "${FP16:=False}"
: "${SAVE_STRATEGY:=no}" # measure the training, not the file system
