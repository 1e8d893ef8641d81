# Sourced by the other scripts: where the project is, and how a script gives up.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The comment at the head of the script that runs, which is its help.
print_help() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

# The project's own Python where `setup.sh` made one, else the one at hand.
find_python() {
    if [ -x "$venv/bin/python" ]; then
        printf '%s\n' "$venv/bin/python"
    else
        command -v python3 || die "there is no .venv here and no python3 on PATH; run \`bash scripts/setup.sh\`"
    fi
}
