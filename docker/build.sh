#!/usr/bin/env bash
# Builds the image with docker, or with buildah where that is what there is.
#
#   DEVICE                      gpu (default) or cpu
#   BASE_IMAGE, RUNTIME_IMAGE   to build on and to run on, of one distribution release
#   IMAGE                       name to give it       train:gpu, train:cpu
#   BUILDER                     docker or buildah     docker where its service runs
# Further flags go to the builder as they are.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

device=${DEVICE:-gpu}
image=${IMAGE:-train:$device}
if [ "$device" = cpu ]; then
    : "${BASE_IMAGE:=ubuntu:24.04}" "${RUNTIME_IMAGE:=ubuntu:24.04}"
fi
words=(--build-arg "DEVICE=$device" --tag "$image")
[ -z "${BASE_IMAGE:-}" ] || words+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
[ -z "${RUNTIME_IMAGE:-}" ] || words+=(--build-arg "RUNTIME_IMAGE=$RUNTIME_IMAGE")
if revision=$(git rev-parse --short HEAD 2>/dev/null); then
    words+=(--build-arg "REVISION=$revision")
fi

if [ -z "${BUILDER:-}" ]; then
    if docker info >/dev/null 2>&1; then
        BUILDER=docker
    elif command -v buildah >/dev/null; then
        BUILDER=buildah
    fi
fi
case ${BUILDER:-} in
docker) docker build "${words[@]}" "$@" . ;;
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
echo "built $image"
