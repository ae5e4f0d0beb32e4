# The image that every launcher in launch/ uses: training, and an ssh server for its hosts.
#
#   make image                      for GPUs
#   make image DEVICE=cpu           from plain Ubuntu
#   docker build --build-arg DEVICE=cpu --build-arg BASE_IMAGE=debian:bookworm \
#       --build-arg RUNTIME_IMAGE=debian:bookworm-slim .
#
# Both bases are of one distribution release: they share Python, Open MPI and the C library.
# On GPUs CUDA's run-time libraries come with TensorFlow from PyPI, so the image that runs needs
# the driver only, from the host. docker/build.sh says what else can be chosen: digests of the
# bases, mirrors, certificates, the user, further packages.
# By digest: nvidia/cuda:12.8.1-devel-ubuntu24.04 and ubuntu:24.04, of all architectures.
ARG BASE_IMAGE=nvidia/cuda@sha256:520292dbb4f755fd360766059e62956e9379485d9e073bbd2f6e3c20c270ed66
ARG RUNTIME_IMAGE=ubuntu@sha256:008173c23f95b170204355c12626cb5a965d779a7e1283b09e9cffbb1bf33ca3
# The folder that is trained from: template here, the whole project in a fork.
ARG PROJECT=template
# The engine: a fork has it in vendor.
ARG ENGINE=hvdkit

# ---------------------------------------------------------------- compilers, TensorFlow, Horovod
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
ARG DEVICE=gpu
ARG APT_MIRROR=
ARG PIP_INDEX_URL=

# The base image's digest pins the versions of system packages. apt reads the certificates as its own
# user, _apt, hence mode 0444.
COPY docker/apt-install.sh /usr/local/sbin/apt-install
RUN --mount=type=secret,id=ca,mode=0444 apt-install \
        build-essential ca-certificates cmake libopenmpi-dev openmpi-bin openssh-client \
        python3 python3-dev python3-venv

WORKDIR /build
ARG PROJECT
ARG ENGINE
COPY requirements.txt ${PROJECT}/pyproject.toml ${PROJECT}/uv.lock ./
COPY docker/install-horovod.sh docker/
COPY docker/compat docker/compat
COPY docker/setup docker/setup
COPY ${ENGINE} hvdkit/
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 HOROVOD_WHEELS=/tmp/wheels
# At its end two ranks are tried, and Gloo crashes where a host's own name does not resolve, as in
# the builds of some tools.
RUN --mount=type=secret,id=ca,mode=0444 --mount=type=secret,id=pip.conf \
    if ! getent hosts "$(hostname)"; then echo "127.0.0.1 $(hostname)" >>/etc/hosts; fi \
    && if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && if [ -e /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi \
    && if [ -z "$PIP_INDEX_URL" ]; then unset PIP_INDEX_URL; fi \
    && python3 -m venv --without-pip /opt/venv \
    && PYTHON=/opt/venv/bin/python DEVICE=$DEVICE docker/install-horovod.sh --requirements \
    && horovodrun --check-build \
    && rm -f /opt/venv/.lock

# ---------------------------------------------------------------------------------- what runs
# hadolint ignore=DL3006
FROM ${RUNTIME_IMAGE} AS run
ARG APT_MIRROR=
# InfiniBand's user space (ibverbs, rdmacm), signals and zombies (tini).
# Host keys that the ssh server's package makes are removed: one for all users is nobody's.
# Under plain mpirun, ranks have 5 s to save after SIGTERM, not 1. Plain mpirun and srun take the
# transports that hosts.sh takes: launch/README.md.
COPY docker/apt-install.sh /usr/local/sbin/apt-install
RUN --mount=type=secret,id=ca,mode=0444 apt-install \
        ca-certificates ibverbs-providers iproute2 libgomp1 libibverbs1 librdmacm1 openmpi-bin \
        openssh-client openssh-server python3 rsync tini \
    && printf '%s\n' "odls_base_sigkill_timeout = 5" "pml = ob1" "btl = ^openib" \
        >>/etc/openmpi/openmpi-mca-params.conf \
    && rm -f /etc/ssh/ssh_host_*

# Further system packages, as in EXTRA_PACKAGES="libnuma1 strace".
ARG EXTRA_PACKAGES=
# hadolint ignore=SC2086
RUN --mount=type=secret,id=ca,mode=0444 if [ -n "$EXTRA_PACKAGES" ]; then apt-install $EXTRA_PACKAGES; fi

# The user who runs it owns what a run writes, and nothing else. Its group there is 0, as which
# clusters run users whom the image does not know (OpenShift). No program runs as another user.
ARG UID=1000
ARG GID=1000
RUN if id ubuntu 2>/dev/null; then userdel --remove ubuntu; fi \
    && if ! getent group "$GID"; then groupadd --gid "$GID" trainer; fi \
    && useradd --uid "$UID" --gid "$GID" --no-log-init --create-home --shell /bin/bash trainer \
    && install -d /app /data \
    && install -d -o "$UID" -g 0 -m 0770 /home/trainer /home/trainer/.ssh /runs \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} +

COPY --from=build /opt/venv /opt/venv
COPY docker/ssh_config /etc/ssh/ssh_config.d/cluster.conf
ARG PROJECT
COPY ${PROJECT}/ /app/
COPY launch/ /app/launch/
COPY docker/ /app/docker/
# Also where the checkout's files were its owner's alone.
RUN chmod -R a+rX,go-w /app \
    && chmod 644 /etc/ssh/ssh_config.d/cluster.conf \
    && install -d -o "$UID" -g 0 -m 0775 /app/runs /app/datasets

# Facts of a build (version, revision, base) are added by docker/build.sh.
LABEL org.opencontainers.image.title="train" \
      org.opencontainers.image.description="TensorFlow training on many nodes with Horovod" \
      org.opencontainers.image.licenses="MIT"

# What NVIDIA's container tools (Docker's, Enroot's) bring in from the host; void: nothing.
ARG NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV HOME=/home/trainer PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER ${UID}:${GID}
WORKDIR /app
EXPOSE 2222
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["/app/docker/entrypoint.sh", "healthy"]
ENTRYPOINT ["/usr/bin/tini", "--", "/app/docker/entrypoint.sh"]
CMD ["python", "train.py", "--flagfile=configs/demo.cfg"]
