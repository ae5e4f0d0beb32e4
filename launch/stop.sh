#!/bin/sh
# Tells the ranks on this host to save and end (SIGUSR1): one that hears it is enough, all ranks
# learn of it at their next step. They exit with code 75; the same command goes on from there.
#
#   stop.sh            the ranks of every run on this host
#   stop.sh ID         only those of the run that was launched with LAUNCH_ID=ID
#   ssh HOST sh -s ID <stop.sh

mine='' told=0
for file in /proc/[0-9]*/environ; do
    pid=${file#/proc/}
    pid=${pid%/environ}
    # In the environment that the process was started with, variables end with a zero byte.
    tr '\0' '\n' 2>/dev/null <"$file" >"/tmp/.stop.$$" || continue
    grep -qE '^(HOROVOD_RANK|OMPI_COMM_WORLD_RANK|PMIX_RANK)=' "/tmp/.stop.$$" || continue
    [ -z "${1:-}" ] || grep -qxF "LAUNCH_ID=$1" "/tmp/.stop.$$" || continue
    mine="$mine $pid "
done
rm -f "/tmp/.stop.$$"

for pid in $mine; do
    # Not what a rank has started itself: it knows nothing of this signal.
    parent=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null)
    case $mine in *" $parent "*) continue ;; esac
    kill -USR1 "$pid" 2>/dev/null && told=$((told + 1))
done
echo "told $told rank(s) on $(uname -n) to save and stop"
[ "$told" -gt 0 ]
