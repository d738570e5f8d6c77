/* kedge-spank.c: the option --kedge of Slurm's sbatch, srun and salloc, a SPANK plugin (spank(7)).
 *
 *     cc -shared -fPIC -O2 -o kedge_spank.so kedge-spank.c      with Slurm's headers (libslurm-dev)
 *
 * and a line of plugstack.conf, on all nodes and where jobs are submitted:
 *
 *     required /usr/lib/slurm/kedge_spank.so kedge=/usr/bin/kedge
 *
 * Without kedge=PATH the command is looked for in the user's PATH.
 *
 * The plugin does no more than a plugin must. `kedge slurm check` reads the option where a job is
 * submitted. On a node, the task that is about to become the user's program becomes kedge instead,
 * as the user, and the environment tells kedge what to do. Slurm still does all that it does before
 * a program: resource limits, task prologs, SELinux. As root, the option's value is kept, and that
 * is all.
 *
 * Copyright: the kedge developers. Licence: Apache-2.0 OR MIT, at your choice.
 */
#include <errno.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

SPANK_PLUGIN(kedge, 1)

extern char **environ;

/* The longest value of the option. */
#define LONGEST 1024
/* What a task ends with that cannot become kedge; as `kedge` itself. */
#define FAILED 125
#define NOT_FOUND 127
/* What Slurm's commands take the option from, and what they pass it on by. */
#define BY_USER "SLURM_SPANK__SLURM_SPANK_OPTION_kedge_kedge"
#define BY_SLURM "_SLURM_SPANK_OPTION_kedge_kedge"
/* What kedge gives to programs that it runs for this plugin: what is saved, and the job's number. */
#define INSIDE "KEDGE_SLURM"

/* The option's value; empty: it was not given. */
static char value[LONGEST + 1];
/* It was given and cannot be kept. */
static int bad;
/* Where plugstack.conf has the command; empty: in PATH. */
static char fixed[PATH_MAX];

static int take(int unused, const char *text, int remote);

static struct spank_option option = {
    "kedge", "OPTIONS",
    "have kedge save the job, and go on with it when it is queued again: interval=10m,... "
    "(kedge slurm check --help)",
    1, 0, take,
};

/* Whether the job is to be left alone. */
static int off(void)
{
    return !bad && (!*value || !strcmp(value, "off"));
}

static int is_program(const char *path)
{
    struct stat found;
    return !stat(path, &found) && S_ISREG(found.st_mode) && !access(path, X_OK);
}

/* Writes the path of the command to `to`, which has PATH_MAX bytes. */
static int find(const char *folders, char *to)
{
    if (*fixed) {
        strcpy(to, fixed);
        return is_program(to);
    }
    while (folders && *folders) {
        size_t length = strcspn(folders, ":");
        /* A folder that depends on where one is names another program on another day. */
        if (*folders == '/' && length + sizeof "/kedge" <= PATH_MAX) {
            memcpy(to, folders, length);
            strcpy(to + length, "/kedge");
            if (is_program(to))
                return 1;
        }
        folders += length + (folders[length] == ':');
    }
    return 0;
}

/* Has kedge read the option, which says on standard error what is wrong with it. */
static int check(const char *text)
{
    char kedge[PATH_MAX];
    char *words[] = { "kedge", "slurm", "check", "--", (char *) text, NULL };
    pid_t child, ended;
    int error, status;

    if (!find(getenv("PATH"), kedge)) {
        slurm_error("--kedge: %s: there is no such program on this host",
                    *fixed ? fixed : "kedge is not in PATH");
        return -1;
    }
    error = posix_spawn(&child, kedge, NULL, NULL, words, environ);
    if (error) {
        slurm_error("--kedge: %s: %s", kedge, strerror(error));
        return -1;
    }
    do
        ended = waitpid(child, &status, 0);
    while (ended < 0 && errno == EINTR);
    return ended == child && WIFEXITED(status) && !WEXITSTATUS(status) ? 0 : -1;
}

/* Keeps the option's value. Called in the commands, and in slurmstepd as root. */
static int take(int unused, const char *text, int remote)
{
    (void) unused;
    *value = 0;
    bad = !text || strlen(text) > LONGEST;
    if (bad) {
        slurm_error("--kedge: longer than %d bytes", LONGEST);
        return -1;
    }
    strcpy(value, text);
    /* Without a value it means nothing, which kedge says. */
    return remote || (*value && off()) ? 0 : check(value);
}

int slurm_spank_init(spank_t spank, int words, char *word[])
{
    static const char name[] = "kedge=";
    spank_context_t context = spank_context();

    for (int i = 0; i < words; i++) {
        const char *path = word[i] + sizeof name - 1;
        if (strncmp(word[i], name, sizeof name - 1) || *path != '/' || strlen(path) >= PATH_MAX) {
            slurm_error("kedge: plugstack.conf: %s: give kedge=PATH, absolute", word[i]);
            return -1;
        }
        strcpy(fixed, path);
    }
    /* A script whose steps are saved has this for srun; a job that it submits is its own. */
    if (context == S_CTX_ALLOCATOR && getenv("SLURM_JOB_ID"))
        unsetenv(BY_USER);
    if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
        return 0;
    return spank_option_register(spank, &option) == ESPANK_SUCCESS ? 0 : -1;
}

/* Whether srun was told to start several programs: tasks have other words then than those that this
 * plugin is shown. Its options end where getopt has stopped. */
