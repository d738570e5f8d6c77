// Runs a program as a container does, whose filter of system calls its processes cannot leave:
//   contained errors COMMAND…   calls that it does not know fail, as Docker's default does
//   contained ends COMMAND…     they end the process
// userfaultfd and keyctl are among them, and calls with numbers that no kernel knows.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int count, char **words) {
    if (count < 3) return 2;
    unsigned denied = strcmp(words[1], "ends") ? SECCOMP_RET_ERRNO | EPERM : SECCOMP_RET_KILL_PROCESS;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_keyctl, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 1024, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, denied),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    // Without no_new_privs where root may do without it, as container runtimes do.
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return 3;
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 3;
    }
    execvp(words[2], words + 2);
    perror(words[2]);
    return 127;
}
