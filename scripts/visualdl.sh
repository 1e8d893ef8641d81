#!/usr/bin/env bash
# Show the curves in a browser, on this machine only: bash scripts/visualdl.sh [--logdir DIR] [--port PORT]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

logdir="$root/train_log" port=8040
while [ $# -gt 0 ]; do
    case "$1" in
        --logdir | --port) [ $# -gt 1 ] || die "$1 needs a value" ;;&
        --logdir) logdir=$2 ;;
        --port) port=$2 ;;
        -h | --help) sed -n '2s/^# //p' "$0" && exit 0 ;;
        *) die "there is no option $1; there are --logdir DIR and --port PORT" ;;
    esac
    shift 2
done
[[ "$port" =~ ^[0-9]+$ ]] && [ "$port" -ge 1 ] && [ "$port" -le 65535 ] || die "port is $port; it must be 1 to 65535"
[ -d "$logdir" ] || die "there is no directory $logdir; train first with \`bash scripts/train.sh\`, or name another with --logdir"
[ -x "$venv/bin/visualdl" ] || die "VisualDL is not installed here; run \`bash scripts/setup.sh\`"

while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    echo "port $port is taken, trying the next one"
    port=$((port + 1))
done
echo "VisualDL shows $logdir at http://127.0.0.1:$port/app/scalar (Ctrl-C ends it)"
# --language: its page fails for clients that name none. Telemetry would phone home.
exec "$venv/bin/visualdl" --logdir "$logdir" --host 127.0.0.1 --port "$port" --language en --disable-telemetry
