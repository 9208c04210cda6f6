#!/usr/bin/env bash
# Sets up what the tests need and runs them all: formatting and types, units, worlds of several ranks, whole runs.
#
#   launch/test.sh [argument of pytest ...]     e.g. launch/test.sh tests/unit -k loss
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh dev mpi
.venv/bin/python launch/prepare_model.py

export HF_HUB_OFFLINE=1
exec .venv/bin/python -m pytest -q "$@"
