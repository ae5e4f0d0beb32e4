#!/usr/bin/env bash
# Restarts a run until it is done: after a crash, after a stop, on the remaining hosts.
# mpijob.yaml uses it too: Kubernetes itself would restart a wrong flag like a preempted run.
#
#   launch/again.sh [OPTIONS] launch/hosts.sh ... python train.py ...
#   launch/again.sh --hostfile hosts.txt --fewer 2 launch/hosts.sh python train.py ...
#
#   --hostfile FILE   before each start, wait until these hosts answer ssh, at most 30 minutes;
#                     hosts.sh without -H and --hostfile uses them
#   --hosts-from CMD  the same with the hosts that CMD prints before each start, `node1:8` per line
#   --fewer N         leave out hosts that do not answer 5 s after a run has ended, if N or more do
#                     answer; the next start takes them back
#   --crashes N       restart after at most this many crashes (10)
#   --ended FILE      save the final exit code in FILE; started again, this script returns it at once
#
#   75 stopped, saved                        restarts after 5 s; not after ten in a row, each within
#                                            a minute of its start: something stops every run
#   0 done, 2 wrong use, 3 diverged, 126 and 127 no such command      ends
#   anything else, a crash                   restarts at once, then after 5, 10, ... 300 s; not after
#                                            three in a row, each within a minute of its start
#
# SIGTERM, SIGINT, SIGHUP or SIGUSR1 to this script makes the ranks save; it then ends with their
# exit code.
set -euo pipefail

hostfile='' from='' fewer='' crashes=10 ended='' stopping='' heard='' passed='' child='' code=0
first=${AGAIN_PAUSE:-5} patience=${AGAIN_PATIENCE:-1800} grace=${AGAIN_GRACE:-5} # for tests
answer=${AGAIN_ANSWER:-30} # seconds that a host's shell has

die() { echo "error: $*" >&2 && exit 2; }
say() { echo "again.sh: $*" >&2; }

while [ $# -gt 0 ]; do
    case $1 in
    --hostfile) hostfile=${2:?$1 needs a file} && shift ;;
    --hosts-from) from=${2:?$1 needs a command} && shift ;;
    --fewer) fewer=${2:?$1 needs a number} && shift ;;
    --crashes) crashes=${2:?$1 needs a number} && shift ;;
    --ended) ended=${2:?$1 needs a file} && shift ;;
    --) shift && break ;;
    -*) die "unknown option $1: see the head of $0" ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || die "no command to run: see the head of $0"
[[ $crashes =~ ^[0-9]+$ ]] || die "--crashes '$crashes' is not a number"
[ -z "$hostfile" ] || [ -r "$hostfile" ] || die "cannot read the hostfile $hostfile"
[ -z "$hostfile" ] || [ -z "$from" ] || die "--hostfile and --hosts-from: choose one"
[ -z "$fewer" ] || [[ $fewer =~ ^[1-9][0-9]*$ ]] || die "--fewer '$fewer' is not a number of hosts"
[ -z "$fewer" ] || [ -n "$hostfile$from" ] || die "--fewer needs the hosts: give --hostfile or --hosts-from"

# end CODE: for good, also for a new pod, which knows nothing else of this run.
end() {
    if [ -n "$ended" ] && ! echo "$1" >"$ended"; then
        say "cannot write $ended: another start will not know that this run has ended"
    fi
    exit "$1"
}

trap 'stopping=yes heard=yes; pass_on' TERM INT HUP USR1

# Once: a second signal might mean to end without saving.
pass_on() {
    if [ -n "$stopping" ] && [ -n "$child" ] && [ -z "$passed" ]; then
        passed=yes
        # Until it is the command, it is a copy of this shell that loses signals.
        while cmp -s "/proc/$$/cmdline" "/proc/$child/cmdline"; do sleep 0.02; done
        kill -TERM "$child" 2>/dev/null || true
    fi
}

# in_background COMMAND...: sets `code`; a signal is handled while it runs.
in_background() {
    "$@" &
    child=$!
    pass_on # a signal that came before `child` was set
    while :; do
        heard='' code=0
        wait "$child" || code=$?
        [ -n "$heard" ] || break # else a signal may have ended the wait
    done
    # The command ended as the signal came, and bash has lost its exit code: the next start will tell.
    case $stopping$code in yes-1 | yes127) code=75 ;; esac
    child=''
}

# The lines of the file $0 whose host answers ssh within $2 seconds, into the file $1.
# shellcheck disable=SC2016 # sh replaces these
answering='xargs -P 64 -I {} sh -c '"'"'name=${1%%[[:space:]:]*}
    timeout "$2" ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=5 "$name" true \
        </dev/null >/dev/null 2>&1 && echo "$1" || true'"'"' _ {} "$2" <"$0" >"$1"'

