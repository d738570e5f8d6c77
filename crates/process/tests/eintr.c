// As step.c: each step waits in one call, of those that signal(7) lists for EINTR after a stop
// alone. Nothing here has a signal handler, so EINTR is never due.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/msg.h>
#include <sys/random.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { WAIT = 6000 };

static const char *call;
static int pair[2], listener, full[2], epoll, set, queue, waiting, joining;
static sigset_t signals;

static void fail(int line) {
    dprintf(1, "wrong: %s, line %d, errno %d\n", call, line, errno);
    _exit(1);
}
#define REQUIRE(what) do { if (!(what)) fail(__LINE__); } while (0)

static int is(const char *name) { return strcmp(call, name) == 0; }

static struct msgbuf_one { long type; char text[8000]; } message;

// Ends a wait that has no end of its own.
static void *release(void *unused) {
    (void)unused;
    usleep(WAIT);
    struct sembuf up = {0, 1, 0};
    struct msgbuf_one other = {1};
    if (is("semop")) REQUIRE(semop(set, &up, 1) == 0);
    if (is("sigwaitinfo")) REQUIRE(kill(getpid(), SIGUSR1) == 0);
    if (is("msgrcv")) REQUIRE(msgsnd(queue, &other, 1, 0) == 0);
    if (is("msgsnd")) REQUIRE(msgrcv(queue, &other, sizeof other.text, 0, 0) == 8000);
    return 0;
}

static void setup(void) {
    struct timeval limit = {0, WAIT};
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, full) == 0);
    REQUIRE(setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    REQUIRE(setsockopt(full[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
    // Whom nobody connects to, and one whose queue is full.
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un own = {AF_UNIX};
    REQUIRE(bind(listener, (void *)&own, sizeof(sa_family_t)) == 0 && listen(listener, 0) == 0);
    REQUIRE(setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    if (is("connect")) {
        socklen_t length = sizeof own;
        REQUIRE(getsockname(listener, (void *)&own, &length) == 0);
        waiting = socket(AF_UNIX, SOCK_STREAM, 0);
        joining = socket(AF_UNIX, SOCK_STREAM, 0);
        REQUIRE(connect(waiting, (void *)&own, length) == 0);
        REQUIRE(setsockopt(joining, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
    }
    epoll = epoll_create1(0);
    REQUIRE(epoll >= 0);
    // Keys that the test finds.
    if (strstr(call, "sem")) set = semget(0x6b656480, 1, IPC_CREAT | IPC_EXCL | 0600);
    if (strstr(call, "msg")) queue = msgget(0x6b656480, IPC_CREAT | IPC_EXCL | 0600);
    REQUIRE(set >= 0 && queue >= 0);
    if (is("msgsnd")) {
        message.type = 1;
        REQUIRE(msgsnd(queue, &message, 8000, 0) == 0 && msgsnd(queue, &message, 8000, 0) == 0);
    }
}

// As full as it can be: what comes back may lie closer together.
static void fill(void) {
    static char much[1 << 16];
    while (send(full[0], much, sizeof much, MSG_DONTWAIT) > 0) {}
    while (send(full[0], much, 1, MSG_DONTWAIT) > 0) {}
}

static int times_out(ssize_t result) { return result == -1 && errno == EAGAIN; }

static void wait_in(void) {
    char bytes[64];
    struct iovec vector = {bytes, sizeof bytes};
    struct msghdr header = {.msg_iov = &vector, .msg_iovlen = 1};
    struct mmsghdr headers[1] = {{.msg_hdr = header}};
    struct epoll_event event;
    struct timespec moment = {0, WAIT * 1000};
    struct sembuf down = {0, -1, 0};
    struct sockaddr_un own;
    socklen_t length = sizeof own;
    if (strstr(call, "send") || strstr(call, "write")) fill();
    if (is("read")) REQUIRE(times_out(read(pair[0], bytes, 1)));
    if (is("readv")) REQUIRE(times_out(readv(pair[0], &vector, 1)));
    if (is("recv")) REQUIRE(times_out(recv(pair[0], bytes, 1, 0)));
    if (is("recvmsg")) REQUIRE(times_out(recvmsg(pair[0], &header, 0)));
    if (is("recvmmsg")) REQUIRE(times_out(recvmmsg(pair[0], headers, 1, 0, 0)));
    if (is("accept")) REQUIRE(times_out(accept(listener, 0, 0)));
    if (is("accept4")) REQUIRE(times_out(accept4(listener, 0, 0, SOCK_CLOEXEC)));
    if (is("write")) REQUIRE(times_out(write(full[0], bytes, 1)));
    if (is("writev")) REQUIRE(times_out(writev(full[0], &vector, 1)));
    if (is("send")) REQUIRE(times_out(send(full[0], bytes, 1, 0)));
    if (is("sendmsg")) REQUIRE(times_out(sendmsg(full[0], &header, 0)));
    if (is("sendmmsg")) REQUIRE(times_out(sendmmsg(full[0], headers, 1, 0)));
    if (is("connect")) {
        REQUIRE(getsockname(listener, (void *)&own, &length) == 0);
        REQUIRE(times_out(connect(joining, (void *)&own, length)));
    }
    if (is("epoll_wait")) REQUIRE(epoll_wait(epoll, &event, 1, WAIT / 1000) == 0);
    if (is("epoll_pwait")) REQUIRE(epoll_pwait(epoll, &event, 1, WAIT / 1000, &signals) == 0);
    if (is("semtimedop")) REQUIRE(times_out(semtimedop(set, &down, 1, &moment)));
    if (is("sigtimedwait")) REQUIRE(times_out(sigtimedwait(&signals, 0, &moment)));
    pthread_t releasing;
    if (!is("semop") && !is("sigwaitinfo") && !is("msgrcv") && !is("msgsnd")) return;
    REQUIRE(pthread_create(&releasing, 0, release, 0) == 0);
    if (is("semop")) REQUIRE(semop(set, &down, 1) == 0);
    if (is("sigwaitinfo")) REQUIRE(sigwaitinfo(&signals, 0) == SIGUSR1);
    if (is("msgrcv")) REQUIRE(msgrcv(queue, &message, sizeof message.text, 0, 0) == 1);
    if (is("msgsnd")) REQUIRE(msgsnd(queue, &message, 8000, 0) == 0);
    REQUIRE(pthread_join(releasing, 0) == 0);
}

int main(int argc, char **argv) {
    int steps = argc > 2 ? atoi(argv[2]) : 20;
    call = argc > 1 ? argv[1] : "read";
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigprocmask(SIG_BLOCK, &signals, 0);
    setup();
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    uint64_t value = nonce;
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        dprintf(1, "%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        wait_in();
    }
    if (strstr(call, "sem")) semctl(set, 0, IPC_RMID);
    if (strstr(call, "msg")) msgctl(queue, IPC_RMID, 0);
    return 7;
}
