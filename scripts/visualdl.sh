#!/usr/bin/env bash
# Show the curves in a browser, on this machine only: bash scripts/visualdl.sh [--logdir DIR] [--port PORT]
# DIR is train_log of the project where none is given; PORT 8040, or the next one that is free.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

logdir="$root/train_log" port=8040
while [ $# -gt 0 ]; do
    case "$1" in
        --logdir | --port) [ $# -gt 1 ] || die "$1 needs a value" ;;&
        --logdir) logdir=$2 ;;
        --port) port=$2 ;;
        -h | --help) print_help && exit 0 ;;
        *) die "there is no option $1; there are --logdir DIR and --port PORT" ;;
    esac
    shift 2
done
[[ "$port" =~ ^[1-9][0-9]{0,4}$ ]] && [ "$port" -le 65535 ] || die "port is $port; it must be 1 to 65535"
[ -d "$logdir" ] || die "there is no directory $logdir; make curves with \`python train.py\`, or name another directory with --logdir"
python=$(find_python)
# -I: a file such as ./requests.py must not stand in for a package.
"$python" -I -c "import visualdl" 2>/dev/null || die "$python has no VisualDL; run \`bash scripts/setup.sh\`"

while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    echo "port $port is taken, trying the next one"
    port=$((port + 1))
done
echo "VisualDL shows $logdir at http://127.0.0.1:$port/app/scalar (Ctrl-C ends it)"
# --language: its page fails for clients that name none. Telemetry would phone home.
exec "$python" -I -m visualdl.server.app --logdir "$logdir" --host 127.0.0.1 --port "$port" --language en --disable-telemetry
