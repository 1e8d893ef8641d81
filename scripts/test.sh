#!/usr/bin/env bash
# Set up if need be, check the style, then run the tests: bash scripts/test.sh [options of pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bash "$root/scripts/setup.sh"
cd "$root"
style=0
"$venv/bin/ruff" check --quiet . || style=1
"$venv/bin/ruff" format --quiet --check . || style=1
tests=0
"$venv/bin/python" -m pytest "$@" || tests=$?
[ "$style" = 0 ] || echo "error: the style check failed; run \`.venv/bin/ruff check --fix . && .venv/bin/ruff format .\`" >&2
[ "$tests" != 0 ] || tests=$style
exit "$tests"
