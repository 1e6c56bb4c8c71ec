#!/usr/bin/env bash
# Nsight Systems over the steady state of one workload: OUT/report.nsys-rep, OUT/summary.txt, OUT/config.yaml.
#
#   profiling/nsys.sh model=9b checkpoint=random tokenizer=FOLDER workload=m1/1024x32 out=FOLDER
#
# Options are those of session.py (`python profiling/session.py --help`). PYTHON names the interpreter.
set -euo pipefail
# shellcheck source=profiling/session_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/session_lib.sh"

[ -z "$(option trace "$@")" ] || refuse "trace= is torch.profiler's, and two profilers cannot watch one process"
prepare nsys "Nsight Systems" "$@"
# Without a node each, the kernels of a CUDA graph would be one bar.
nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --capture-range=cudaProfilerApi --capture-range-end=stop \
    --sample=none --cpuctxsw=none --wait=primary --output="$partial.nsys-rep" \
    "$python" "$root/profiling/session.py" "$@"
# Requests and passes with their time on the GPU, then kernels by name.
nsys stats --force-export=true --format=table --report=nvtx_gpu_proj_sum --report=nvtx_sum \
    --report=cuda_gpu_kern_sum "$partial.nsys-rep" >"$partial.txt"
mv "$partial.txt" "$out/summary.txt"
mv "$partial.nsys-rep" "$out/report.nsys-rep"
echo "nsys.sh: $out/report.nsys-rep, summary.txt and config.yaml" >&2
