#!/usr/bin/env bash
# Training throughput in the set-up of the TACO paper. Start it on every node, as torchrun:
#
#   scripts/reproduce/taco_throughput.sh --node-rank 0 --master-addr HOST0     # on HOST0
#   scripts/reproduce/taco_throughput.sh --node-rank 1 --master-addr HOST0     # on the other
#
# NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment do as well. See taco_throughput.py;
# --list, --parts LIST, --small (CPUs, gloo), --again as for the other lists.
set -euo pipefail
. "$(dirname "$0")/python.sh"
# Under `megatron-taco lab run` a host's first rank stands for the host.
export NODE_RANK="${NODE_RANK:-${RANK:-}}"
[ -n "$NODE_RANK" ] || unset NODE_RANK
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
exec "$python" "$root/scripts/reproduce/taco_throughput.py" "$@"
