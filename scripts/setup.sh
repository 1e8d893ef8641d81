#!/usr/bin/env bash
# Make .venv with all that the project needs, or mend it; done in a moment when it is there.
#
#   bash scripts/setup.sh [--cpu | --gpu]     # which Paddle; without either: as in .venv, at first --cpu
#   PYTHON=/path/to/python3.11 bash scripts/setup.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

kind=""
case "${1-}" in
    "") ;;
    --cpu | --gpu) kind=${1#--} ;;
    -h | --help) print_help && exit 0 ;;
    *) die "there is no option $1; there are --cpu and --gpu" ;;
esac

# What the user set up for other projects must not leak into .venv.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

stamp="$venv/setup.stamp" # "cpu" or "gpu", then what was installed, or "unfinished"
log="$venv/setup.log"

# "3.11", or nothing where it does not run: pyenv leaves commands behind that only print an error.
version_of() { "$1" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null || true; }

is_supported() { [[ "$1" =~ ^3\.1[0-2]$ ]]; }

# Sets `python` and `python_version`.
pick_python() {
    local candidates=(python3.11 python3.12 python3.10 python3 python) seen=""
    [ -z "${PYTHON-}" ] || candidates=("$PYTHON")
    for python in "${candidates[@]}"; do
        python_version=$(version_of "$python")
        if is_supported "$python_version"; then
            # Of a virtual environment, the Python it was made with: the one in .venv may be about to go.
            python=$("$python" -I -c 'import sys; print(sys._base_executable)')
            return
        fi
        [ -z "$python_version" ] || seen+="${seen:+, }$python is $python_version"
    done
    [ -n "$seen" ] || seen=${PYTHON:+"PYTHON=$PYTHON does not run"}
    die "Python 3.10, 3.11 or 3.12 is needed (${seen:-there is no Python on PATH}); install one, then run \`PYTHON=/path/to/python3.11 bash scripts/setup.sh\`"
}

choose_kind() {
    [ -z "$kind" ] || return 0
    kind=$(cut -d " " -f 1 "$stamp" 2>/dev/null || true)
    [[ "$kind" =~ ^(cpu|gpu)$ ]] && return
    kind=cpu
    ! compgen -G "$venv/lib/python3*/site-packages/paddlepaddle_gpu-*" >/dev/null || kind=gpu
}

wanted_stamp() {
    local sum
    sum=$(cd "$root" && { pwd && cat requirements-common.txt "$requirements" scripts/setup.sh; } | cksum)
    echo "$kind ${sum// /-}"
}

is_ready() {
    local version
    [ "$(cat "$stamp" 2>/dev/null)" = "$(wanted_stamp)" ] || return 1
    version=$(version_of "$venv/bin/python")
    is_supported "$version" && { [ -z "${PYTHON-}" ] || [ "$version" = "$(version_of "$PYTHON")" ]; }
}

free_mb() { df -Pm "$1" 2>/dev/null | awk 'NR == 2 { print $4 }'; }

# One sentence for the usual reasons, found in the log.
explain_failure() {
    local what=$1 log_status=${2-0} cache=${XDG_CACHE_HOME:-$HOME/.cache} tmp=${TMPDIR:-/tmp}
    local no_network index reason
    no_network="Failed to establish a new connection|NewConnectionError|name resolution|Connection refused|ConnectTimeout|Read timed out|Network is unreachable|ProxyError|SSLError"
    index=$(sed -E 's#//[^/@]*@#//#' <<<"${PIP_INDEX_URL-}") # without a password
    if [ "$log_status" != 0 ] || grep -qE "No space left on device|Disk quota exceeded" "$log"; then
        die "a disk is full: $(free_mb "$venv") MB are free for $venv, $(free_mb "$tmp") MB for $tmp, $(free_mb "$cache" || true) MB for $cache, about $needed_mb MB are needed; free some, then run \`bash scripts/setup.sh\` again"
    elif grep -qE "$no_network" "$log"; then
        die "the package index${index:+ $index} cannot be reached for $what; check the network and pip's settings (\`$venv/bin/python -m pip config list\`), then run \`bash scripts/setup.sh\` again; pip's words are in $log"
    fi
    reason=$(sed -nE "s/^ERROR: //p" "$log" | head -n 1)
    if [[ "$reason" = *"from versions: none"* ]]; then
        reason=$(cut -d "(" -f 1 <<<"$reason")
        die "${reason/Could not find a version that satisfies the requirement /no }in a wheel for Python $(version_of "$venv/bin/python") on $(uname -sm): pip could not reach the package index${index:+ $index}, or it has none; check the network and pip's settings (\`$venv/bin/python -m pip config list\`), then run \`bash scripts/setup.sh\` again"
    fi
    die "pip could not install $what: ${reason:-$(tail -n 1 "$log")}; pip's words are in $log"
}

