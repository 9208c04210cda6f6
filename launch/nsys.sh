#!/usr/bin/env bash
# Profiles a run of this machine with NVIDIA Nsight Systems: CUDA, cuBLAS, NCCL and the program's own ranges (NVTX).
#
#   launch/nsys.sh CONFIG [section.key=value ...]         e.g. launch/nsys.sh configs/quickstart.yaml train.steps=3
#
#   OUTPUT  where the profile goes (default: ./profile-<time>.nsys-rep); NPROC and the rest as in launch/torchrun.sh
#
# A few steps are enough, and a profile of many is slow to open. Take train.steps small and a run.folder of its own.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command -v nsys >/dev/null || { echo "nsys.sh: nsys is not installed here (it comes with the CUDA toolkit)" >&2; exit 2; }

exec nsys profile --trace=cuda,nvtx,cublas,osrt --sample=none --cpuctxsw=none --trace-fork-before-exec=true \
    --output="${OUTPUT:-profile-$(date +%Y%m%d-%H%M%S)}" \
    "$root/launch/torchrun.sh" "$@" observe.nvtx=true
