#!/usr/bin/env bash
# hosts.sh starts Open MPI's daemon on each other host by this: with the guard, and with folders of its
# own for Open MPI's files and for the memory that ranks share. Open MPI's usual places, /tmp/ompi.HOST.UID
# and /dev/shm/vader_segment.*, may be there already, made by another user, who could then have it
# overwrite any file of this one, or change what ranks exchange. stop.sh removes the folders.
#
#   daemon.sh ssh OPTIONS... -- HOST COMMAND...   mpirun's command for a login shell, by ssh
#   daemon.sh ID GUARD FOLDER SEGMENTS ORTED WORDS...  GUARD: the guard's file, or - for none
#   daemon.sh prove WORD PORT ADDRESS...          for reach.py: that it runs, and reaches that host
#
# FOLDER is the one of the host that starts this daemon: its name is among the words. SEGMENTS, where
# ranks share memory, has the same name on all hosts.
set -eu

case $1 in
ssh) # mpirun writes for the shell of its own host: what comes before the daemon's words is left out
    options=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    host=$2 here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
    shift 2
    words=${*%\)} # of (...), as it writes for sh
    words="${OPAL_PREFIX:+OPAL_PREFIX=$OPAL_PREFIX }exec bash $here/daemon.sh ${words#*"bash $here/daemon.sh "}"
    exec "${options[@]}" -- "$host" "exec sh -c '${words//\'/\'\\\'\'}'" # as sh, tcsh and fish read it
    ;;
prove)
    word=$2 port=$3
    shift 3
    read -r from _ own _ <<<"${SSH_CONNECTION:-}"
    network=$(PATH=$PATH:/usr/sbin:/sbin ip -4 -o address show to "$own" 2>/dev/null | sed 's/.* inet //;s/ .*//;q')
    printf '\n%s from %s\n%s network %s\n' "$word" "$from" "$word" "$network"
    # shellcheck disable=SC2016 # the inner bash expands it
    connect='exec 3<>"/dev/tcp/$0/$1" && read -r line <&3 && echo "$line"'
    for address in $from "$@"; do
        {
            said=$(LC_ALL=C timeout 8 bash -c "$connect" "$address" "$port" 2>&1) || true
            echo "$word back $address ${said##*: }"
        } &
    done
    wait
    exit
    ;;
esac

id=$1 guard=$2 theirs=$3 segments=$4
shift 4
case $1 in */bin/orted) # an environment's is not on the PATH of ssh
    export PATH="${1%/orted}:$PATH"
    export LD_LIBRARY_PATH="${1%/bin/orted}/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    ;;
esac
folder=$(umask 077 && mktemp -d "${TMPDIR:-/tmp}/launch-$id.XXXXXXXX")
mkdir -m 700 "$segments" 2>/dev/null || { [ -O "$segments" ] && [ ! -L "$segments" ]; } || {
    echo "error: $(uname -n): cannot make the folder $segments, for the memory that ranks share" >&2
    exit 1
}
[ "$guard" = - ] || export LD_PRELOAD="$guard${LD_PRELOAD:+:$LD_PRELOAD}"
exec "${@/"$theirs"/$folder}"
