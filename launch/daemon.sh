#!/usr/bin/env bash
# hosts.sh starts Open MPI's daemon on each other host by this: with the guard, and with a folder of
# its own for Open MPI's files. Open MPI's usual place, /tmp/ompi.HOST.UID, may be there already, made
# by another user, who could then have it overwrite any file of this one. stop.sh removes the folder.
#
#   daemon.sh ssh OPTIONS... -- HOST COMMAND...   mpirun's command for a login shell, by ssh
#   daemon.sh ID GUARD FOLDER ORTED WORDS...      GUARD: the guard's file, or - for none
#   daemon.sh prove WORD PORT ADDRESS... -- PATH...  for reach.py: that it runs, reaches that host, and has these
#
# FOLDER is the one of the host that starts this daemon: its name is among the words.
set -eu

case $1 in
ssh) # mpirun writes for the shell of its own host: what comes before the daemon's words is left out
    options=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    host=$2 here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
    shift 2
    words=${*%\)} # of (...), as it writes for sh
    words="${OPAL_PREFIX:+OPAL_PREFIX=$OPAL_PREFIX }exec bash $here/daemon.sh ${words#*"bash $here/daemon.sh "}"
    status=0
    "${options[@]}" -- "$host" "exec sh -c '${words//\'/\'\\\'\'}'" || status=$? # as sh, tcsh and fish read it
    [ "$status" != 0 ] || exit 0
    echo "error: cannot start on $host: Open MPI's daemon ended there with exit code $status: see its own words above" >&2
    read -r _ _ folder _ <<<"${words#*"$here/daemon.sh "}"
    touch "$folder/no-daemon" 2>/dev/null || true
    exit "$status"
    ;;
prove)
    word=$2 port=$3
    shift 3
    addresses=()
    while [ "$1" != -- ]; do addresses+=("$1") && shift; done
    shift
    for path; do
        [ -e "$path" ] || { printf '\n%s missing %s\n' "$word" "$path" && break; }
    done
    read -r from _ own _ <<<"${SSH_CONNECTION:-}"
    network=$(PATH=$PATH:/usr/sbin:/sbin ip -4 -o address show to "$own" 2>/dev/null | sed 's/^[0-9]*: lo .*/lo/;s/.* inet //;s/ .*//;q')
    printf '\n%s from %s\n%s network %s\n' "$word" "$from" "$word" "$network"
    # shellcheck disable=SC2016 # the inner bash expands it
    connect='exec 3<>"/dev/tcp/$0/$1" && read -r line <&3 && echo "$line"'
    for address in $from ${addresses[@]+"${addresses[@]}"}; do
        {
            said=$(LC_ALL=C timeout 8 bash -c "$connect" "$address" "$port" 2>&1) || true
            echo "$word back $address ${said##*: }"
        } &
    done
    wait
    exit
    ;;
esac

id=$1 guard=$2 theirs=$3
shift 3
case $1 in */bin/orted) # an environment's is not on the PATH of ssh
    export PATH="${1%/orted}:$PATH"
    export LD_LIBRARY_PATH="${1%/bin/orted}/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    ;;
esac
folder=$(umask 077 && mktemp -d "${TMPDIR:-/tmp}/launch-$id.XXXXXXXX")
[ "$guard" = - ] || export LD_PRELOAD="$guard${LD_PRELOAD:+:$LD_PRELOAD}"
exec "${@/"$theirs"/$folder}"
