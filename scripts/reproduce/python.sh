# Sourced by the scripts beside it: sets $python to one that has what they need.
#
# PYTHON=... names one. Otherwise python3 if it has megatron-core, else .venv, which is made by
# `make` where it is missing. On a machine that reaches no package index, WHEELS=FOLDER with the
# missing wheels (megatron-core, pydantic, psutil, rich, pyroute2, matplotlib, ...) adds them to
# PYTHON, which has to have torch, in .site.
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then
    if [ ! -d "$root/.site" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --target "$root/.site.partial" "$WHEELS"/*.whl
        mv "$root/.site.partial" "$root/.site"
    fi
    export PYTHONPATH="$PYTHONPATH:$root/.site"
elif [ -z "${PYTHON:-}" ] && ! "$python" -c 'import megatron.core, pydantic' 2>/dev/null; then
    make --no-print-directory -C "$root" .venv/.installed >&2
    python=$root/.venv/bin/python
fi
