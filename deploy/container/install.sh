#!/bin/sh
# The steps of the Containerfile; they also run in a plain directory.
#   install.sh system               what the operating system has to bring (Debian, Ubuntu; as root)
#   install.sh python PREFIX SOURCE a virtual environment with pilotfish, from a checkout or a wheel
set -eu

case "${1:-}" in
system)
    # Triton compiles a launcher for each kernel at run time: a C compiler and Python's headers
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv
    rm -rf /var/lib/apt/lists/*
    ;;
python)
    prefix=${2:?want PREFIX} source=${3:?want SOURCE}
    python3 -m venv "$prefix"
    # what was locked, file by file, and then the source alone; a wheel brings no lock
    lock=$source/deploy/container/requirements.lock
    if [ -f "$lock" ]; then
        "$prefix/bin/pip" install --no-cache-dir --disable-pip-version-check --require-hashes --requirement "$lock"
        "$prefix/bin/pip" install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation "$source"
    else
        "$prefix/bin/pip" install --no-cache-dir --disable-pip-version-check "$source[gpu]"
    fi
    "$prefix/bin/pilotfish" --version
    ;;
*)
    echo "usage: $0 system | python PREFIX SOURCE" >&2
    exit 2
    ;;
esac
