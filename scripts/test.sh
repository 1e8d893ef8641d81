#!/usr/bin/env bash
# Set up if need be, check the style, then run the tests: bash scripts/test.sh [options of pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bash "$root/scripts/setup.sh"
unset PYTHONPATH PYTHONHOME # another project's packages would shadow those of .venv
cd "$root"
style=0
"$venv/bin/python" -m ruff check --quiet . || style=1
"$venv/bin/python" -m ruff format --quiet --check . || style=1
[ "$style" = 0 ] || echo "error: the style check failed; run \`.venv/bin/python -m ruff check --fix .\` and \`.venv/bin/python -m ruff format .\`"
tests=0
"$venv/bin/python" -m pytest "$@" || tests=$?
[ "$tests" != 0 ] || tests=$style
exit "$tests"
