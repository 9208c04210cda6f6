#!/usr/bin/env bash
# Makes .venvs/NAME, where the peer of a comparison lives, with dependencies that may differ from ours.
#
#   perf/peer_env.sh trl     # of the end-to-end, learning and loss comparisons
#   perf/peer_env.sh tq      # TransferQueue, of the exchange and stream comparisons
#
# What both sides compute with (torch, ...) has the versions of .venv. A second start does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:-}
case $name in
    trl) peer=(trl==1.16.0 psutil) shared=(torch transformers numpy reasoning-gym math-verify) ;;
    tq) peer=(TransferQueue==0.1.11) shared=(torch) ;;
    *) echo "peer_env: expected trl or tq, not '$name'" >&2; exit 2 ;;
esac
venv=.venvs/$name
stamp=$venv/spmd_rl.stamp

version_of() { .venv/bin/python -c "import importlib.metadata as m; print('$1==' + m.version('$1').partition('+')[0])"; }
[ -x .venv/bin/python ] || { echo "peer_env: run launch/setup.sh first" >&2; exit 1; }
same=()
for package in "${shared[@]}"; do same+=("$(version_of "$package")"); done
wanted="${peer[*]} ${same[*]}"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "peer_env: $venv is up to date"
    exit 0
fi

echo "peer_env: making $venv ($wanted)"
rm -rf "$venv" # also what an aborted run left
mkdir -p .venvs
.venv/bin/python -m venv "$venv"
pip() {
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@" \
        >>"$venv/setup.log" 2>&1 ||
        { tail -n 15 "$venv/setup.log" >&2; echo "peer_env: pip failed (its last lines are above)" >&2; exit 1; }
}
pip "${same[0]}" # first: else another package pulls in another build of torch
pip "${same[@]}" "${peer[@]}"
echo "$wanted" >"$stamp"
echo "peer_env: $venv is ready"
