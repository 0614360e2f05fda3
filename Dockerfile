# megasync on GPU nodes, as a container. Not built and not run yet: that takes a machine with a container engine.
#
#   docker build -t megasync .
#   docker run --rm --gpus all --network host --ipc host --ulimit memlock=-1 --ulimit nofile=65536 -v /data:/data megasync doctor
#
# The base image needs no CUDA: compiler, headers and libraries of CUDA are packages of launch/gpu.lock, in the version
# that torch is built for. The driver comes from the host.
FROM ubuntu:24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        build-essential ca-certificates git iproute2 libnuma1 openssh-client python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The scripts in launch/ look for .venv in the checkout.
WORKDIR /opt/megasync
ENV PATH=/opt/megasync/.venv/bin:$PATH
COPY pyproject.toml README.md LICENSE ./
COPY megasync megasync
COPY patches patches
COPY launch launch
RUN bash launch/gpu_environment.sh .venv --no-check && megasync --help >/dev/null

COPY configs configs
COPY benchmarks benchmarks
COPY examples examples
# Needs the configurations: servers' arguments, layer specs, hooks, environment, as far as a build without a GPU can see.
RUN .venv/bin/python launch/check_gpu_environment.py

ENTRYPOINT ["megasync"]
