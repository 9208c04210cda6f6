#!/usr/bin/env bash
# Builds the kernels against the torch of this machine and checks them on its GPU: equal to the references, and the
# fraction of a device-to-device copy that packing and unpacking reach; then the whole program beside itself on the CPU.
# Ends within a few minutes.
#
#   perf/gpu_check.sh [python]          python: an interpreter whose torch has CUDA (default: .venv, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${1:-}
if [ -z "$python" ]; then python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3); fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
    { echo "gpu_check: $python has no torch that sees a GPU" >&2; exit 1; }
"$python" - <<'PYTHON'
import torch
print(f"gpu_check: {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
PYTHON

capability=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
TORCH_CUDA_ARCH_LIST=$capability "$python" setup.py -q build_ext --inplace --build-temp "$build"

"$python" perf/gpu_equal.py
"$python" perf/kernels.py --device cuda --check
"$python" perf/gpu_program.py
