#!/bin/sh
# Prints the present hosts, `node1:8` per line. launch/hosts.sh --discover runs it every second.
#
#   launch/discover.sh FILE             hosts of a hostfile, which may change: `node1 slots=8` or
#                                       `node1:8`
#   launch/discover.sh --slurm          nodes of this job, except those that Slurm considers lost
#   launch/discover.sh --kubernetes N   running workers of an MPIJob, N ranks each
set -eu

die() {
    echo "error: $*" >&2
    exit 2
}

case ${1:-} in
--slurm)
    [ -n "${SLURM_JOB_NODELIST:-}" ] || die "--slurm: not in a job of Slurm (no SLURM_JOB_NODELIST)"
    # A state with a star: the node does not answer.
    sinfo -h -N -n "$SLURM_JOB_NODELIST" -o '%N %t' | sort -u |
        awk -v ranks="${SLURM_NTASKS_PER_NODE:-1}" '$2 !~ /^(down|fail|unk|boot|pow)|\*/ { print $1 ":" ranks }'
    ;;
--kubernetes) # the operator writes it anew as workers come and go
    sh /etc/mpi/discover_hosts.sh | sed -e 's/:.*//' -e "s/\$/:${2:?--kubernetes wants a number of ranks}/"
    ;;
-* | '') die "which hosts? See the head of $0" ;;
*)
    [ -r "$1" ] || die "cannot read the hostfile $1"
    sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$1" |
        sed -E -e 's/[[:space:]]*max[-_]slots=[0-9]+//' -e 's/[[:space:]]+slots[[:space:]]*=[[:space:]]*/:/' \
            -e 's/[[:space:]]+$//' -e '/:/!s/$/:1/'
    ;;
esac
