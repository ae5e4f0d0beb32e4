#!/usr/bin/env bash
# hosts.sh starts Open MPI's daemon on each other host by this: with the guard, and with a folder of
# its own for Open MPI's files. Open MPI's usual place, /tmp/ompi.HOST.UID, may be there already, made
# by another user, who could then have it overwrite any file of this one. stop.sh removes the folder.
#
#   daemon.sh ID GUARD FOLDER ORTED WORDS...     GUARD: the guard's file, or - for none
#
# FOLDER is the one of the host that starts this daemon: its name is among the words.
set -eu

id=$1 guard=$2 theirs=$3
shift 3
folder=$(umask 077 && mktemp -d "${TMPDIR:-/tmp}/launch-$id.XXXXXXXX")
[ "$guard" = - ] || export LD_PRELOAD="$guard${LD_PRELOAD:+:$LD_PRELOAD}"
exec "${@/"$theirs"/$folder}"
