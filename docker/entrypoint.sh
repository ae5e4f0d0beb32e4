#!/usr/bin/env bash
# What a container does.
#
#   COMMAND...   run it (as: python train.py ..., launch/hosts.sh -H node1:8,node2:8 python ...)
#   sshd         serve ssh for a launcher on another host; SIGTERM makes ranks here save first
#   drain        make the ranks in this container save, and wait until they have ended
#   healthy      exit code 0 while the ssh server, where there is one, answers
set -euo pipefail

own=$HOME/.sshd
launch=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")/launch

# The server's settings, with a host key of this container and with what ssh sessions shall find
# in their environment: they do not get the container's by themselves.
prepare() {
    mkdir -p "$own" 2>/dev/null || own=$(mktemp -d)
    [ -e "$own/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$own/host_key"
    {
        cat "$(dirname "${BASH_SOURCE[0]}")/sshd_config"
        echo "HostKey $own/host_key"
        printf 'SetEnv'
        while read -r name; do
            [[ ${!name} == *[\"$'\n']* ]] || printf ' "%s=%s"' "$name" "${!name}"
        done < <(compgen -e | grep -vE '^(HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|HOSTNAME|TERM|_|KUBERNETES_.*|.*_(SERVICE|PORT)(_.*)?)$')
        echo
    } >"$own/sshd_config"
}

ranks() {
    grep -lzE '^(HOROVOD_RANK|OMPI_COMM_WORLD_RANK|PMIX_RANK)=' /proc/[0-9]*/environ 2>/dev/null
}

drain() {
    "$launch/stop.sh" || return 0 # none here
    while [ -n "$(ranks)" ]; do sleep 1; done
}

case ${1:-} in
sshd)
    prepare
    /usr/sbin/sshd -D -e -f "$own/sshd_config" &
    server=$!
    echo "$server" >/tmp/.sshd.pid
    trap 'drain; kill "$server"' TERM
    trap 'kill "$server"' INT
    code=0
    wait "$server" || code=$?
    while kill -0 "$server" 2>/dev/null; do wait "$server" || code=$?; done
    [ "$code" -gt 128 ] && exit 0 # ended by us
    exit "$code"
    ;;
drain) drain ;;
healthy)
    [ -e /tmp/.sshd.pid ] || exit 0
    exec 3<>/dev/tcp/127.0.0.1/2222
    IFS= read -r -t 4 line <&3
    [[ $line == SSH-* ]]
    ;;
'') echo "error: no command; see the head of $0" >&2 && exit 2 ;;
*) exec "$@" ;;
esac
