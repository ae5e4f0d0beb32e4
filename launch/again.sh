#!/usr/bin/env bash
# Starts a run again until it is done, where nothing else tells its exit codes apart: the launcher
# of mpijob.yaml. Kubernetes would start a wrong flag or a diverged run again like a preempted one.
#
#   launch/again.sh [OPTIONS] launch/hosts.sh ... python train.py ...
#
#   --hostfile FILE   before each start wait until these hosts answer ssh, for 30 minutes at most
#   --crashes N       so many crashes are followed by another start (10)
#   --ended FILE      the exit code of an end for good is kept there, and given back at once to
#                     whoever starts this again
#
#   75 told to stop, saved                   starts again; not after ten in a row, each within a
#                                            minute of its start: something stops every run
#   0 done, 2 wrong use, 3 diverged, 126 and 127 no such command      ends for good
#   anything else, a crash                   starts again, after 10, 20, 40, ... 300 seconds
#
# SIGTERM, SIGINT, SIGHUP or SIGUSR1 to this script makes the ranks save; it then ends with their
# exit code.
set -euo pipefail

hostfile='' crashes=10 ended='' told='' heard='' passed='' child='' code=0
first=${AGAIN_PAUSE:-10} patience=${AGAIN_PATIENCE:-1800} # tests bring their own

die() {
    echo "error: $*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --hostfile) hostfile=${2:?$1 wants a file} && shift ;;
    --crashes) crashes=${2:?$1 wants a number} && shift ;;
    --ended) ended=${2:?$1 wants a file} && shift ;;
    --) shift && break ;;
    -*) die "unknown option $1: see the head of $0" ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || die "no command to run: see the head of $0"
[[ $crashes =~ ^[0-9]+$ ]] || die "--crashes '$crashes' is not a number"
[ -z "$hostfile" ] || [ -r "$hostfile" ] || die "cannot read the hostfile $hostfile"

say() {
    echo "again.sh: $*" >&2
}

# end CODE: for good, also for a pod that is made anew, which remembers nothing else.
end() {
    if [ -n "$ended" ] && ! echo "$1" >"$ended"; then
        say "cannot write $ended: another start will not know that this run has ended"
    fi
    exit "$1"
}

# shellcheck disable=SC2329 # signals call it
tell() {
    told=yes heard=yes
    pass_on
}
trap tell TERM INT HUP USR1

# Once: a second one might mean to end without saving.
pass_on() {
    if [ -n "$told" ] && [ -n "$child" ] && [ -z "$passed" ]; then
        passed=yes
        # Until it is the command, it is a copy of this shell that loses signals.
        while cmp -s "/proc/$$/cmdline" "/proc/$child/cmdline"; do sleep 0.02; done
        kill -TERM "$child" 2>/dev/null || true
    fi
}

# in_background COMMAND...: sets `code`; a signal reaches `tell` while it runs.
in_background() {
    "$@" &
    child=$!
    pass_on # a signal that came before its number was known here
    while :; do
        heard='' code=0
        wait "$child" || code=$?
        [ -n "$heard" ] || break # else a signal may have ended the wait
    done
    # The command ended as the signal came, and bash has lost how: the next start will tell.
    case $told$code in yes-1 | yes127) code=75 ;; esac
    child=''
}

# A worker that was drained needs a new node first. That is no crash.
wait_for_hosts() {
    local name names since=$SECONDS said
    mapfile -t names < <(sed -e 's/#.*//' -e 's/[[:space:]:].*//' -e '/^$/d' "$hostfile")
    for name in "${names[@]}"; do
        said=''
        while [ -z "$told" ]; do
            in_background ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=10 "$name" true 2>/dev/null
            [ "$code" != 0 ] || break
            [ -n "$said" ] || say "waiting for $name to answer ssh"
            said=yes
            if [ $((SECONDS - since)) -ge "$patience" ]; then
                say "error: no answer to ssh from $name for $patience seconds; when that host is" \
                    "there, start the job again: it goes on from what was saved"
                end 1
            fi
            in_background sleep 5
        done
    done
}

if [ -n "$ended" ] && [ -s "$ended" ]; then
    code=$(cat "$ended")
    [[ $code =~ ^[0-9]+$ ]] || die "$ended does not hold an exit code: remove it"
    say "this run has ended for good, with exit code $code, as $ended says"
    exit "$code"
fi

crashed=0 stopped=0 pause=$first
while :; do
    [ -z "$hostfile" ] || wait_for_hosts
    [ -z "$told" ] || exit 75 # between two runs: nothing to save
    start=$SECONDS
    in_background "$@"
    if [ "$code" != 75 ] || [ $((SECONDS - start)) -ge 60 ]; then stopped=0; fi
    case $code in
    0 | 2 | 3 | 126 | 127) end "$code" ;;
    75)
        [ -z "$told" ] || exit 75
        stopped=$((stopped + 1))
        if [ "$stopped" -ge 10 ]; then
            say "error: told to stop within a minute of its start, $stopped times in a row: find" \
                "out what stops it, then start the job again: it goes on from what was saved"
            end 1
        fi
        say "the run was told to stop and has saved: it goes on"
        ;;
    *)
        [ -z "$told" ] || exit "$code"
        crashed=$((crashed + 1))
        if [ "$crashed" -gt "$crashes" ]; then
            say "error: exit code $code, crash number $crashed: no further start"
            end "$code"
        fi
        say "exit code $code, crash $crashed of $crashes: starting again"
        ;;
    esac
    if [ "$code" = 75 ] || [ $((SECONDS - start)) -gt 600 ]; then pause=$first; fi
    in_background sleep "$pause"
    pause=$((pause * 2 > 300 ? 300 : pause * 2))
done
