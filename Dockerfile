# megasync as a container image, for CPUs or for GPU nodes; `buildah build` and `podman build` take the same arguments.
#
#   docker build -t megasync .
#   docker build -t megasync:gpu --build-arg VARIANT=gpu .
#   docker run --rm --shm-size=1g megasync quickstart
#   docker run --rm --gpus all --network host --ipc host --ulimit memlock=-1 --ulimit nofile=65536 -v /data:/data megasync:gpu doctor
#
# BASE is Debian 12, or for GPUs also Ubuntu 24.04. Neither needs CUDA: compiler, headers and libraries of CUDA are packages of
# launch/gpu.lock, in the version that torch is built for. The driver comes from the host. There is no HEALTHCHECK: a
# run watches its own processes and ends with a status, and launchers probe their Ray nodes (docs/launching.md).
ARG BASE=docker.io/library/debian:bookworm-slim
FROM $BASE
ARG VARIANT=cpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/opt/megasync/.venv/bin:$PATH
WORKDIR /opt/megasync
COPY . .
RUN bash launch/image.sh $VARIANT
USER 10001
ENTRYPOINT ["megasync"]
