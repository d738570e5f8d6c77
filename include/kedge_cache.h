/* kedge_cache.h: writes into files of a folder that `kedge cache` absorbs, without a way to its daemon.
 * C99 and C++, Linux; link with -lkedge_cache (lib/kedge/libkedge_cache.so of an installation).
 *
 *     #include <kedge_cache.h>
 *
 *     if (kedge_cache_write(fd, bytes, length) != length) ...
 *
 * Each function does what the one without `kedge_cache_` does, errno included, of any descriptor; where the
 * file is a cache's, and the program writes at its end, sooner. Calls of both kinds may be mixed. They are
 * safe in threads and in signal handlers. A program that a signal kills in the middle of a call, or whose
 * handler leaves it by longjmp, may have moved the descriptor's position past bytes that were not written.
 *
 * The kernel does not know at once how long a file is that was written so. Who reads it or asks for its length
 * is told right; before mmap, sendfile, splice or copy_file_range of a descriptor that was open already, call
 * fstat, and write no file that is mapped by these functions. A function that replaces the C library's does so
 * by itself: libkedge_cache_preload.so. docs/cache.md has more.
 *
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 */
#ifndef KEDGE_CACHE_H
#define KEDGE_CACHE_H

#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

ssize_t kedge_cache_write(int fd, const void *bytes, size_t length);
ssize_t kedge_cache_pwrite(int fd, const void *bytes, size_t length, int64_t offset);
ssize_t kedge_cache_writev(int fd, const struct iovec *parts, int count);
ssize_t kedge_cache_pwritev(int fd, const struct iovec *parts, int count, int64_t offset);

/* Forgets what is known of a descriptor. Never needed: before close, it gives back what is held for it. */
void kedge_cache_forget(int fd);

#ifdef __cplusplus
}
#endif

#endif
