#!/usr/bin/env bash
# Everything worth doing on a machine with a CUDA device:   bench/gpu.sh [--fast] [--dry-run] [--out DIR]
#
# In the order of what matters most: a smoke test of each whole kernel, the training step, rates and speed beside PyTorch
# eager (bfloat16 first), the tests on the device, the sanitizers, and last the peers that compile (torch.compile, JAX).
# --fast ends after the tests: at most four minutes; the whole takes at most nine.  Nothing needs a network.
#
# Each part has its time and is stopped after it, so that a part that hangs costs the others nothing; a part that fails
# does not stop the others either, and the last table says which did.  Each case is a line of JSON in DIR/PART.jsonl (by
# default a folder in bench/results/, of a dry run a temporary one) as soon as it is done; a part whose process was killed
# is started anew behind that case.  DIR/facts.txt says device, driver, versions and commit.
#
# Wants tapegrad's test dependencies and cupy-cuda12x or cupy-cuda13x with [ctk] (or a CUDA toolkit); PyTorch and JAX
# with CUDA are compared where they are installed, and convolutions by cuDNN (nvidia-cudnn-frontend) with tapegrad's own.
# PYTHON=... chooses the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
python=${PYTHON:-python3}
dry=() fast=no out=
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=(--dry-run) ;;
        --fast) fast=yes ;;
        --out) out=${2:?--out wants a folder}; shift ;;
        *) echo "bench/gpu.sh: unknown option $1; there are --fast, --dry-run and --out DIR" >&2; exit 2 ;;
    esac
    shift
done
if [ -z "$out" ]; then
    if [ ${#dry[@]} = 0 ]; then out=bench/results/gpu-$(date +%Y%m%d-%H%M%S); else out=$(mktemp -d); fi
fi
mkdir -p "$out"
TAPEGRAD_RESULTS=$(cd "$out" && pwd)
export TAPEGRAD_RESULTS
export PYTHONPATH="$PWD:$PWD/tests" PYTHONDONTWRITEBYTECODE=1
summary=()

part() {
    local name=$1 limit=$2 start=$SECONDS status=passed
    shift 2
    printf '\n=== %s (at most %d s)\n' "$name" "$limit"
    # A kernel that hangs ignores the first signal as long as the driver waits for it.
    timeout --kill-after=5 "$limit" "$@"
    local code=$?
    # A process that a signal ended goes on behind the case that ended it, in what is left of the time.
    while [ $code -gt 128 ] && [ $((SECONDS - start)) -lt "$limit" ]; do
        timeout --kill-after=5 $((limit - SECONDS + start)) "$@"
        code=$?
    done
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
facts() { environment | tee "$TAPEGRAD_RESULTS/facts.txt"; }
export -f facts
part environment 15 bash -c facts
part smoke 25 "$python" bench/gpu_kernels.py --seconds 20 "${dry[@]}"
part "training step" 40 "$python" bench/gpu_step.py --peers torch "${dry[@]}"
part "rates" 50 "$python" bench/gpu_rates.py --seconds 40 --peers torch "${dry[@]}"
part "speed" 40 "$python" bench/gpu_speed.py --seconds 30 --peers torch "${dry[@]}"
if [ ${#dry[@]} = 0 ]; then
    part "tests" 70 env CUDA_LAUNCH_BLOCKING=1 "$python" -m pytest tests/gpu -q -m gpu -n 4 --dist=load -p no:cacheprovider \
        --max-worker-restart=20 --continue-on-collection-errors --junitxml "$TAPEGRAD_RESULTS/tests.xml"
else
    skipped tests "dry run"
fi
if [ $fast = no ]; then
    if [ ${#dry[@]} != 0 ]; then
        for tool in memcheck racecheck synccheck; do skipped $tool "dry run"; done
    elif command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck synccheck; do
            part "$tool" 35 compute-sanitizer --tool $tool --error-exitcode 1 --print-limit 20 \
                "$python" bench/gpu_kernels.py --seconds 25
        done
    else
        for tool in memcheck racecheck synccheck; do skipped $tool "compute-sanitizer is not on PATH"; done
    fi
    part "host and recompute_grad" 30 "$python" bench/gpu_host.py "${dry[@]}"
    if [ ${#dry[@]} = 0 ]; then
        part "profile" 30 "$python" -m tapegrad profile --check -f -o "${TMPDIR:-/tmp}/tapegrad-gpu.json.gz" -m tapegrad demo --quick
    else
        skipped profile "dry run"
    fi
    # Compilers of other libraries last: they take the longest before their first figure.
    export TAPEGRAD_RESULTS=$TAPEGRAD_RESULTS/compiled
    part "rates, compiled peers" 55 "$python" bench/gpu_rates.py --seconds 40 --peers compile,jax "${dry[@]}"
    part "speed, compiled peers" 45 "$python" bench/gpu_speed.py --seconds 30 --peers compile,jax "${dry[@]}"
fi

printf '\n=== summary, %d s\n' $SECONDS
printf '%s\n' "${summary[@]}"
echo "figures: $out"
printf '%s\n' "${summary[@]}" | grep -q -E 'FAILED|stopped' && exit 1
exit 0
