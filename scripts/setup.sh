#!/usr/bin/env bash
# Makes .venv and installs Renma into it. Usage: scripts/setup.sh [EXTRA ...], extras of pyproject.toml (gemma, dev).
# What is already there is not done again: each extra leaves a stamp with the hash of what it was installed from.
# Set PYTHON=/path/to/python to choose the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0
VENV=.venv
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input)

# System packages: name | test that it is there | why, and what is lost without it
SYSTEM_PACKAGES=(
    "python3-venv|has_ensurepip|makes the virtual environment; without it nothing can be installed"
    "build-essential|command -v cc|compiles pycosat, which reasoning-gym needs; without it the quickstart has no tasks"
    "python3-dev|has_headers|the headers for that; without them the quickstart has no tasks"
)

say() { if [ -t 1 ]; then printf '\033[1m[set-up]\033[0m %s\n' "$*"; else printf '[set-up] %s\n' "$*"; fi; }
fail() { printf '[set-up] %s\n' "$*" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
has_ensurepip() { "$python" -c 'import ensurepip, venv'; }
has_headers() {
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

# Python 3.11 first: it is what the project is measured on, and local torch wheels are most often made for it.
find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$name" >/dev/null && new_enough "$name"; then echo "$name"; return; fi
    done
    return 1
}

apt_install() {
    command -v apt-get >/dev/null || return 1
    local run=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null || return 1
        run=(sudo -n)
    fi
    say "installing with apt: $*"
    { "${run[@]}" apt-get update -qq && "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } >/dev/null
}

system_packages() {
    local entry name check reason
    for entry in "${SYSTEM_PACKAGES[@]}"; do
        IFS='|' read -r name check reason <<<"$entry"
        if $check >/dev/null 2>&1; then continue; fi
        # A Python that is not the system's (3.12 beside Debian's 3.11) has packages of its own name.
        local package=$name
        case $name in python3-*) package="$(basename "$python" | grep -oE 'python3(\.[0-9]+)?' || echo python3)-${name#python3-}" ;; esac
        apt_install "$package" || apt_install "$name" || true
        $check >/dev/null 2>&1 || fail "missing: $package ($reason). Install it, e.g. with 'apt-get install $package', and call this again."
    done
}

install_torch() {
    if "$VENV/bin/python" -c "import importlib.metadata as m; m.version('torch')" 2>/dev/null; then return; fi
    local quiet=(-qq --progress-bar off)
    if nvidia-smi -L >/dev/null 2>&1 || [ "$(uname -s)" = Darwin ]; then
        say "torch $TORCH for this machine's accelerator"
        "${PIP[@]}" install "${quiet[@]}" "torch==$TORCH"
    # A wheel that pip is told of on this disk (PIP_FIND_LINKS or pip's configuration) ...
    elif "${PIP[@]}" install "${quiet[@]}" --no-index --no-deps "torch==$TORCH" 2>/dev/null; then
        say "torch $TORCH from a local wheel"
    # ... else PyTorch's own index of CPU builds (200 MB) ...
    elif say "torch $TORCH, CPU build (about 200 MB)" &&
        "${PIP[@]}" install "${quiet[@]}" --timeout 15 --retries 1 --no-deps \
            --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH+cpu" 2>/dev/null; then
        :
    else # ... else PyPI's wheel, which on Linux is a CUDA build.
        say "no CPU build of torch can be reached: taking PyPI's, a CUDA build of several GB"
        "${PIP[@]}" install "${quiet[@]}" "torch==$TORCH"
    fi
}

python=$(find_python) || { apt_install python3 && python=$(find_python); } ||
    fail "no Python 3.11 or newer: install one (Debian 12: apt-get install python3 python3-venv) or set PYTHON=/path/to/python"

hash=$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
missing=()
for extra in core "$@"; do
    if [ "$(cat "$VENV/.renma/$extra" 2>/dev/null)" != "$hash" ]; then missing+=("$extra"); fi
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

system_packages
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "virtual environment $VENV with $("$python" -V) (2 GB of disk, 2 to 6 minutes the first time)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
fi
install_torch
wanted=$(printf '%s\n' "$@" | sort -u | paste -sd,)
say "renma and what it needs${wanted:+ (with $wanted)}"
"${PIP[@]}" install -qq --progress-bar off -e ".${wanted:+[$wanted]}"
mkdir -p "$VENV/.renma"
for extra in core "$@"; do echo "$hash" >"$VENV/.renma/$extra"; done
say "ready: $VENV/bin/renma --help"
