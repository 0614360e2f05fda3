#!/usr/bin/env bash
# Makes the environment of a GPU node from launch/gpu.lock and checks it: bash launch/gpu_environment.sh [FOLDER] [--no-check]
# Needs no GPU, no CUDA and no driver: compilers, headers and libraries of CUDA come as packages; only a C++ compiler and
# the headers of Python must be on the machine. FOLDER is .venv-gpu unless it is given; the other scripts in launch/
# look for .venv. PYTHON chooses the interpreter, 3.11 or 3.12. MAX_JOBS limits the compiler processes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$root/.venv-gpu check=yes
for word; do
    case $word in
    --no-check) check= ;;
    -*) printf 'gpu_environment: unknown option %s; usage: gpu_environment.sh [FOLDER] [--no-check]\n' "$word" >&2 && exit 2 ;;
    *) folder=$(realpath -m "$word") ;;
    esac
done
lock=$root/launch/gpu.lock log=$folder/install.log stamp=$folder/.installed-gpu
# Packages that are built here because their authors publish no wheels. The last one is built against torch.
built=(cellpylib pycosat zss transformer-engine-torch)

fail() {
    printf 'gpu_environment: %s\n' "$*" >&2
    exit 1
}

step() { # title, command...
    local title=$1 begin=$SECONDS
    shift
    printf '%s ... ' "$title"
    if ! "$@" >>"$log" 2>&1; then
        printf 'failed\n'
        tail -n 20 "$log" >&2
        fail "step \"$title\" failed; see the full log in $log"
    fi
    printf '%ss\n' "$((SECONDS - begin))"
}

pip_install() {
    "$folder/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --no-cache-dir "$@"
}

pins() { # names...: their entries of the lock, with hashes
    awk -v names=" $* " '/==/ { split($0, pin, "=="); kept = index(names, " " pin[1] " ") } kept' "$lock"
}

others() { # names...: all other entries of the lock
    awk -v names=" $* " '/==/ { split($0, pin, "=="); kept = !index(names, " " pin[1] " ") } kept' "$lock"
}

complete_toolkit() { # SGLang compiles kernels at their first use, against lib64 and names without a version
    local cuda library
    cuda=$(dirname "$(dirname "$(echo "$folder"/lib/python3.*/site-packages/nvidia/cu*/bin/nvcc)")")
    [ -x "$cuda/bin/nvcc" ] || return 1
    ln -sfn lib "$cuda/lib64"
    for library in "$cuda"/lib/libcudart.so.*; do ln -sf "$(basename "$library")" "$cuda/lib/libcudart.so"; done
    # To link against; the driver's own library is loaded at run time.
    mkdir -p "$cuda/lib/stubs"
    cc -shared -x c /dev/null -Wl,-soname,libcuda.so.1 -o "$cuda/lib/stubs/libcuda.so"
}

add_rehearsal() { # `megasync rehearse` reads these beside the real packages, in folders outside Python's path
    local pin
    grep '==' "$root/launch/rehearsal.lock" | while read -r pin; do
        pip_install --no-deps --target "$folder/rehearsal/${pin/==/-}" --python-version 3.12 --only-binary :all: \
            --ignore-requires-python "$pin"
    done
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not Python 3.11 or 3.12"
    done
    fail "needs Python 3.11 or 3.12; install one, or set PYTHON=/path/to/python3.12"
}

wanted=$(cat "$lock" "$root/launch/rehearsal.lock" "$root/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot create virtual environments; install your system's package python3-venv"
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$headers/Python.h" ] || fail "$headers has no Python.h; install your system's package python3-dev"
    command -v c++ >/dev/null || fail "there is no C++ compiler (c++); install your system's package g++ or build-essential"
    mkdir -p "$folder"
    rm -f "$stamp"
    : >"$log"
    printf 'gpu_environment: creating %s with %s (log: %s)\n' "$folder" "$("$python" --version)" "$log"
    step "virtual environment" "$python" -m venv "$folder"
    others "${built[@]}" >"$folder/wheels.txt"
    pins "${built[@]}" >"$folder/built.txt"
    step "$(grep -c '==' "$folder/wheels.txt") packages as wheels" \
        pip_install --no-deps --require-hashes --only-binary :all: -r "$folder/wheels.txt"
    step "CUDA's folders as compilers expect them" complete_toolkit
    # Transformer Engine would first look for a finished wheel on the network, and prefers another CUDA of the machine.
    export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1
    step "building ${built[*]} (several minutes)" \
        pip_install --no-deps --require-hashes --no-build-isolation -r "$folder/built.txt"
    step "megasync" pip_install --no-deps --no-build-isolation --editable "$root"
    step "packages of megasync rehearse" add_rehearsal
    printf '%s\n' "$wanted" >"$stamp"
    printf 'gpu_environment: %s takes %s\n' "$folder" "$(du -sh "$folder" | cut -f 1)"
fi
[ -z "$check" ] || exec "$folder/bin/python" "$root/launch/check_gpu_environment.py"
