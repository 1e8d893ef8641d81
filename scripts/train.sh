#!/usr/bin/env bash
# Set up if need be, then train: bash scripts/train.sh [options of train.py]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bash "$root/scripts/setup.sh"
# Paddle's GPU build finds CUDA here only, see requirements-gpu.txt.
for folder in "$venv"/lib/python3*/site-packages/nvidia/*/lib; do
    [ -d "$folder" ] && export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
done
cd "$root"
exec "$venv/bin/python" train.py "$@"