# The wheels of 10 MB and more, as they arrive, so that one sees that it is at work.
show_progress() {
    sed -unE -e 's/^ *(Downloading|Using cached) ([^ ]*\/)?([A-Za-z0-9_.]+)-([0-9][^-]*)-.* \(([0-9]{2,}[0-9.]* MB)\).*/  \3 \4, \5/p' \
        -e 's/.*WARNING: Retrying.*/  the network does not answer, trying again/p' \
        -e 's/^Installing collected packages.*/  unpacking/p'
}

install() {
    local what=$1
    shift
    # -I: not even PYTHONPATH or the user's own packages count. Nothing is compiled: that would need a compiler.
    "$venv/bin/python" -I -u -m pip install --only-binary :all: "$@" 2>&1 | tee -a "$log" 2>/dev/null | show_progress ||
        explain_failure "$what" "${PIPESTATUS[1]}"
}

# Keeps a .venv that works, else makes it anew.
make_venv() {
    local found reason="" free other=paddlepaddle-gpu
    [ "$kind" = cpu ] || other=paddlepaddle
    [ -z "${PYTHON-}" ] || pick_python
    if [ -e "$venv" ]; then
        found=$(version_of "$venv/bin/python")
        if [[ "$(cat "$stamp" 2>/dev/null)" = *" unfinished" ]]; then
            reason="its set-up did not finish"
        elif [ -z "$found" ]; then
            reason="its Python does not run"
        elif ! is_supported "$found" || { [ -n "${PYTHON-}" ] && [ "$found" != "$python_version" ]; }; then
            reason="it has Python $found"
        elif ! "$venv/bin/python" -I -m pip --version >/dev/null 2>&1; then
            reason="it has no pip"
        elif ! grep -qF -- "$venv" "$venv/bin/activate" 2>/dev/null; then
            reason="it was moved here from elsewhere"
        elif compgen -G "$venv/lib/python3*/site-packages/${other/-/_}-[0-9]*" >/dev/null; then
            reason="it has $other" # both Paddle packages own the directory `paddle`
        else
            return 0
        fi
    fi
    pick_python
    rm -rf "$venv"
    free=$(free_mb "$root")
    [ "$free" -ge "$needed_mb" ] || die "only $free MB are free on the disk of $root, about $needed_mb MB are needed; free some, then run \`bash scripts/setup.sh\` again"
    echo "setup: making .venv with $python ($python_version)${reason:+, as $reason}"
    mkdir "$venv"
    "$python" -I -m venv "$venv" >"$log" 2>&1 </dev/null ||
        die "$python cannot make a virtual environment ($(tail -n 1 "$log")); on Debian and Ubuntu run \`apt-get install python$python_version-venv\`, then \`bash scripts/setup.sh\` again"
}

# Paddle 2.6 looks for libcudnn.so and its like beside itself; NVIDIA's wheels have a libcudnn.so.8 elsewhere.
link_cuda() {
    local libs library name
    compgen -G "$venv/lib/python3*/site-packages/paddlepaddle_gpu-2.6.*" >/dev/null || return 0
    libs=$(echo "$venv"/lib/python3*/site-packages/paddle/libs)
    for library in "$venv"/lib/python3*/site-packages/nvidia/*/lib/*.so.*; do
        name=$(basename "$library")
        ln -sf "$library" "$libs/$name"
        ln -sf "$library" "$libs/${name%%.so.*}.so"
    done
}

check_imports() {
    local words
    words=$(cd "$root" && "$venv/bin/python" -W ignore -c "import zlib, paddle, cv2, visualdl, env_utils, parl_compat, parl" 2>&1) && return
    words=${words##*$'\n'}
    case "$words" in
        *"cannot open shared object file"*) die "a library of the system is missing ($words); on Debian and Ubuntu run \`apt-get install libgomp1 libstdc++6 zlib1g\`, then \`bash scripts/setup.sh\` again" ;;
        *) die "what was installed does not work ($words); see \`$venv/bin/python scripts/check_env.py\`" ;;
    esac
}

main() {
    choose_kind
    requirements=requirements.txt needed_mb=3000 size="350 MB to download, 1.5 GB on disk, 1 to 5 minutes"
    if [ "$kind" = gpu ]; then
        requirements=requirements-gpu.txt needed_mb=12000 size="3 GB to download, 7 GB on disk, 3 to 20 minutes"
    fi
    ! is_ready || return 0
    [ -w "$root" ] || die "$(id -un) may not write to $root; copy the project to a folder of your own"
    exec 9>"$root/.setup.lock"
    flock -n 9 || { echo "setup: another setup is at work here, waiting for it" && flock 9; }
    ! is_ready || return 0
    make_venv
    echo "$kind unfinished" >"$stamp"
    : >"$log"
    echo "setup: installing $requirements (about $size)"
    install "$requirements" -r "$root/$requirements"
    echo "setup: installing PARL 2.2.1"
    install PARL --no-deps parl==2.2.1
    link_cuda
    check_imports
    echo "setup: looking for the Atari ROMs"
    "$venv/bin/python" "$root/scripts/install_roms.py" || die "the Atari ROMs are not in place, see above"
    wanted_stamp >"$stamp"
    echo "setup: done, .venv has $(du -sm "$venv" | cut -f 1) MB; next: .venv/bin/python scripts/check_env.py"
}

main
