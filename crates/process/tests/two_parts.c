/* A child that shares memory with its parent, which tells its steps until the end. What they share,
 * and who may write to it:
 *   page: a page of no file; both
 *   file FILE, file FILE w: a file that is removed then; nobody, or the parent
 *   segments: nothing, but they have segments of the same number in two IPC namespaces
 *   forks: nothing; the child makes children all the time, which share a page with it */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>

static int told[2];

static volatile int *map(int protection, int flags, int fd)
{
    void *at = mmap(0, 4096, protection, MAP_SHARED | flags, fd, 0);
    if (at == MAP_FAILED) exit(1);
    return at;
}

/* A segment, for which `number` is asked, if it is one. */
static int segment(int number)
{
    if (number >= 0) {
        FILE *next = fopen("/proc/sys/kernel/shm_next_id", "w");
        if (!next || fprintf(next, "%d", number) < 0 || fclose(next)) return -1;
    }
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    return id < 0 || shmat(id, 0, 0) == (void *)-1 || shmctl(id, IPC_RMID, 0) ? -1 : id;
}

static void child(const char *what)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int id = strcmp(what, "segments") ? 0 : segment(-1);
    if (!strcmp(what, "forks")) map(PROT_READ | PROT_WRITE, MAP_ANONYMOUS, -1);
    if (write(told[1], &id, sizeof id) != sizeof id) exit(1);
    for (;;) {
        if (strcmp(what, "forks")) {
            usleep(1000);
            continue;
        }
        pid_t made = fork();
        if (made == 0) _exit(0);
        waitpid(made, 0, 0);
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "page";
    volatile int *word = 0;
    int fd = -1;
    if (!strcmp(what, "page")) word = map(PROT_READ | PROT_WRITE, MAP_ANONYMOUS, -1);
    if (!strcmp(what, "file")) {
        fd = open(argv[2], O_RDWR | O_CREAT, 0600);
        if (fd < 0 || ftruncate(fd, 4096) || unlink(argv[2])) return 1;
        map(PROT_READ, 0, fd);
    }
    if (pipe(told)) return 1;
    fflush(stdout);
    pid_t made = fork();
    if (made == 0) child(what);
    if (argc > 3) word = map(PROT_READ | PROT_WRITE, 0, fd);
    int id = 0;
    if (read(told[0], &id, sizeof id) != sizeof id) return 1;
    if (!strcmp(what, "segments") && (unshare(CLONE_NEWIPC) || segment(id) != id)) {
        printf("none (%s)\n", strerror(errno));
        return 0;
    }
    printf("child %d\n", made);
    for (int step = 1;; step++) {
        printf("step %d %d\n", step, word ? word[0]++ : 0);
        fflush(stdout);
        usleep(1000);
    }
}
