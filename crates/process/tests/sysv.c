// Parent and child that share all kinds of System V IPC. At each step the word goes from the one to
// the other through shared memory, under semaphores and by messages; what waits unused is looked at
// each time.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/random.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define REQUIRE(what) do { if (!(what)) wrong(__LINE__, #what); } while (0)

enum { PAGE = 4096, WAITING = 3 };
enum { GO, BACK, LOCK, COUNT, RAISED, SEMAPHORES };

static void wrong(int line, const char *what) {
    dprintf(1, "wrong: line %d: %s (errno %d)\n", line, what, errno);
    kill(0, SIGKILL);
    _exit(1);
}

struct message {
    long type;
    char text[4000];
};

static key_t key;
static int kept, doomed, lone, set, queue;
static volatile uint64_t *words, *seen, *parts, *gone;

static void operate(int number, int by, int flags) {
    struct sembuf one = {number, by, flags};
    int result = semop(set, &one, 1);
    REQUIRE(result == 0);
}

static void setup(void) {
    kept = shmget(key, 2 * PAGE + 100, IPC_CREAT | IPC_EXCL | 0600);
    doomed = shmget(IPC_PRIVATE, PAGE, 0600);
    lone = shmget(key + 1, 64 << 20, IPC_CREAT | IPC_EXCL | 0640);
    set = semget(key, SEMAPHORES, IPC_CREAT | IPC_EXCL | 0600);
    queue = msgget(key, IPC_CREAT | IPC_EXCL | 0600);
    REQUIRE(kept >= 0 && doomed >= 0 && lone >= 0 && set >= 0 && queue >= 0);
    words = shmat(kept, 0, 0);
    seen = shmat(kept, 0, SHM_RDONLY);
    parts = shmat(kept, 0, 0);
    gone = shmat(doomed, 0, 0);
    REQUIRE(words != (void *)-1 && seen != (void *)-1 && parts != (void *)-1 && gone != (void *)-1);
    // A part of it alone, and one that cannot be written for now.
    REQUIRE(munmap((char *)parts + PAGE, PAGE) == 0);
    REQUIRE(mprotect((void *)parts, PAGE, PROT_READ) == 0);
    REQUIRE(shmctl(doomed, IPC_RMID, 0) == 0);
    char *far = shmat(lone, 0, 0);
    REQUIRE(far != (void *)-1);
    memset(far + (40 << 20), 'k', 5000);
    REQUIRE(shmdt(far) == 0);
    unsigned short values[SEMAPHORES] = {[LOCK] = 1, [COUNT] = 7, [RAISED] = 9};
    REQUIRE(semctl(set, 0, SETALL, values) == 0);
    for (int i = 0; i < WAITING; i++) {
        struct message message = {9};
        memset(message.text, 'a' + i, sizeof message.text);
        REQUIRE(msgsnd(queue, &message, i * 1700, 0) == 0);
    }
}

static void look_at_what_waits(void) {
    REQUIRE(shmget(key, 0, 0) == kept && shmget(key + 1, 0, 0) == lone);
    REQUIRE(semget(key, 0, 0) == set && msgget(key, 0) == queue);
    struct shmid_ds status;
    REQUIRE(shmctl(lone, IPC_STAT, &status) == 0 && status.shm_segsz == 64 << 20);
    REQUIRE((status.shm_perm.mode & 0777) == 0640);
    char *far = shmat(lone, 0, SHM_RDONLY);
    REQUIRE(far != (void *)-1 && far[40 << 20] == 'k' && far[(40 << 20) + 5000] == 0);
    REQUIRE(shmdt(far) == 0);
    REQUIRE(shmctl(doomed, IPC_STAT, &status) == 0 && status.shm_perm.mode & SHM_DEST);
    struct msqid_ds messages;
    REQUIRE(msgctl(queue, IPC_STAT, &messages) == 0 && messages.msg_qnum >= WAITING);
    struct semid_ds semaphores;
    REQUIRE(semctl(set, 0, IPC_STAT, &semaphores) == 0 && semaphores.sem_otime != 0);
    REQUIRE(semctl(set, LOCK, GETVAL) == 0 && semctl(set, COUNT, GETVAL) == 4 && semctl(set, RAISED, GETVAL) == 11);
}

