#!/bin/sh
# Prints the path of a Python >= 3.12 (3.12 first: megatron-core has prebuilt wheels for it), or says what to install.
# Looks at $PYTHON, at the PATH, and at pyenv's versions.
set -u
usable() {
    [ -n "$1" ] && "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}
found() {
    "$1" -c 'import sys; print(sys.executable)'
    exit 0
}
if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && found "$PYTHON"
    echo "PYTHON=$PYTHON is not a Python 3.12, 3.13 or 3.14 with venv" >&2
    exit 1
fi
pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
for version in 3.12 3.13 3.14; do
    for candidate in "python$version" "$pyenv_root"/versions/"$version"*/bin/python "/usr/local/bin/python$version" "/opt/homebrew/bin/python$version"; do
        usable "$candidate" && found "$candidate"
    done
done
usable python3 && found python3
cat >&2 <<'MESSAGE'
No Python 3.12, 3.13 or 3.14 (with venv) was found on the PATH or among pyenv's versions; megatron-core needs 3.12 or newer.
Install one and run make again, for example:
    apt-get install python3.12 python3.12-venv      (Ubuntu 24.04 or newer)
    dnf install python3.12
    pyenv install 3.12
or name one: make PYTHON=/path/to/python3.12 demo
MESSAGE
exit 1
