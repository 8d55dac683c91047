# shellcheck shell=bash
# Knobs of this experiment. A value that you give at submission wins, then the site's value, then the value here.
: "${EM_F1:=False}"
: "${SAVE_STRATEGY:=no}" # this measures training, not the file system
