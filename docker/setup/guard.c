/* hosts.sh preloads this into mpirun, its daemons and ranks: no other user of a host connects to them.
 *
 * Open MPI 4.1 listens on all addresses and obeys whoever speaks its protocol, which knows no
 * secret: a stranger could stop ranks and start programs. So a connection from this host is closed
 * unless its other end belongs to the same user or to root, as /proc/net/tcp says. Connections from
 * other hosts are left alone, unless LAUNCH_ALONE says that the run has none. Sockets of Python and
 * gRPC are not guarded: those call accept4. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Open ends on this host of connections from one port to another: how many are the user's or
 * root's; 1000 or more where one is not. */
static int users(const char *table, unsigned from, unsigned to) {
    const char *form = " %*d: %*[0-9A-F]:%x %*[0-9A-F]:%x %x %*s %*s %*s %u";
    unsigned local, remote, state, user;
    int count = 0;
    char line[512];
    FILE *file = fopen(table, "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, form, &local, &remote, &state, &user) == 4 && local == from &&
            remote == to && state == TCP_ESTABLISHED)
            count += user == geteuid() || !user ? 1 : 1000;
    if (file) fclose(file);
    return count;
}

static int is_strangers(int link) {
    struct sockaddr_storage own, peer; /* IPv6 has the port where IPv4 has it */
    struct sockaddr_in *here = (void *)&own, *there = (void *)&peer;
    socklen_t size = sizeof own;
    const char *alone = getenv("LAUNCH_ALONE");
    int trial, is_local, count;
    unsigned from, to;
    if (getsockname(link, (void *)&own, &size)) return 1;
    if (own.ss_family != AF_INET && own.ss_family != AF_INET6) return 0;
    size = sizeof peer;
    if (getpeername(link, (void *)&peer, &size)) return 1;
    from = ntohs(there->sin_port), to = ntohs(here->sin_port);
    there->sin_port = 0; /* a socket can be bound to this host's addresses only */
    trial = socket(peer.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    is_local = !bind(trial, (void *)&peer, size);
    close(trial);
    if (!is_local) return alone && *alone;
    count = users("/proc/net/tcp", from, to) + users("/proc/net/tcp6", from, to);
    return count < 1 || count >= 1000; /* none: it was closed at once */
}

int accept(int door, struct sockaddr *restrict address, socklen_t *restrict size) {
    int (*real)(int, struct sockaddr *, socklen_t *) = dlsym(RTLD_NEXT, "accept");
    int link = real(door, address, size);
    if (link < 0 || !is_strangers(link)) return link;
    close(link);
    errno = EAGAIN;
    return -1;
}
