#!/bin/sh
# Tells the ranks on this host to save and end (SIGUSR1). One rank is enough: all ranks learn of it
# at their next step. They exit with code 75; the same command resumes the run.
#
#   stop.sh            the ranks of every run on this host
#   stop.sh ID         only those of the run that was launched with LAUNCH_ID=ID
#   stop.sh ID KILL    ends them at once, with all processes that they started; nothing is saved
#   stop.sh ID LEFT    ends what is left after the launcher has ended: 20 s to save, then SIGKILL
#   ssh HOST sh -s ID <stop.sh

signal=${2:-USR1}

# The environment that a process was started with: variables that end with a zero byte. Without
# /dev/null, grep would read this script's input where no process is left to look at.
ranks() {
    files=$(grep -lszE '^(HOROVOD_RANK|OMPI_COMM_WORLD_RANK|PMIX_RANK)=' /proc/[0-9]*/environ)
    # shellcheck disable=SC2086 # a list of files
    [ -z "$1" ] || files=$(grep -lszxF "LAUNCH_ID=$1" /dev/null $files)
    for file in $files; do
        pid=${file#/proc/}
        echo "${pid%/environ}"
    done
}

# Whether a process has a handler for SIGUSR1, number 10.
listens() {
    caught=$(sed -n 's/^SigCgt:[[:space:]]*.*\(.\)..$/\1/p' "/proc/$1/status" 2>/dev/null)
    case $caught in [2367aAbBeEfF]) ;; *) return 1 ;; esac
}

# send SIGNAL PIDS: sets `told` to how many got it.
send() {
    told=0 listening=''
    for pid in $2; do
        if listens "$pid"; then listening=yes; fi
    done
    for pid in $2; do
        # Only who listens: not a shell around a rank, nor what a rank has started.
        if [ "$1" = USR1 ] && [ -n "$listening" ] && ! listens "$pid"; then continue; fi
        kill "-$1" "$pid" 2>/dev/null && told=$((told + 1))
    done
    echo "sent $1 to $told rank(s) on $(uname -n)"
}

pids=$(ranks "${1:-}" | tr "\n" " ")
if [ "$signal" = LEFT ]; then
    [ -n "$pids" ] || exit 0
    send USR1 "$pids"
    for _ in $(seq 20); do
        pids=$(ranks "$1" | tr "\n" " ")
        [ -n "$pids" ] || exit 0
        sleep 1
    done
    signal=KILL
fi
send "$signal" "$pids"
[ "$told" -gt 0 ]
