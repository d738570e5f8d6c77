// Damages an image between its being written and its being read back: watches the folder of images
// for who opens what (fanotify, which holds up the opener), and when the folder of an image that
// has its manifest is opened, which the writer does to have the manifest's name on the disk,
// changes one byte in the middle of its largest file of memory.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/stat.h>
#include <unistd.h>

static int damage(const char *image) {
    char path[4096], largest[4096] = "";
    off_t most = 0;
    snprintf(path, sizeof path, "%s/manifest.json", image);
    if (access(path, F_OK)) return 0;
    DIR *folder = opendir(image);
    if (!folder) return 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        size_t length = strlen(entry->d_name);
        struct stat found;
        if (length < 5 || strcmp(entry->d_name + length - 5, ".kimg")) continue;
        snprintf(path, sizeof path, "%s/%s", image, entry->d_name);
        if (stat(path, &found) || found.st_size <= most) continue;
        most = found.st_size;
        strcpy(largest, path);
    }
    closedir(folder);
    unsigned char byte;
    int file = open(largest, O_RDWR | O_CLOEXEC);
    if (file < 0 || pread(file, &byte, 1, most / 2) != 1) return 0;
    byte ^= 0x10;
    int done = pwrite(file, &byte, 1, most / 2) == 1;
    close(file);
    if (done) printf("damaged %s\n", largest), fflush(stdout);
    return done;
}

int main(int argc, char **argv) {
    alarm(60); // whoever it holds up goes on when it ends
    int events = fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC, O_RDONLY | O_CLOEXEC);
    unsigned flags = FAN_MARK_ADD | FAN_MARK_ONLYDIR;
    unsigned long mask = FAN_OPEN_PERM | FAN_ONDIR | FAN_EVENT_ON_CHILD;
    if (argc < 2 || events < 0 || fanotify_mark(events, flags, mask, AT_FDCWD, argv[1])) {
        printf("cannot watch: %s\n", strerror(errno));
        return 1;
    }
    printf("ready\n");
    fflush(stdout);
    char buffer[8192] __attribute__((aligned(8)));
    for (int done = 0; !done;) {
        ssize_t length = read(events, buffer, sizeof buffer);
        if (length < 0) return 1;
        struct fanotify_event_metadata *event = (void *)buffer;
        for (; FAN_EVENT_OK(event, length); event = FAN_EVENT_NEXT(event, length)) {
            char link[64], image[4096];
            snprintf(link, sizeof link, "/proc/self/fd/%d", event->fd);
            ssize_t named = readlink(link, image, sizeof image - 1);
            // Its own opens are events too, which nobody would answer.
            if (named > 0 && event->pid != getpid() && !done) {
                image[named] = 0;
                unsigned off = FAN_MARK_REMOVE | FAN_MARK_ONLYDIR;
                char manifest[4200];
                snprintf(manifest, sizeof manifest, "%s/manifest.json", image);
                if (strcmp(image, argv[1]) && !access(manifest, F_OK)) {
                    fanotify_mark(events, off, mask, AT_FDCWD, argv[1]);
                    done = damage(image);
                }
            }
            struct fanotify_response response = {event->fd, FAN_ALLOW};
            if (write(events, &response, sizeof response) < 0) return 1;
            close(event->fd);
        }
    }
    return 0;
}
