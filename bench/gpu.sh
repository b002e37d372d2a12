#!/usr/bin/env bash
# Everything worth doing on a machine with a CUDA device, in under nine minutes:   bench/gpu.sh [--dry-run]
#
# Each part has its time (all together nine minutes) and is stopped after it, so that a part that hangs costs the others nothing; a part that fails
# does not stop the others either, and the last table says which did.  Parts that write figures put them, as JSON with
# device, driver, versions and commit, into bench/results/ (a dry run puts nothing there).
#
# Wants tapegrad's test dependencies and cupy-cuda12x or cupy-cuda13x with [ctk] (or a CUDA toolkit); PyTorch and JAX
# with CUDA are compared where they are installed, and convolutions by cuDNN (nvidia-cudnn-frontend) with tapegrad's own.  PYTHON=... chooses the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
python=${PYTHON:-python3}
dry=()
[ "${1:-}" = --dry-run ] && dry=(--dry-run)
export PYTHONPATH="$PWD:$PWD/tests" PYTHONDONTWRITEBYTECODE=1
summary=()

part() {
    local name=$1 limit=$2 start=$SECONDS status=passed
    shift 2
    printf '\n=== %s (at most %d s)\n' "$name" "$limit"
    # A kernel that hangs ignores the first signal as long as the driver waits for it.
    timeout --kill-after=5 "$limit" "$@"
    local code=$?
    [ $code = 0 ] || status="FAILED ($code)"
    [ $code = 124 ] || [ $code = 137 ] && status="stopped after $limit s"
    summary+=("$(printf '%-28s %-18s %4d s' "$name" "$status" $((SECONDS - start)))")
}

skipped() {
    printf '\n=== %s: not run: %s\n' "$1" "$2"
    summary+=("$(printf '%-28s not run: %s' "$1" "$2")")
}

environment() {
    date -u
    git log -1 --format='commit %H%n%s' 2>/dev/null
    command -v nvidia-smi >/dev/null && nvidia-smi
    command -v nvcc >/dev/null && nvcc --version | tail -2
    # A dry run asks the stand-in for nothing here: what is installed is what matters.
    "$python" - <<'PY'
import platform
from importlib.metadata import PackageNotFoundError, version
print("python", platform.python_version(), platform.platform())
names = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "ml-dtypes", "torch", "triton", "jax", "jaxlib", "jax-cuda12-plugin",
         "jax-cuda13-plugin", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "nvidia-cublas-cu12", "nvidia-cublas",
         "nvidia-cudnn-frontend", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
for name in names:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
PY
    return 0
}

export -f environment
export python
part environment 15 bash -c environment
if [ ${#dry[@]} = 0 ]; then
    part "tests" 125 "$python" -m pytest -q -m gpu -p no:cacheprovider
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            part "$tool" 40 compute-sanitizer --tool $tool --error-exitcode 1 --print-limit 20 \
                "$python" bench/gpu_kernels.py --seconds 30
        done
    else
        for tool in memcheck racecheck; do skipped $tool "compute-sanitizer is not on PATH"; done
    fi
else
    skipped tests "dry run"
    skipped memcheck "dry run"
    skipped racecheck "dry run"
fi
part "whole kernels" 30 "$python" bench/gpu_kernels.py --seconds 20 "${dry[@]}"
part "speed" 105 "$python" bench/gpu_speed.py --seconds 85 "${dry[@]}"
part "rates" 80 "$python" bench/gpu_rates.py --seconds 60 "${dry[@]}"
part "host and recompute_grad" 30 "$python" bench/gpu_host.py "${dry[@]}"
part "training step" 40 "$python" bench/gpu_step.py "${dry[@]}"
if [ ${#dry[@]} = 0 ]; then
    part "profile" 35 "$python" -m tapegrad profile --check -f -o "${TMPDIR:-/tmp}/tapegrad-gpu.json.gz" -m tapegrad demo --quick
else
    skipped profile "dry run"
fi

printf '\n=== summary, %d s\n' $SECONDS
printf '%s\n' "${summary[@]}"
printf '%s\n' "${summary[@]}" | grep -q -E 'FAILED|stopped' && exit 1
exit 0
