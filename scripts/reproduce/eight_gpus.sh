#!/usr/bin/env bash
# Everything that eight GPUs of one host are to show, part by part; a part that is there is not run again.
# See eight_gpus.py; arguments go to it: --list, --parts LIST, --small (CPUs, gloo), --again.
set -euo pipefail
. "$(dirname "$0")/python.sh"
exec "$python" "$root/scripts/reproduce/eight_gpus.py" "$@"