static int has_several_programs(void)
{
    FILE *words = fopen("/proc/self/cmdline", "re");
    char *word = NULL;
    size_t size = 0;
    int found = getenv("SLURM_MULTI_PROG") != NULL;

    for (int i = 0; words && !found && i < optind && getdelim(&word, &size, 0, words) > 0; i++)
        /* Options may be cut short; no other one begins so. */
        found = strlen(word) >= sizeof "--mu" - 1 && !strncmp(word, "--multi-prog", strlen(word));
    free(word);
    if (words)
        fclose(words);
    return found;
}

/* What of this job is saved and runs this srun, if it is so. Another job that was submitted from
 * within one has its variables. */
static const char *runs_inside(void)
{
    const char *told = getenv(INSIDE), *job = getenv("SLURM_JOB_ID");
    const char *of = told ? strchr(told, ' ') : NULL;

    if (!of || (job && strcmp(of + 1, job)))
        return NULL;
    return strncmp(told, "script ", sizeof "script " - 1) ? "step" : "script";
}

/* In srun, before a step is made: one that is refused later would stay. */
int slurm_spank_init_post_opt(spank_t spank, int words, char *word[])
{
    const char *inside = runs_inside(), *passed = getenv(BY_SLURM);

    (void) spank, (void) words, (void) word;
    if (spank_context() != S_CTX_LOCAL)
        return 0;
    if (off() && !(passed && strcmp(passed, "off"))) {
        if (inside && !*value)
            slurm_spank_log("kedge: the %s that runs this srun is saved as one job, which it cannot "
                            "be while srun runs: give --kedge=steps,... to sbatch", inside);
        return 0;
    }
    if (inside) {
        slurm_error("--kedge: the %s that runs this srun is run by kedge already: give "
                    "--kedge=steps,... to sbatch, or --kedge=off here", inside);
        return -1;
    }
    if (has_several_programs()) {
        slurm_error("--kedge does not go with --multi-prog: start the programs by steps of their "
                    "own, or give --kedge=off");
        return -1;
    }
    return 0;
}

/* Says why a task cannot become kedge, and ends it: where the plugin is `optional`, an error of it
 * would have the program run, and nobody save it. */
#define REFUSE(status, ...)                       \
    do {                                          \
        slurm_error("--kedge: " __VA_ARGS__);     \
        _exit(status);                            \
    } while (0)

static void set(spank_t spank, const char *name, const char *text)
{
    spank_err_t error = spank_setenv(spank, name, text, 1);
    if (error != ESPANK_SUCCESS)
        REFUSE(FAILED, "%s: %s", name, spank_strerror(error));
}

/* Has the task become kedge, which becomes the program's supervisor. In the task's own process, as
 * the user; SPANK shows the words that are about to be executed. */
int slurm_spank_task_init(spank_t spank, int words, char *word[])
{
    static char kedge[PATH_MAX];
    static char folders[64 * 1024];
    char task[96], name[16] = "script", of_array[16] = "-", container[2];
    uint32_t job = 0, step = 0, index = NO_VAL;
    uid_t user = 0;
    int count = 0;
    char **command = NULL;

    (void) words, (void) word;
    if (off())
        return 0;
    if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS
        || spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS
        || spank_get_item(spank, S_JOB_UID, &user) != ESPANK_SUCCESS
        || spank_get_item(spank, S_JOB_ARGV, &count, &command) != ESPANK_SUCCESS)
        REFUSE(FAILED, "Slurm does not tell of the task");
    if (step == SLURM_EXTERN_CONT)
        return 0;
    if (step == SLURM_INTERACTIVE_STEP) {
        /* salloc's own shell; what it starts by srun is meant. */
        set(spank, BY_USER, value);
        return 0;
    }
    if (geteuid() != user || getuid() != user)
        REFUSE(FAILED, "the task is not yet its user's");
    if (bad)
        REFUSE(FAILED, "longer than %d bytes", LONGEST);
    if (count < 1 || !command || !command[0])
        return 0;
    if (strlen(command[0]) >= PATH_MAX)
        REFUSE(FAILED, "the program's name is too long");
    if (spank_getenv(spank, "SLURM_CONTAINER", container, sizeof container) != ESPANK_ENV_NOEXIST)
        REFUSE(FAILED, "does not go with --container");
    if (spank_getenv(spank, "PATH", folders, sizeof folders) != ESPANK_SUCCESS)
        *folders = 0;
    if (!find(folders, kedge))
        REFUSE(NOT_FOUND, "%s: there is no such program on this node",
               *fixed ? fixed : "kedge is not in PATH");
    if (step != SLURM_BATCH_SCRIPT)
        snprintf(name, sizeof name, "%u", (unsigned) step);
    /* Its variable may be that of the job that has submitted this one. */
    if (spank_get_item(spank, S_JOB_ARRAY_TASK_ID, &index) == ESPANK_SUCCESS && index != NO_VAL)
        snprintf(of_array, sizeof of_array, "%u", (unsigned) index);
    snprintf(task, sizeof task, "%ld %u %s %s", (long) getpid(), (unsigned) job, name, of_array);
    /* The process's number has nobody else take these for his own. */
    set(spank, "KEDGE_SLURM_TASK", task);
    set(spank, "KEDGE_SLURM_OPTIONS", value);
    set(spank, "KEDGE_SLURM_PROGRAM", command[0]);
    /* Slurm executes these words when it is through. Absolute, as it looks for no such program. */
    command[0] = kedge;
    return 0;
}
