#!/usr/bin/env bash
# Add this machine's CPUs to the cluster of another, see --help: bash scripts/join_cluster.sh ADDRESS[:PORT] [--cpu_num N]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python=$(find_python)
exec "$python" "$root/scripts/cluster.py" join "$@"
