#!/usr/bin/env bash
# Sets up what the tests need and runs them all: formatting and types, units, worlds of several ranks, whole runs.
#
#   launch/test.sh [argument of pytest ...]     e.g. launch/test.sh tests/unit -k loss
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # or every process compiles torch anew: seconds for each rank of each test

launch/setup.sh dev mpi
.venv/bin/python launch/prepare_model.py

export HF_HUB_OFFLINE=1
# Two files at a time: most worlds wait for their processes to start. `-n 0` runs one after the other.
exec .venv/bin/python -m pytest -q -n 2 --dist loadfile "$@"
