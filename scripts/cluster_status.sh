#!/usr/bin/env bash
# Show the CPUs and processes of the PARL cluster, see --help: bash scripts/cluster_status.sh [--master_address HOST:PORT]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python=$(find_python)
exec "$python" "$root/scripts/cluster.py" status "$@"
