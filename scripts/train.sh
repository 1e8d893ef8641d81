#!/usr/bin/env bash
# Set up if need be, then train: bash scripts/train.sh [options of train.py]
# Paths are relative to the project, whatever the working directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bash "$root/scripts/setup.sh"
unset PYTHONPATH PYTHONHOME # another project's packages would shadow those of .venv
cd "$root"
exec "$venv/bin/python" train.py "$@"
