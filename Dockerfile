# megasync on GPU nodes, as a container. Not built and not run yet: that takes a GPU node.
#
#   docker build -t megasync .
#   docker run --rm --gpus all --network host --ipc host --ulimit memlock=-1 --ulimit nofile=65536 -v /data:/data megasync doctor
#
# The base image has CUDA's compiler and cuDNN's headers, with which Transformer Engine builds its extension for torch. Its
# CUDA must be of the major version that torch's wheels were built for; the build stops where it is not.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        build-essential git iproute2 libnuma1 ninja-build openssh-client python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# The scripts in launch/ look for .venv in the checkout.
WORKDIR /opt/megasync
ENV PATH=/opt/megasync/.venv/bin:$PATH
COPY pyproject.toml README.md LICENSE ./
COPY megasync megasync
COPY patches patches

# torch first, in SGLang's version: the extension is built against the one that is there, so without build isolation.
RUN python3.12 -m venv .venv \
    && pip install --no-cache-dir 'setuptools>=77' wheel ninja pybind11 torch==2.14.1 \
    && python -c "import os, torch; built = torch.version.cuda.split('.')[0]; assert built == os.environ['CUDA_VERSION'].split('.')[0], f'torch is built for CUDA {torch.version.cuda}: build with --build-arg CUDA={torch.version.cuda}.0'" \
    && pip install --no-cache-dir --no-build-isolation --editable '.[gpu,datasets,math]' \
    && megasync --help >/dev/null

COPY launch launch
COPY configs configs
COPY examples examples

ENTRYPOINT ["megasync"]
