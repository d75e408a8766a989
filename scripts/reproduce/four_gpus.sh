#!/usr/bin/env bash
# Everything that four GPUs of one host are to show, part by part; a part that is there is not run again.
# See four_gpus.py; arguments go to it: --list, --parts LIST, --small (CPUs, gloo), --again.
set -euo pipefail
. "$(dirname "$0")/python.sh"
exec "$python" "$root/scripts/reproduce/four_gpus.py" "$@"
