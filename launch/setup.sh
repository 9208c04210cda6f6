#!/usr/bin/env bash
# Makes the virtual environment .venv with everything that the program needs, and builds the extension.
#
#   launch/setup.sh [extra ...]      extras of setup.py beside the ones for this machine: dev, mpi
#
# Installs for NVIDIA GPUs where nvidia-smi lists one, else for CPU. A second start installs nothing unless setup.py,
# csrc/ or the set-up itself changed. PYTHON names the interpreter to use (3.11 or newer); pip's own settings
# (PIP_INDEX_URL, pip.conf, ...) say where packages come from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "setup: $*" >&2; exit 1; }
say() { echo "setup: $*"; }

venv=.venv
stamp=$venv/spmd_rl.stamp           # digest of what was installed, and the extras; written last
log=$venv/setup.log
unfinished=$venv/spmd_rl.unfinished # there while this script installs: what an aborted run leaves is made anew

# One set-up at a time; the second then finds the work done.
exec 9<setup.py
flock -w 1200 9 || fail "another set-up has been running for 20 minutes; end it and start again"

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi
extras=(quickstart)
if [ "$gpus" -gt 0 ]; then extras+=(gpu); else extras+=(cpu); fi
# What an earlier set-up brought stays: `setup.sh` after `setup.sh dev` has nothing to do.
if [ -f "$stamp" ]; then read -r -a earlier < <(sed -n 2p "$stamp"); else earlier=(); fi
mapfile -t extras < <(printf '%s\n' "${extras[@]}" "${earlier[@]}" "$@" | grep -v '^$' | LC_ALL=C sort -u)

digest() { # of all that decides what is installed and built
    {
        printf '%s\n' "${extras[@]}"
        sha256sum launch/setup.sh launch/requirements.py
        find setup.py csrc -type f \( -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' -o -name '*.py' \) -print0 |
            LC_ALL=C sort -z | xargs -0 -r sha256sum
    } | sha256sum | cut -d' ' -f1
}
wanted=$(digest)
if [ -f "$stamp" ] && [ ! -e "$unfinished" ] && [ "$(head -n 1 "$stamp")" = "$wanted" ] &&
    $venv/bin/python -c 'import spmd_rl, torch' >/dev/null 2>&1; then
    say "$venv is up to date (${extras[*]})"
    exit 0
fi

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 to 3.14 (vLLM does); found ${PYTHON:-$(python3 -V 2>&1 || echo none)}; set PYTHON to one"
}

command -v "${CXX:-g++}" >/dev/null 2>&1 ||
    fail "needs a C++ compiler for the extension; on Debian: apt-get install g++ (or set CXX)"

if [ -e "$unfinished" ]; then
    say "the last set-up did not finish: $venv is made anew"
    rm -rf "$venv"
fi
if [ ! -x $venv/bin/python ] || ! $venv/bin/python -c 'import sys' >/dev/null 2>&1; then
    python=$(find_python) || exit 1
    need_gib=$([ "$gpus" -gt 0 ] && echo 20 || echo 6)
    free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge $((need_gib * 1024 * 1024)) ] ||
        fail "needs $need_gib GiB of free disk here, $((free_kib / 1024 / 1024)) GiB are free"
    say "making $venv with $("$python" -V), for $([ "$gpus" -gt 0 ] && echo "$gpus GPU(s)" || echo CPU) (${extras[*]})"
    rm -rf "$venv"
    mkdir "$venv"
    touch "$unfinished"
    "$python" -m venv "$venv" >"$venv/venv.log" 2>&1 ||
        { cat "$venv/venv.log" >&2; fail "$python cannot make virtual environments; on Debian: apt-get install python3-venv"; }
fi
touch "$unfinished"
rm -f "$stamp"

list=$(mktemp -d)
trap 'rm -rf "$list"' EXIT
pip_install() { # what for people, arguments of pip
    local what=$1 begin=$SECONDS
    shift
    say "installing $what"
    # Into a file: pip complains at length about the dependencies that are left out on purpose. Without compiling:
    # modules are compiled when they are first imported, and of most packages few are.
    $venv/bin/python -m pip install --no-compile --no-input --disable-pip-version-check --progress-bar off "$@" \
        >>"$log" 2>&1 ||
        { tail -n 15 "$log" >&2; fail "installing $what failed (pip's last lines are above, all of them in $log)"; }
    say "installed $what in $((SECONDS - begin)) s"
}
requirements() { $venv/bin/python launch/requirements.py "$1" "${extras[@]}" >"$list/$1" || exit 1; }

requirements first
pip_install torch -r "$list/first"
grep '^torch' "$list/first" >"$list/constraint"
if [ "$gpus" -gt 0 ] && ! $venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    fail "a GPU is here, but pip chose a CPU build of torch; point pip at an index with CUDA builds and remove $venv"
fi
requirements alone
if grep -q . "$list/alone"; then pip_install "$(paste -sd ' ' "$list/alone")" --no-deps -r "$list/alone"; fi
requirements rest
pip_install "all other packages" -r "$list/rest" -c "$list/constraint"
pip_install "spmd_rl and its extension" --no-deps --no-build-isolation --editable .
$venv/bin/python -c 'import spmd_rl, torch' || fail "the installed packages do not load (message above)"

printf '%s\n%s\n' "$wanted" "${extras[*]}" >"$stamp"
rm -f "$unfinished"
say "$venv is ready"
