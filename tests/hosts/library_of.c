// Says whose NVML it finds, and its arguments; ends with 5.
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **words) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) return puts(dlerror()), 1;
    printf("%s", dlsym(library, "kedge_nvml") ? "kedge's" : "another's");
    for (int i = 1; i < count; i++) printf(" [%s]", words[i]);
    puts("");
    return 5;
}
