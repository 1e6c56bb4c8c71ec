#!/usr/bin/env bash
# Nsight Compute over one steady run of a workload: OUT/report.ncu-rep, metrics.csv, summary.txt, config.yaml.
#
#   profiling/ncu.sh [--kernels REGEX] [--skip N] [--count N] \
#       model=9b checkpoint=random tokenizer=FOLDER workload=m1/1024x32 out=FOLDER
#
# --kernels  only kernels whose name matches; --skip and --count then count those
# --skip     launches left out first (0)
# --count    launches measured after that (100: two periods of layers); each is run a dozen times
#
# Options are those of session.py (`python profiling/session.py --help`), but graphs=compiled, so that kernels are
# launched one by one under stable names, and repeats=1. PYTHON names the interpreter.
set -euo pipefail
# shellcheck source=profiling/session_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/session_lib.sh"

chosen=() skip=0 count=100
while [[ ${1:-} == --* ]]; do
    [ $# -gt 1 ] || refuse "$1 needs a value"
    case $1 in
        --kernels) chosen=(--kernel-name "regex:$2") ;;
        --skip) skip=$2 ;;
        --count) count=$2 ;;
        *) refuse "$1 is not an option; there are --kernels, --skip and --count" ;;
    esac
    shift 2
done
[[ $skip =~ ^[0-9]+$ && $count =~ ^[1-9][0-9]*$ ]] || refuse "--skip $skip --count $count: not numbers of launches"
for name in graphs repeats trace; do
    [ -z "$(option "$name" "$@")" ] || refuse "$name= is fixed here: graphs=compiled repeats=1 trace=false"
done
prepare ncu "Nsight Compute" "$@"
# Clocks stay as they are, so that times compare with those of other measurements here. The compiler's worker processes
# run no kernel and are left alone.
ncu --target-processes application-only --profile-from-start off --nvtx --clock-control none \
    --section SpeedOfLight --section MemoryWorkloadAnalysis --section Occupancy --section LaunchStats \
    --launch-skip "$skip" --launch-count "$count" "${chosen[@]}" --force-overwrite --export "$partial.ncu-rep" \
    "$python" "$root/profiling/session.py" "$@" graphs=compiled repeats=1
[ -e "$partial.ncu-rep" ] || { echo "ncu.sh: no kernel was measured, so there is no report" >&2 && exit 1; }
ncu --import "$partial.ncu-rep" --page details --csv --print-units base --print-kernel-base function >"$partial.csv"
"$python" "$root/profiling/ncu_summary.py" "$partial.csv" | tee "$partial.txt"
mv "$partial.csv" "$out/metrics.csv"
mv "$partial.txt" "$out/summary.txt"
mv "$partial.ncu-rep" "$out/report.ncu-rep"
echo "ncu.sh: $out/report.ncu-rep, metrics.csv, summary.txt and config.yaml" >&2
