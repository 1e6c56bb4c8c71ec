# shellcheck shell=bash
# What nsys.sh and ncu.sh share: the folder of the report and the tool.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=$(basename "$0")
# shellcheck disable=SC2034 # of those who source this
python=${PYTHON:-python3}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

refuse() {
    echo "$program: $1" >&2
    exit 2
}

# The value of the last NAME=value among the other arguments, or nothing.
option() {
    local name=$1 word value=
    shift
    for word in "$@"; do
        case $word in "$name="*) value=${word#*=} ;; esac
    done
    echo "$value"
}

# prepare TOOL PRODUCT OPTIONS...: makes `out`, the folder for the report, and names `partial`, which is removed at exit.
# Ends with code 2 without a folder, with one in use, or without the tool.
prepare() {
    local tool=$1 product=$2
    shift 2
    out=$(option out "$@")
    out=${out/#"~/"/"$HOME/"} # as session.py reads it
    [ -n "$out" ] || refuse "out is missing; name a folder for the report, as in out=/tmp/session"
    [ ! -e "$out/config.yaml" ] || refuse "out=$out holds an earlier session; name another folder"
    command -v "$tool" >/dev/null || refuse "$tool is not on the PATH; install NVIDIA's $product or add its folder to PATH"
    mkdir -p "$out" || refuse "out=$out: cannot be made"
    partial="$out/.report.$$"
    trap 'rm -f "$partial".*' EXIT
}
