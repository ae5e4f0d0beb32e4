# The image that every launcher in launch/ uses: training, and an ssh server for its hosts.
#
#   make image                      for GPUs
#   make image DEVICE=cpu           from plain Ubuntu
#   docker build --build-arg DEVICE=cpu --build-arg BASE_IMAGE=debian:bookworm \
#       --build-arg RUNTIME_IMAGE=debian:bookworm-slim .
#
# Both bases are of one distribution release: they share Python, Open MPI and the C library.
# On GPUs CUDA's run-time libraries come with TensorFlow from PyPI, so the image that runs needs
# the driver only, from the host.
ARG BASE_IMAGE=nvidia/cuda:12.8.1-devel-ubuntu24.04
ARG RUNTIME_IMAGE=ubuntu:24.04

# ---------------------------------------------------------------- compilers, TensorFlow, Horovod
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
ARG DEVICE=gpu

# Versions of system packages are the base image's: pin that, by its digest if need be.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates cmake libopenmpi-dev openmpi-bin openssh-client \
        python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build
COPY requirements.txt ./
COPY docker/install-horovod.sh docker/
COPY docker/compat docker/compat
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 HOROVOD_WHEELS=/tmp/wheels
# At its end two ranks are tried, and Gloo crashes where a host's own name does not resolve, as in
# the builds of some tools.
RUN if ! getent hosts "$(hostname)"; then echo "127.0.0.1 $(hostname)" >>/etc/hosts; fi \
    && python3 -m venv /opt/venv \
    && PYTHON=/opt/venv/bin/python DEVICE=$DEVICE docker/install-horovod.sh --requirements \
    && horovodrun --check-build \
    && python -m pip uninstall --yes pip \
    && find /opt/venv -name '__pycache__' -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------- what runs
# hadolint ignore=DL3006
FROM ${RUNTIME_IMAGE} AS run
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="train" \
      org.opencontainers.image.description="TensorFlow training on many nodes with Horovod" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

# InfiniBand's user space (ibverbs, rdmacm), cores near a GPU (numactl), signals and zombies (tini).
# Host keys that the ssh server's package makes are removed: one for all users is nobody's.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates ibverbs-providers libgomp1 libibverbs1 librdmacm1 numactl openmpi-bin \
        openssh-client openssh-server python3 tini \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && if id ubuntu 2>/dev/null; then userdel --remove ubuntu; fi \
    && useradd --uid 1000 --create-home --shell /bin/bash trainer \
    && install -d -o 1000 -g 1000 -m 0700 /home/trainer/.ssh /home/trainer/.sshd \
    && install -d -o 1000 -g 1000 /app /data /runs

COPY --from=build /opt/venv /opt/venv
COPY docker/ssh_config /etc/ssh/ssh_config.d/cluster.conf
# The folder that is trained from: template here, the whole project in a fork.
ARG PROJECT=template
COPY --chown=1000:1000 ${PROJECT}/ /app/
COPY --chown=1000:1000 launch/ /app/launch/
COPY --chown=1000:1000 docker/ /app/docker/

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /app
EXPOSE 2222
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["/app/docker/entrypoint.sh", "healthy"]
ENTRYPOINT ["/usr/bin/tini", "--", "/app/docker/entrypoint.sh"]
CMD ["python", "train.py", "--flagfile=configs/demo.cfg"]
