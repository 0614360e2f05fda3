#!/usr/bin/env bash
# The first run on a GPU, from nothing: bash launch/first_gpu.sh [--device cpu] [--out FOLDER] [--only STAGE ...]
# Creates .venv from launch/gpu.lock if there is none, then runs the stages of launch/first_gpu.py, and says what to send
# back. With --device cpu it rehearses the same stages on a machine without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/megasync ]; then
    case " $* " in
    *" --device cpu "*) bash launch/setup.sh ;;
    *) bash launch/gpu_environment.sh .venv ;;
    esac
fi
exec .venv/bin/python launch/first_gpu.py "$@"
