#!/usr/bin/env bash
# All GPUs of this machine. Further flags for the training script may follow on the command line.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

SCRIPT=${SCRIPT:-${MEGATRON:?the folder of your Megatron-LM checkout, or give SCRIPT}/pretrain_gpt.py}
FLAGS=${FLAGS:-$here/flags/gpt-350m.txt}
CONFIG=${CONFIG:-$here/taco.yaml}
PROCS=${PROCS:-gpu}        # processes: one for each GPU
TACO=${TACO:-}             # more flags of megatron_taco.launch

# Megatron asks for one hardware queue with tensor parallelism before the Blackwell generation.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# Both are lists of words, to be split.
# shellcheck disable=SC2046,SC2086
exec torchrun --standalone --nproc-per-node "$PROCS" \
    -m megatron_taco.launch --compression "$CONFIG" $TACO "$SCRIPT" $(cat "$FLAGS") "$@"
