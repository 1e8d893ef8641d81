#!/usr/bin/env bash
# End the PARL cluster that start_cluster.sh or join_cluster.sh made here, see --help: bash scripts/stop_cluster.sh [--port PORT]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python=$(find_python)
exec "$python" "$root/scripts/cluster.py" stop "$@"