# list_hosts: a host a line into $work/hosts, without comments; false if the command printed none or
# failed. Sets `listed`, the command's exit code.
list_hosts() {
    local wrong
    listed=0
    if [ -n "$from" ]; then
        in_background bash -c "$from" >"$work/printed"
        listed=$code
    else
        cp "$hostfile" "$work/printed"
    fi
    # Each host once: a line that is there twice would count as two.
    sed -e 's/#.*//' -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//' -e '/^$/d' "$work/printed" |
        awk '{ name = $1; sub(/:.*/, "", name) } !seen[name]++' >"$work/hosts"
    # A name becomes a word of ssh's command line.
    if wrong=$(grep -m 1 -vE '^[A-Za-z0-9_][A-Za-z0-9._-]*([[:space:]:]|$)' "$work/hosts"); then
        say "error: '$wrong' is no host: a host is letters, digits, . _ and -, not - first"
        end 2
    fi
    [ "$listed" = 0 ] && { [ -z "$from" ] || [ -s "$work/hosts" ]; }
}

# A worker that was drained needs a new node first. That is no crash.
wait_for_hosts() {
    local shown='' missing there lack wanted listed
    while [ -z "$stopping" ]; do
        if list_hosts; then
            in_background sh -c "$answering" "$work/hosts" "$work/answered" "$answer"
            [ -z "$stopping" ] || break
            missing=$({ grep -vxFf "$work/answered" "$work/hosts" || true; } | sed 's/[[:space:]:].*//' | paste -sd' ')
            there=$(wc -l <"$work/answered")
            grep -xFf "$work/answered" "$work/hosts" >"$work/live" || true # in the list's order
            [ -n "$missing" ] || break
            wanted="$missing to answer ssh" lack="no answer to ssh from $missing"
            if [ -n "$fewer" ] && [ "$there" -ge "$fewer" ] && [ $((SECONDS - since)) -ge "$grace" ]; then
                say "going on without $missing, on $there host(s)"
                break
            fi
        else
            lack="no host from --hosts-from '$from', which ended with exit code $listed"
            wanted="hosts: $lack"
        fi
        [ "$shown" = "$wanted" ] || say "waiting for $wanted"
        shown=$wanted
        if [ $((SECONDS - since)) -ge "$patience" ]; then
            say "error: $lack for $patience seconds; when that is fixed, start the job again:" \
                "it resumes from the newest checkpoint"
            end 1
        fi
        in_background sleep 2
    done
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -z "$hostfile$from" ] || export LAUNCH_HOSTFILE=$work/live

if [ -n "$ended" ] && [ -s "$ended" ]; then
    code=$(cat "$ended")
    [[ $code =~ ^[0-9]+$ ]] || die "$ended does not hold an exit code: remove it"
    say "this run has ended for good, with exit code $code, as $ended says"
    exit "$code"
fi

crashed=0 quick=0 stopped=0 pause=0 since=$SECONDS
while :; do
    [ -z "$hostfile$from" ] || wait_for_hosts
    [ -z "$stopping" ] || exit 75 # between two runs: nothing to save
    start=$SECONDS
    in_background "$@"
    since=$SECONDS took=$((SECONDS - start))
    if [ "$code" != 75 ] || [ "$took" -ge 60 ]; then stopped=0; fi
    case $code in
    0 | 2 | 3 | 126 | 127) end "$code" ;;
    75)
        [ -z "$stopping" ] || exit 75
        stopped=$((stopped + 1)) quick=0 pause=0
        if [ "$stopped" -ge 10 ]; then
            say "error: stopped within a minute of its start, $stopped times in a row: find" \
                "out what stops it, then start the job again: it resumes from the newest checkpoint"
            end 1
        fi
        say "the run was stopped and has saved: resuming"
        in_background sleep "$first"
        ;;
    *)
        [ -z "$stopping" ] || exit "$code"
        crashed=$((crashed + 1))
        if [ "$crashed" -gt "$crashes" ]; then
            say "error: exit code $code, crash number $crashed: no further start"
            end "$code"
        fi
        quick=$((took < 60 ? quick + 1 : 0))
        if [ "$quick" -ge 3 ]; then
            say "error: exit code $code, the third time in a row within a minute of the start: no further start"
            end "$code"
        fi
        say "exit code $code, crash $crashed of $crashes: starting again"
        [ "$took" -le 600 ] || pause=0
        in_background sleep "$pause"
        pause=$((pause * 2 > 300 ? 300 : pause > 0 ? pause * 2 : first))
        ;;
    esac
done
