// One of its threads ends it: 5. Its first thread has ended by then, or, as `led`, waits for ever;
// so does a third one. With an argument the end comes when its input ends, without one a while
// later.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static int asked;

static void *later(void *nothing)
{
    char byte;
    if (asked)
        while (read(0, &byte, 1) > 0) continue;
    else
        usleep(300 * 1000);
    exit(5);
    return nothing;
}

static void *idle(void *nothing)
{
    prctl(PR_SET_NAME, "idle");
    for (;;) pause();
    return nothing;
}

int main(int argc, char **argv)
{
    pthread_t threads[2];
    asked = argc > 1;
    if (pthread_create(&threads[0], NULL, idle, NULL)) return 1;
    if (pthread_create(&threads[1], NULL, later, NULL)) return 1;
    if (asked && strcmp(argv[1], "led") == 0) idle(NULL);
    syscall(SYS_exit, 0);
}
