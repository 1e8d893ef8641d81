#!/usr/bin/env bash
# Start a PARL cluster on this machine, see --help: bash scripts/start_cluster.sh [--cpu_num N] [--port PORT] [--host ADDRESS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python=$(find_python)
exec "$python" "$root/scripts/cluster.py" start "$@"
