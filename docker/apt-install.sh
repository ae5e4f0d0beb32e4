#!/bin/sh
# Installs system packages while an image is built, and leaves no lists behind.
#
#   apt-install PACKAGE...
#
#   APT_MIRROR          a server for /debian, /debian-security and /ubuntu instead of the
#                       distribution's own server, as in https://mirror.example.com/apt
#   /run/secrets/ca     certificates (PEM) by which a mirror is trusted
set -eu

servers='https?://((deb|security)\.debian\.org|(archive|security|ports)\.ubuntu\.com)'
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT

apt() {
    if [ -e /run/secrets/ca ]; then set -- -o Acquire::https::CAInfo=/run/secrets/ca "$@"; fi
    if [ -n "${APT_MIRROR:-}" ]; then
        set -- -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$lists" "$@"
    fi
    DEBIAN_FRONTEND=noninteractive apt-get "$@"
}

# Only what the mirror has: other servers (NVIDIA's) would be asked in vain.
if [ -n "${APT_MIRROR:-}" ]; then
    mirror=$(printf '%s' "${APT_MIRROR%/}" | sed 's/[\\&#]/\\&/g')
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
        if grep -qE "$servers" "$file" 2>/dev/null; then
            sed -E "s#$servers#$mirror#" "$file" >"$lists/${file##*/}"
        fi
    done
fi
apt update
apt install -y --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/*