static void child(void) {
    operate(LOCK, -1, SEM_UNDO);
    operate(COUNT, -3, SEM_UNDO);
    operate(RAISED, 2, SEM_UNDO);
    operate(BACK, 1, 0);
    for (;;) {
        struct message message;
        operate(GO, -1, 0);
        uint64_t value = words[0];
        ssize_t length = msgrcv(queue, &message, sizeof message.text, 1, 0);
        REQUIRE(length == 8 && memcmp(message.text, &value, 8) == 0);
        if (value == 0) exit(5);
        gone[3] = value + 1;
        words[PAGE / 8 * 2] = value + 2;
        operate(BACK, 1, 0);
    }
}

static void tell(uint64_t value) {
    struct message message = {1};
    memcpy(message.text, &value, 8);
    words[0] = value;
    operate(GO, 1, 0);
    // The child waits for it by then, or not.
    nanosleep(&(struct timespec){0, 1500000}, 0);
    REQUIRE(msgsnd(queue, &message, 8, 0) == 0);
}

static void step_of(uint64_t value, pid_t other) {
    tell(value);
    operate(BACK, -1, 0);
    REQUIRE(seen[0] == value && parts[0] == value && gone[3] == value + 1);
    REQUIRE(seen[PAGE / 8 * 2] == value + 2 && parts[PAGE / 8 * 2] == value + 2);
    look_at_what_waits();
    REQUIRE(semctl(set, LOCK, GETPID) == other && semctl(set, COUNT, GETPID) == other);
}

static void finish(pid_t other) {
    tell(0);
    int status;
    REQUIRE(waitpid(other, &status, 0) == other && WIFEXITED(status) && WEXITSTATUS(status) == 5);
    // Its end has undone what it had done.
    REQUIRE(semctl(set, LOCK, GETVAL) == 1 && semctl(set, COUNT, GETVAL) == 7 && semctl(set, RAISED, GETVAL) == 9);
    for (int i = 0; i < WAITING; i++) {
        struct message message;
        REQUIRE(msgrcv(queue, &message, sizeof message.text, 9, IPC_NOWAIT) == i * 1700);
        for (int at = 0; at < i * 1700; at++) REQUIRE(message.text[at] == 'a' + i);
    }
    // Read only it stays, and what can be written again can be.
    REQUIRE(mprotect((void *)seen, PAGE, PROT_READ | PROT_WRITE) == -1 && errno == EACCES);
    REQUIRE(mprotect((void *)parts, PAGE, PROT_READ | PROT_WRITE) == 0);
    REQUIRE(shmdt((void *)gone) == 0 && shmdt((void *)words) == 0 && shmdt((void *)seen) == 0);
    struct shmid_ds status_of;
    REQUIRE(shmctl(doomed, IPC_STAT, &status_of) == -1 && (errno == EINVAL || errno == EIDRM));
    REQUIRE(shmctl(kept, IPC_RMID, 0) == 0 && shmctl(lone, IPC_RMID, 0) == 0);
    REQUIRE(semctl(set, 0, IPC_RMID) == 0 && msgctl(queue, IPC_RMID, 0) == 0);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    nonce |= 1;
    // Keys that the test finds.
    key = 0x6b656400 + argc * 2;
    setpgid(0, 0);
    setup();
    pid_t other = fork();
    if (other == 0) child();
    operate(BACK, -1, 0);
    uint64_t value = nonce;
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        step_of(value, other);
        printf("%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        fflush(stdout);
    }
    finish(other);
    return 7;
}
