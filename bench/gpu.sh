#!/usr/bin/env bash
# Everything worth doing on a machine with a CUDA device:   bench/gpu.sh [--fast] [--dry-run] [--plan] [--out DIR] [PART...]
#
# In the order of what matters most: small computations in processes of their own, the training step, rates and speed
# against PyTorch eager (bfloat16 first), the tests on the device, the sanitizers, and last the peers that compile
# (torch.compile, JAX).  At most nine minutes; --fast ends after speed, within four.  Each part is stopped at its time
# limit, and a part that fails stops no other: the summary at the end says which did.  --plan prints the parts and their
# limits in seconds.  PART runs these parts alone.
#
# DIR (default: a new folder in bench/results/; a dry run keeps nothing without --out) receives facts.json with device,
# driver, versions and commit, PART.jsonl with a line for each case as soon as it has ended, and pytest's tests.xml.
#
# Nothing is installed or fetched.  Required are tapegrad's test dependencies and cupy-cuda12x or cupy-cuda13x with [ctk]
# (or a CUDA toolkit).  PyTorch and JAX with CUDA are compared where they are installed, and convolutions by cuDNN
# (nvidia-cudnn-frontend) with tapegrad's own kernels.  PYTHON=... chooses the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
python=${PYTHON:-python3}
dry=() eager=(--peers torch) fast='' plan='' only='' out=''
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=(--dry-run) eager=() ;;
        --fast) fast=yes ;;
        --plan) plan=yes ;;
        --out) out=${2:?--out requires a folder}; shift ;;
        -*) echo "usage: bench/gpu.sh [--fast] [--dry-run] [--plan] [--out DIR] [PART...]" >&2; exit 2 ;;
        *) only+="|$1" ;;
    esac
    shift
done
is_dry() { [ ${#dry[@]} != 0 ]; }
if [ -z "$out$plan" ]; then
    if is_dry; then
        out=$(mktemp -d)
        trap 'rm -rf "$out"' EXIT
    else
        out=bench/results/gpu-$(date -u +%Y%m%d-%H%M%S)
    fi
fi
[ -n "$plan" ] || mkdir -p "$out"
export TAPEGRAD_RESULTS=$out PYTHONPATH="$PWD:$PWD/tests" PYTHONDONTWRITEBYTECODE=1
summary=()

chosen() { [[ -z $only || "$only|" == *"|$1|"* ]]; }

part() {
    local name=$1 limit=$2 start=$SECONDS status=passed code
    shift 2
    chosen "$name" || return 0
    if [ -n "$plan" ]; then
        echo "$name $limit"
        return 0
    fi
    printf '\n=== %s (at most %d s)\n' "$name" "$limit"
    # The stand-in's kernels are compiled by a C++ compiler, one after the other.
    is_dry && limit=$((limit * 5))
    # The driver may hold a process with a kernel that hangs back from the first signal.
    timeout --kill-after=5 "$limit" "$@"
    code=$?
    case $code in
        0) ;;
        124 | 137) status="stopped after $limit s" ;;
        *) status="FAILED ($code)" ;;
    esac
    summary+=("$(printf '%-28s %-18s %4d s' "$name" "$status" $((SECONDS - start)))")
}

skipped() {
    if [ -n "$plan" ] || ! chosen "$1"; then return 0; fi
    printf '\n=== %s: not run: %s\n' "$1" "$2"
    summary+=("$(printf '%-28s not run: %s' "$1" "$2")")
}

finish() {
    [ -z "$plan" ] || exit 0
    printf '\n=== results\n'
    "$python" bench/gpu_common.py "$out"
    printf '\n=== summary, %d s\n' $SECONDS
    printf '%s\n' "${summary[@]}"
    is_dry || echo "results: $out"
    printf '%s\n' "${summary[@]}" | grep -q -E 'FAILED|stopped' && exit 1
    exit 0
}

part facts 20 "$python" bench/gpu_common.py --facts "${dry[@]}" "$out"
part smoke 60 "$python" bench/gpu_smoke.py --seconds 54 "${dry[@]}"
part step 40 "$python" bench/gpu_step.py --seconds 34 "${eager[@]}" "${dry[@]}"
part rates 70 "$python" bench/gpu_rates.py --seconds 64 "${eager[@]}" "${dry[@]}"
part speed 50 "$python" bench/gpu_speed.py --seconds 44 "${eager[@]}" "${dry[@]}"
[ -z "$fast" ] || finish

# Of one folder, so that optional packages that other tests import are not required; a worker that a kernel has broken is
# replaced.
tests=("$python" -m pytest tests/gpu -q -m gpu -p no:cacheprovider --dist=load --max-worker-restart=20
    --continue-on-collection-errors --junitxml="$out/tests.xml")
if is_dry; then tests+=(-n 0 -p shim.plugin --collect-only); else tests+=(-n 4); fi
part tests 80 "${tests[@]}"

if is_dry; then lack="dry run"; else lack="compute-sanitizer is not on PATH"; fi
if ! is_dry && command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        part "$tool" 30 compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 1 --print-limit 20 \
            "$python" bench/gpu_kernels.py --part "gpu-kernels-$tool" --seconds 24
    done
else
    for tool in memcheck racecheck synccheck; do skipped "$tool" "$lack"; done
    part kernels 60 "$python" bench/gpu_kernels.py --seconds 54 "${dry[@]}"
fi
part host 20 "$python" bench/gpu_host.py --seconds 14 "${dry[@]}"
if is_dry; then
    for name in profile step-compiled rates-compiled speed-compiled; do skipped "$name" "dry run"; done
else
    part profile 20 "$python" -m tapegrad profile --check -f -o "${TMPDIR:-/tmp}/tapegrad-gpu.sqlite" -m tapegrad demo --quick
    for name in step rates speed; do
        part "$name-compiled" 30 "$python" "bench/gpu_$name.py" --part "gpu-$name-compiled" --seconds 24 --peers compile,jax
    done
fi
finish
