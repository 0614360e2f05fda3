/* A preloaded replacement of libc's bind(). A TCP socket that would be bound to all interfaces is bound to the address in
 * MEGASYNC_BIND instead, or to loopback if it is of the other address family. All other calls pass unchanged.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

typedef int bind_function(int, const struct sockaddr *, socklen_t);

static bind_function *next_bind;
static int chosen; /* AF_INET, AF_INET6, or 0 if there is no address */
static struct in_addr chosen4;
static struct in6_addr chosen6;

/* Runs before main, so that nothing is looked up between a fork and an exec. */
__attribute__((constructor)) static void begin(void)
{
    const char *address = getenv("MEGASYNC_BIND");
    next_bind = (bind_function *)dlsym(RTLD_NEXT, "bind");
    if (address != NULL && inet_pton(AF_INET, address, &chosen4) == 1)
        chosen = AF_INET;
    else if (address != NULL && inet_pton(AF_INET6, address, &chosen6) == 1)
        chosen = AF_INET6;
}

static int option(int socket, int level, int name)
{
    int value = -1;
    socklen_t length = sizeof value;
    return getsockopt(socket, level, name, &value, &length) == 0 ? value : -1;
}

static struct in6_addr mapped(struct in_addr address)
{
    struct in6_addr found = {.s6_addr = {[10] = 0xff, [11] = 0xff}};
    memcpy(&found.s6_addr[12], &address, sizeof address);
    return found;
}

static struct in6_addr address6(int socket)
{
    if (chosen == AF_INET6)
        return chosen6;
    return option(socket, IPPROTO_IPV6, IPV6_V6ONLY) == 0 ? mapped(chosen4) : in6addr_loopback;
}

static int all6(const struct in6_addr *address)
{
    const struct in6_addr all4 = mapped((struct in_addr){INADDR_ANY});
    return IN6_IS_ADDR_UNSPECIFIED(address) || memcmp(address, &all4, sizeof all4) == 0;
}

int bind(int socket, const struct sockaddr *address, socklen_t length)
{
    struct sockaddr_in in4;
    struct sockaddr_in6 in6;

    if (next_bind == NULL) /* called by another library's constructor */
        begin();
    if (!chosen || address == NULL || option(socket, SOL_SOCKET, SO_TYPE) != SOCK_STREAM)
        return next_bind(socket, address, length);
    if (length >= sizeof in4 && address->sa_family == AF_INET) {
        memcpy(&in4, address, sizeof in4);
        if (in4.sin_addr.s_addr == htonl(INADDR_ANY)) {
            in4.sin_addr.s_addr = chosen == AF_INET ? chosen4.s_addr : htonl(INADDR_LOOPBACK);
            return next_bind(socket, (const struct sockaddr *)&in4, sizeof in4);
        }
    } else if (length >= sizeof in6 && address->sa_family == AF_INET6) {
        memcpy(&in6, address, sizeof in6);
        if (all6(&in6.sin6_addr)) {
            in6.sin6_addr = address6(socket);
            return next_bind(socket, (const struct sockaddr *)&in6, sizeof in6);
        }
    }
    return next_bind(socket, address, length);
}
