#!/usr/bin/env bash
# What a container does.
#
#   COMMAND...   run it (as: python train.py ..., launch/hosts.sh -H node1:8,node2:8 python ...)
#   sshd         serve ssh for a launcher on another host; SIGTERM makes ranks here save first
#   drain        make the ranks in this container save, and wait until they have ended
#   healthy      exit code 0 while the ssh server, where there is one, answers
set -euo pipefail

# As in launch/hosts.sh: a user's variables in small letters come back for the command.
declare -A LAUNCH_SH_EXPORTED=()
for LAUNCH_SH_NAME in $(compgen -e | LC_ALL=C grep '^[a-z]'); do
    LAUNCH_SH_EXPORTED[$LAUNCH_SH_NAME]=${!LAUNCH_SH_NAME} && unset "$LAUNCH_SH_NAME"
done
as_given() {
    for LAUNCH_SH_NAME in "${!LAUNCH_SH_EXPORTED[@]}"; do
        unset "$LAUNCH_SH_NAME" && export "$LAUNCH_SH_NAME=${LAUNCH_SH_EXPORTED[$LAUNCH_SH_NAME]}"
    done
    exec "$@"
}

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
launch=$(dirname "$here")/launch
# The ssh server's settings, key and process number: of this container (its /tmp), of this user.
own=/tmp/.sshd-$(id -u)
# The private key that all hosts of a run mount. Their servers show it, so ssh knows a host by it.
home=$(getent passwd "$(id -u)" | cut -d: -f6) || true # ssh's ~
key=$(compgen -G "$home/.ssh/id_*" | grep -v '\.pub$' | head -n 1) || true

# Variables that ssh sessions get: all of this container, besides those that a session sets itself and
# Kubernetes' own of services. A service has NAME_SERVICE_HOST and NAME_PORT=tcp://...
names() {
    local name port not='|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|HOSTNAME|TERM|_'
    for name in $(compgen -e | grep '_SERVICE_HOST$'); do
        name=${name%_SERVICE_HOST} port=${name%_SERVICE_HOST}_PORT
        [[ ${!port:-} != *://* ]] || not+="|${name}_(SERVICE_HOST|SERVICE_PORT.*|PORT|PORT_.*)"
    done
    # Without such variables, printf gives an empty line, which `not` leaves out.
    { compgen -e && printf '%s\n' "${!LAUNCH_SH_EXPORTED[@]}"; } | grep -vxE "$not"
}

# Writes the server's settings, with a host key and that environment, which may hold secrets: only
# this user can read them; the file appears whole.
prepare() {
    local name value settings
    getent passwd "$(id -u)" >/dev/null || {
        echo "error: user $(id -u) has no line in /etc/passwd, which ssh needs: run the image as the" \
            "user that it was built for (--build-arg UID=$(id -u) builds one for this user)" >&2
        exit 2
    }
    mkdir -m 700 "$own" 2>/dev/null || [ -d "$own" ] && [ -O "$own" ] && [ ! -L "$own" ] || {
        if [ ! -e "$own" ]; then
            echo "error: cannot make $own: $(dirname "$own") must be writable (an emptyDir, a tmpfs)" >&2
        else
            echo "error: $own is there and not this user's: remove it" >&2
        fi
        exit 1
    }
    chmod 700 "$own"
    if [ -n "$key" ]; then
        install -m 600 "$key" "$own/host_key"
    elif [ ! -e "$own/host_key" ]; then
        ssh-keygen -q -t ed25519 -N '' -f "$own/host_key"
    fi
    settings=$(mktemp "$own/sshd_config.XXXXXX")
    {
        cat "$here/sshd_config"
        echo "HostKey $own/host_key"
        printf 'SetEnv'
        while read -r name; do
            value=${LAUNCH_SH_EXPORTED[$name]-${!name-}}
            value=${value//\\/\\\\}
            if [[ $value == *$'\n'* ]]; then
                echo "ssh sessions do not get $name: its value has several lines" >&2
            else
                printf ' "%s=%s"' "$name" "${value//\"/\\\"}"
            fi
        done < <(names)
        echo
    } >"$settings"
    mv "$settings" "$own/sshd_config"
}

know_hosts() {
    [ -z "$key" ] || echo "* $(ssh-keygen -y -f "$key" </dev/null)" >"$home/.known_hosts" || true
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
    know_hosts
    prepare
    /usr/sbin/sshd -D -e -f "$own/sshd_config" &
    server=$!
    echo "$server" >"$own/pid"
    stopping=''
    trap 'stopping=yes; drain; kill "$server" || true' TERM
    trap 'stopping=yes; kill "$server" || true' INT
    while kill -0 "$server" 2>/dev/null; do wait "$server" || true; done # a signal ends a wait
    # With 0 a pod has succeeded, and Kubernetes never makes it anew.
    [ -z "$stopping" ] || exit 143
    wait "$server" # with its exit code
    ;;
drain) drain ;;
healthy)
    [ -e "$own/pid" ] || exit 0
    exec 3<>/dev/tcp/127.0.0.1/2222
    IFS= read -r -t 4 line <&3
    [[ $line == SSH-* ]]
    ;;
'') echo "error: no command; see the head of $0" >&2 && exit 2 ;;
*)
    know_hosts
    as_given "$@"
    ;;
esac
