#!/usr/bin/env bash
# Makes the ranks on this host save and end (SIGUSR1). One rank is enough: all ranks learn of it at
# their next step. They exit with code 75; the same command resumes the run.
#
#   stop.sh            the ranks of every run on this host
#   stop.sh ID         only those of the run that was launched with LAUNCH_ID=ID
#   stop.sh ID KILL    ends them at once, with all processes that they started; nothing is saved
#   stop.sh ID LEFT    ends what is left after the launcher has ended: 12 s to save, then SIGKILL
#   stop.sh ID BEGUN   whether one is here
#   stop.sh ID WATCH   takes lines from hosts.sh, each USR1, KILL or LEFT, or DONE at the end of the
#                      run, or empty: the launcher is still there. LEFT when none comes for 15 s

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

# send SIGNAL PIDS ANY: sets `sent` to how many got it; ANY: they may be of other programs.
send() {
    sent=0 listening=''
    for pid in $2; do
        if listens "$pid"; then listening=yes; fi
    done
    for pid in $2; do
        # Not to a shell around a rank, nor to what a rank has started; nor to other programs of MPI,
        # which the signal would end.
        if [ "$1" = USR1 ] && [ -n "$listening$3" ] && ! listens "$pid"; then continue; fi
        kill "-$1" "$pid" 2>/dev/null && sent=$((sent + 1))
    done
    echo "sent $1 to $sent rank(s) on $(uname -n)"
}

# signal_ranks SIGNAL ID
signal_ranks() {
    pids=$(ranks "$2" | tr "\n" " ")
    send "$1" "$pids" "$([ -n "$2" ] || echo any)"
    [ "$sent" -gt 0 ]
}

# end_left ID: also Open MPI's daemon, which otherwise waits 15 minutes to send what ranks printed
end_left() {
    signal_ranks USR1 "$1" || return 0
    daemons=$(for pid in $pids; do sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null; done)
    for _ in {1..12}; do
        [ -n "$(ranks "$1")" ] || break
        sleep 1
    done
    signal_ranks KILL "$1"
    for pid in $daemons; do
        if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = orted ]; then kill -KILL "$pid"; fi
    done
}

# report ID: prints that Open MPI's daemon of the run is here, and that a rank has begun, once each;
# a rank without that environment (env -i) is known by its parent.
report() {
    [ "${begun:-}" != rank ] || return 0
    daemon=$(grep -lsE "launch-$1[.][[:alnum:]]{8}([^.[:alnum:]]|$)" /proc/[0-9]*/cmdline | while IFS=/ read -r _ _ pid _; do
        if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = orted ]; then echo "$pid"; fi
    done)
    [ -z "${daemon:-}" ] || [ -n "${begun:-}" ] || { begun=daemon && echo "launch: daemon"; }
    if [ -n "$(ranks "$1")" ] || { [ -n "$daemon" ] && grep -qsx "PPid:[[:space:]]*$daemon" /proc/[0-9]*/status; }; then
        begun=rank
        echo "launch: rank"
    fi
}

# watch ID
watch() {
    while read -r -t 15 word; do
        case $word in
        '') report "$1" ;;
        DONE) return ;;
        USR1) signal_ranks USR1 "$1" ;;
        KILL) signal_ranks KILL "$1" || true; return ;;
        *) break ;;
        esac
    done
    end_left "$1"
}

case ${2:-USR1} in
WATCH)
    watch "$1"
    rm -rf -- "${TMPDIR:-/tmp}/launch-$1."???????? # which daemon.sh made
    ;;
LEFT) end_left "$1" ;;
BEGUN) [ -n "$(ranks "$1")" ] ;;
*) signal_ranks "${2:-USR1}" "${1:-}" ;;
esac
