#!/bin/sh
# Tells the ranks on this host to save and end (SIGUSR1): one that hears it is enough, all ranks
# learn of it at their next step. They exit with code 75; the same command goes on from there.
#
#   stop.sh            the ranks of every run on this host
#   stop.sh ID         only those of the run that was launched with LAUNCH_ID=ID
#   stop.sh ID KILL    ends them at once, with all that they started; nothing is saved
#   ssh HOST sh -s ID <stop.sh

signal=${2:-USR1} mine=' ' told=0
# The environment that a process was started with: variables that end with a zero byte. Without
# /dev/null, grep would read this script's input where no process is left to look at.
files=$(grep -lszE '^(HOROVOD_RANK|OMPI_COMM_WORLD_RANK|PMIX_RANK)=' /proc/[0-9]*/environ)
# shellcheck disable=SC2086 # a list of files
[ -z "${1:-}" ] || files=$(grep -lszxF "LAUNCH_ID=$1" /dev/null $files)
for file in $files; do
    pid=${file#/proc/}
    mine="$mine${pid%/environ} "
done

for pid in $mine; do
    if [ "$signal" = USR1 ]; then
        # Not what a rank has started itself: it knows nothing of this signal.
        parent=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null)
        case $mine in *" $parent "*) continue ;; esac
    fi
    kill "-$signal" "$pid" 2>/dev/null && told=$((told + 1))
done
echo "sent $signal to $told rank(s) on $(uname -n)"
[ "$told" -gt 0 ]
