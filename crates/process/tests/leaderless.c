// Its first thread ends at once, the other a while later and with it the process: 5.
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static void *later(void *nothing)
{
    usleep(300 * 1000);
    exit(5);
    return nothing;
}

int main(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, later, NULL)) return 1;
    syscall(SYS_exit, 0);
}
