#!/usr/bin/env bash
# Make .venv, with all that the project needs. Quick when it is there already.
#
#   bash scripts/setup.sh [--gpu]
#   PYTHON=/path/to/python3.11 bash scripts/setup.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NEEDED_MB=3000 # what .venv takes (about 2 GB), and room for pip to unpack
requirements=requirements.txt
case "${1-}" in
    "") ;;
    --gpu) requirements=requirements-gpu.txt ;;
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) die "there is no option $1; the only one is --gpu" ;;
esac

# Another virtual environment, or a PYTHONPATH, must not leak into this one.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

pick_python() {
    local candidate version seen=""
    for candidate in ${PYTHON:+"$PYTHON"} $([ -n "${PYTHON-}" ] || echo python3.11 python3.12 python3.10 python3 python); do
        version=$(version_of "$candidate") || continue
        case "$version" in
            3.10 | 3.11 | 3.12) command -v "$candidate" && return ;;
        esac
        seen="${seen:+$seen, }$candidate is $version"
    done
    if [ -z "$seen" ]; then
        seen="none was found on PATH"
        [ -z "${PYTHON-}" ] || seen="$PYTHON does not run"
    fi
    die "Python 3.10, 3.11 or 3.12 is needed ($seen); install one and run \`PYTHON=/path/to/python3.11 bash scripts/setup.sh\`"
}

wanted_stamp() { cd "$root" && cat requirements-common.txt "$requirements" scripts/setup.sh | cksum; }

is_ready() {
    [ "$(cat "$venv/setup.stamp" 2>/dev/null)" = "$(wanted_stamp)" ] && "$venv/bin/python" -c "" 2>/dev/null
}

# Which of the usual reasons stands in pip's log? One sentence, then the end.
explain_failure() {
    local log=$1
    if grep -q "No space left on device" "$log"; then
        die "the disk of $root is full; free about $NEEDED_MB MB and run this again (details in $log)"
    elif grep -qE "Failed to establish a new connection|Temporary failure in name resolution|Connection refused|timed out|Network is unreachable|ConnectionError|from versions: none" "$log"; then
        die "the package index cannot be reached; check the network or pip's proxy settings, then run this again (details in $log)"
    fi
    die "pip could not install $requirements: $(grep -m1 "^ERROR" "$log" || tail -n 1 "$log") (details in $log)"
}

install() {
    "$venv/bin/python" -m pip install "$@" >>"$venv/setup.log" 2>&1 || explain_failure "$venv/setup.log"
}

make_venv() {
    local python free_mb
    free_mb=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge "$NEEDED_MB" ] || die "only $free_mb MB are free on the disk of $root, about $NEEDED_MB MB are needed; free some and run this again"
    case "$(version_of "$venv/bin/python" || true)" in
        3.10 | 3.11 | 3.12) "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return ;;
    esac
    python=$(pick_python)
    echo "setup: making .venv with $python ($(version_of "$python"))"
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 || {
        rm -rf "$venv"
        die "$python cannot make a virtual environment; on Debian and Ubuntu run \`apt-get install python3-venv\`, then run this again"
    }
}

is_ready && exit 0
[ -w "$root" ] || die "$root cannot be written by $(id -un); copy the project to a folder of your own"
if command -v flock >/dev/null; then
    exec 9>"$root/.setup.lock" || die "$root cannot be written; is its disk full?"
    flock -n 9 || { echo "setup: another setup is at work here, waiting for it" && flock 9; }
    is_ready && exit 0
fi
make_venv
: >"$venv/setup.log"
echo "setup: installing $requirements (about 500 MB to download; 1 to 5 minutes)"
install -r "$root/$requirements"
echo "setup: installing PARL"
install --no-deps parl==2.2.1
"$venv/bin/python" "$root/scripts/install_roms.py" || die "the Atari ROMs are not in place, see above"
wanted_stamp >"$venv/setup.stamp"
echo "setup: done, in .venv ($(du -sm "$venv" | cut -f 1) MB)"
