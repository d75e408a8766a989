#!/usr/bin/env bash
# One of several machines: start it on each of them.
#
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 examples/two_nodes.sh ...     # on 10.0.0.1
#   MASTER_ADDR=10.0.0.1 NODE_RANK=1 examples/two_nodes.sh ...     # on the other
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

SCRIPT=${SCRIPT:-${MEGATRON:?the folder of your Megatron-LM checkout, or give SCRIPT}/pretrain_gpt.py}
FLAGS=${FLAGS:-$here/flags/gpt-350m.txt}
CONFIG=${CONFIG:-$here/taco.yaml}
PROCS=${PROCS:-gpu}                       # processes a machine: one for each GPU
TACO=${TACO:-}                            # more flags of megatron_taco.launch
NODES=${NODES:-2}
NODE_RANK=${NODE_RANK:-${RANK:?the number of this machine, from 0: give NODE_RANK}}
MASTER_PORT=${MASTER_PORT:-29500}
: "${MASTER_ADDR:?the address of machine 0}"

export CUDA_DEVICE_MAX_CONNECTIONS=1
# The interface that leads to the other machines, where there are several (`ip -brief address`):
# export NCCL_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1
# Where InfiniBand is there but not to be used:
# export NCCL_IB_DISABLE=1

# A run folder that all machines share, or a --save that they do, is not needed: rank 0 writes it.
# shellcheck disable=SC2046,SC2086
exec torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$PROCS" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m megatron_taco.launch --compression "$CONFIG" $TACO "$SCRIPT" $(cat "$FLAGS") "$@"
