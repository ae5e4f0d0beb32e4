/* hosts.sh preloads this into mpirun, its daemons and ranks: no other user of a host connects to them.
 *
 * Open MPI 4.1 listens on all addresses and obeys whoever speaks its protocol, which knows no
 * secret: a stranger could stop ranks and start programs. So a connection from this host is closed
 * unless its other end is open and belongs to the same user, as /proc/net/tcp says.
 * Connections from other hosts are left alone, unless LAUNCH_ALONE says that the run has none.
 * Sockets of Python and gRPC are not guarded: those call accept4. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* An address and a port, as 32 and 4 hexadecimal digits: the kernel's tables write them so. */
typedef char end_text[38];

/* An IPv4 address is written as the IPv6 address that stands for it, ::ffff:1.2.3.4. */
static void write_end(end_text text, const struct sockaddr_storage *end) {
    const struct sockaddr_in *ipv4 = (const void *)end;
    const struct sockaddr_in6 *ipv6 = (const void *)end;
    uint32_t words[4] = {0, 0, htonl(0xffff), ipv4->sin_addr.s_addr};
    if (end->ss_family == AF_INET6) memcpy(words, &ipv6->sin6_addr, sizeof words);
    /* IPv6 has the port where IPv4 has it. */
    snprintf(text, sizeof(end_text), "%08X%08X%08X%08X:%04X", words[0], words[1], words[2],
             words[3], ntohs(ipv4->sin_port));
}

/* Whether a line of a table has this end; the line's address has 8 or 32 digits. */
static int is_end(const char *in_line, const end_text text) {
    size_t length = strlen(in_line);
    if (length == 37) return !strcmp(in_line, text);
    return length == 13 && !strncmp(text, "0000000000000000FFFF0000", 24) &&
           !strcmp(in_line, text + 24);
}

/* Looks for the open socket between two ends: 1 where the user has it, -1 where it is
 * somebody else's or no longer open (whose it was is not known then), 0 where it is not there. */
static int owner(const char *table, const end_text from, const end_text to) {
    char local[38], remote[38], line[512];
    unsigned state, user;
    int verdict = 0;
    FILE *file = fopen(table, "re");
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, " %*d: %37s %37s %x %*s %*s %*s %u", local, remote, &state, &user) != 4)
            continue;
        if (!is_end(local, from) || !is_end(remote, to)) continue;
        if (state != TCP_ESTABLISHED || user != geteuid()) verdict = -1;
        if (verdict == 0) verdict = 1;
    }
    if (file) fclose(file);
    return verdict;
}

/* Whether an end's address is one of the interfaces' (all of 127/8 is the loopback's). That it can be
 * bound says nothing: with ip_nonlocal_bind, every address can. */
static int is_of_this_host(const end_text end, const struct ifaddrs *interfaces) {
    unsigned ipv4 = 0;
    sscanf(end + 24, "%8x", &ipv4);
    if (!strncmp(end, "0000000000000000FFFF0000", 24) && ntohl(ipv4) >> 24 == 127) return 1;
    for (; interfaces; interfaces = interfaces->ifa_next) {
        const struct sockaddr *address = interfaces->ifa_addr;
        struct sockaddr_storage whole = {0};
        end_text own;
        if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) continue;
        memcpy(&whole, address, address->sa_family == AF_INET ? sizeof(struct sockaddr_in)
                                                              : sizeof(struct sockaddr_in6));
        write_end(own, &whole);
        if (!strncmp(own, end, 32)) return 1;
    }
    return 0;
}

static int is_strangers(int link) {
    struct sockaddr_storage own, peer;
    struct ifaddrs *interfaces;
    socklen_t size = sizeof own;
    const char *alone = getenv("LAUNCH_ALONE");
    end_text from, to;
    int is_local, verdict, verdict6;
    if (getsockname(link, (void *)&own, &size)) return 1;
    if (own.ss_family != AF_INET && own.ss_family != AF_INET6) return 0;
    size = sizeof peer;
    if (getpeername(link, (void *)&peer, &size)) return 1;
    write_end(from, &peer);
    write_end(to, &own);
    if (getifaddrs(&interfaces)) return 1;
    is_local = is_of_this_host(from, interfaces);
    freeifaddrs(interfaces);
    if (!is_local) return alone && *alone;
    verdict = owner("/proc/self/net/tcp", from, to);
    verdict6 = owner("/proc/self/net/tcp6", from, to);
    /* In neither table: it was closed at once. */
    return verdict < 0 || verdict6 < 0 || verdict + verdict6 == 0;
}

int accept(int door, struct sockaddr *restrict address, socklen_t *restrict size) {
    int (*real)(int, struct sockaddr *, socklen_t *) = dlsym(RTLD_NEXT, "accept");
    int link = real(door, address, size);
    if (link < 0 || !is_strangers(link)) return link;
    close(link);
    errno = EAGAIN;
    return -1;
}
