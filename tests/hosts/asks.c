// Asks for a checkpoint of itself three times and says what came of it: 0 it goes on, 1 it was
// restarted, -1 and why. usage: asks captured|durable; a line on standard input before each.
#include <kedge.h>

int main(int count, char **words) {
    char line[16];
    int until = count > 1 && strcmp(words[1], "captured") == 0 ? KEDGE_CAPTURED : KEDGE_DURABLE;
    for (int turn = 1; turn <= 3; turn++) {
        int outcome = kedge_checkpoint(until);
        printf("%d %d %s\n", turn, outcome, kedge_error());
        fflush(stdout);
        // Whoever restarts it decides how long it goes on.
        if (fgets(line, sizeof line, stdin) == NULL) return 4;
    }
    return 6;
}
