#!/usr/bin/env bash
# A run that is started again when a process fails, from its last checkpoint, up to RESTARTS times.
# For several machines give RDZV=host:port of one of them and start it on each.
#
# Compression keeps no state of its own in tensor parallelism, and figures go on in the same
# metrics.jsonl after a line {"event": "resume"}.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

SCRIPT=${SCRIPT:-${MEGATRON:?the folder of your Megatron-LM checkout, or give SCRIPT}/pretrain_gpt.py}
FLAGS=${FLAGS:-$here/flags/gpt-350m.txt}
CONFIG=${CONFIG:-$here/taco.yaml}
PROCS=${PROCS:-gpu}
TACO=${TACO:-}
NODES=${NODES:-1}
RESTARTS=${RESTARTS:-3}
RDZV=${RDZV:-localhost:0}                 # port 0: any, on one machine
SAVE=${SAVE:?the folder of the checkpoints, on storage that all machines share}

export CUDA_DEVICE_MAX_CONNECTIONS=1
# A store of its own for each attempt. In the one that torchrun's agents share by default the second
# attempt of a gloo group never got past init_process_group (torch 2.11, with and without us).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# shellcheck disable=SC2046,SC2086
exec torchrun --nnodes "$NODES" --nproc-per-node "$PROCS" --max-restarts "$RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV" --rdzv-id "$(basename "$SAVE")" \
    -m megatron_taco.launch --compression "$CONFIG" $TACO "$SCRIPT" $(cat "$FLAGS") \
    --save "$SAVE" --load "$SAVE" --save-interval "${SAVE_INTERVAL:-100}" "$@"
