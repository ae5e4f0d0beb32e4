#!/usr/bin/env bash
# Builds the image with docker (BuildKit), or with buildah where that is what there is.
#
#   DEVICE                      gpu (default) or cpu
#   BASE_IMAGE, RUNTIME_IMAGE   to build on and to run on, of one distribution release; by digest
#                               for an image that can be built again: ubuntu@sha256:...
#   IMAGE                       name to give it       train:gpu, train:cpu
#   BUILDER                     docker or buildah     docker where its service runs
#   SBOM                        file for a list of the Python packages in it (CycloneDX, JSON)
#
# Further flags go to the builder as they are:
#   docker/build.sh --build-arg UID=$(id -u) --build-arg GID=$(id -g)      the user who runs it
#   docker/build.sh --build-arg EXTRA_PACKAGES="strace libnuma1"           further system packages
#   docker/build.sh --build-arg APT_MIRROR=https://mirror.example.com/apt  has debian/ or ubuntu/
#   docker/build.sh --build-arg PIP_INDEX_URL=https://mirror.example.com/pypi/simple
#   docker/build.sh --secret id=pip.conf,src=$HOME/.config/pip/pip.conf    the same with a password:
#       it does not get into the image, if the file is outside the project
#   docker/build.sh --secret id=ca,src=ca.pem           certificates that all of them are trusted by
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

# A list of packages is made for this machine's processor and for DEVICE.
case "${DOCKER_DEFAULT_PLATFORM:+ --platform} $* " in
*' --platform'* | *' --build-arg DEVICE='* | *' --build-arg=DEVICE='*)
    if [ -n "${SBOM:-}" ]; then
        echo "error: SBOM=$SBOM would list another image's packages: leave out SBOM, or --platform" \
            "(DOCKER_DEFAULT_PLATFORM) and --build-arg DEVICE; DEVICE=cpu is a variable" >&2
        exit 2
    fi
    ;;
esac

device=${DEVICE:-gpu}
image=${IMAGE:-train:$device}
plain=$(sed -n 's/^ARG RUNTIME_IMAGE=//p' Dockerfile)
words=(--build-arg "DEVICE=$device" --tag "$image")
if [ "$device" = cpu ]; then
    : "${BASE_IMAGE:=$plain}"
    words+=(--build-arg NVIDIA_VISIBLE_DEVICES=void)
fi
runtime=${RUNTIME_IMAGE:-$plain}
words+=(--build-arg "RUNTIME_IMAGE=$runtime")
[ -z "${BASE_IMAGE:-}" ] || words+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")

# label NAME VALUE: of OCI's names; nothing where it is not known.
label() {
    [ -z "$2" ] || words+=(--label "org.opencontainers.image.$1=$2")
}
label created "$(date -u -d "@${SOURCE_DATE_EPOCH:-$(date +%s)}" +%FT%TZ)"
label revision "$(git rev-parse HEAD 2>/dev/null || true)"
label version "$(git describe --tags --always --dirty 2>/dev/null || true)"
# Without the user and the password that an address may hold.
label source "$(git remote get-url origin 2>/dev/null | sed 's#//[^/@]*@#//#' || true)"
label base.name "$runtime"
label base.digest "$(grep -o 'sha256:[0-9a-f]\{64\}$' <<<"$runtime" || true)"

if [ -z "${BUILDER:-}" ]; then
    if docker info >/dev/null 2>&1; then
        BUILDER=docker
    elif command -v buildah >/dev/null; then
        BUILDER=buildah
    fi
fi
case ${BUILDER:-} in
docker)
    # podman may answer to this name; its own format of images has no health checks.
    ! docker build --help 2>/dev/null | grep -e '--format' >/dev/null || words+=(--format docker)
    DOCKER_BUILDKIT=1 docker build "${words[@]}" "$@" .
    ;;
# Docker's format: the other one has no health checks.
buildah) buildah build --format docker --network host "${words[@]}" "$@" . ;;
'')
    echo "error: neither docker (is its service running?) nor buildah is here" >&2
    exit 1
    ;;
*)
    echo "error: BUILDER=$BUILDER is neither docker nor buildah" >&2
    exit 2
    ;;
esac
# A builder of docker's that is a container of its own keeps what it builds.
if [ "$BUILDER" = docker ] && ! docker image inspect "$image" >/dev/null 2>&1; then
    echo "built $image, which is not among the images here: --load puts it there, --push into a registry"
else
    echo "built $image"
fi

[ -z "${SBOM:-}" ] || DEVICE=$device docker/install-horovod.sh --sbom "$SBOM"
