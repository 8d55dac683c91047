# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
: "${LOSS:=chunked}"
: "${ATTENTION:=sdpa}"
: "${PADDING:=none}"
: "${EM_F1:=False}"
: "${BF16:=True}"
: "${SAVE_STRATEGY:=no}" # measure the training, not the file system
