#!/usr/bin/env bash
# What Dockerfile and launch/apptainer.def do inside an image, as root on Debian 12, or for GPUs also Ubuntu 24.04, in a
# copy of the checkout: bash launch/image.sh cpu|gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Compilers are needed at run time too: for Ray's interface (patches/ray_bind.c) and, on GPUs, for kernels.
packages=(ca-certificates gcc iproute2 libc6-dev libnuma1 openssh-client python3-dev python3-venv)
case ${1:-} in
    cpu) ;;
    gpu) packages+=(g++ make) ;;
    *) printf "image: '%s' is no variant; usage: image.sh cpu|gpu\n" "${1:-}" >&2 && exit 2 ;;
esac

export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1
apt-get update
apt-get install --yes --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

# The scripts in launch/ look for .venv in the checkout.
if [ "$1" = gpu ]; then
    bash launch/gpu_environment.sh .venv
else
    bash launch/setup.sh
fi
.venv/bin/python -m pip install --no-deps --quiet -r launch/kuberay.lock
.venv/bin/megasync --help >/dev/null

# A fixed number, because Kubernetes compares numbers, not names (`runAsNonRoot`). The user may add runs and models.
useradd --create-home --uid 10001 megasync
chown megasync .
