// For LD_PRELOAD: a file system with faults, for files whose path contains $FAULTY_FILES, while the file $FAULTY_WHILE exists.
// Writes to files of at least $HANGING_FROM bytes block, as on a network file system whose server is gone. Or, with $FAILING_ONE_IN,
// one in that many calls that write, read, flush, open, rename or make a folder fails (EIO, ENOSPC), or a write is short.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static thread_local unsigned long draws = 0;

static bool is_faulty(const char* path) {
  const char* names = getenv("FAULTY_FILES");
  const char* marker = getenv("FAULTY_WHILE");
  return names && marker && path && strstr(path, names) && access(marker, F_OK) == 0;
}

static bool is_faulty(int descriptor) {
  if (!getenv("FAULTY_FILES")) return false;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return false;
  path[length] = 0;
  return is_faulty(path);
}

static unsigned long draw() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  unsigned long x = now.tv_nsec + 1000003UL * ++draws;
  x = (x ^ (x >> 13)) * 0x9e3779b97f4a7c15UL;
  return x >> 20;
}

/** Whether this call is to fail; sets errno. */
template <class Place>
static bool fails(Place place, bool takes_space = true) {
  const char* one_in = getenv("FAILING_ONE_IN");
  if (!one_in || !is_faulty(place) || draw() % atol(one_in) != 0) return false;
  errno = takes_space && draw() % 2 ? ENOSPC : EIO;
  return true;
}

static void wait_while_hanging(int descriptor) {
  const char* from = getenv("HANGING_FROM");
  struct stat file;
  if (!from || !is_faulty(descriptor) || fstat(descriptor, &file) != 0 || file.st_size < atol(from)) return;
  while (is_faulty(descriptor)) usleep(20000);
}

/** How much of a write is done, or -1. */
static ssize_t allowed(int descriptor, size_t count) {
  wait_while_hanging(descriptor);
  if (!fails(descriptor)) return count;
  return count > 1 && draw() % 4 == 0 ? count / 2 : -1;
}

#define NEXT(name, ...) static auto next = (__VA_ARGS__)dlsym(RTLD_NEXT, name)

extern "C" {
ssize_t write(int descriptor, const void* bytes, size_t count) {
  NEXT("write", ssize_t(*)(int, const void*, size_t));
  ssize_t part = allowed(descriptor, count);
  return part < 0 ? -1 : next(descriptor, bytes, part);
}

ssize_t pwrite(int descriptor, const void* bytes, size_t count, off_t offset) {
  NEXT("pwrite", ssize_t(*)(int, const void*, size_t, off_t));
  ssize_t part = allowed(descriptor, count);
  return part < 0 ? -1 : next(descriptor, bytes, part, offset);
}

ssize_t pwrite64(int descriptor, const void* bytes, size_t count, off64_t offset) {
  return pwrite(descriptor, bytes, count, offset);
}

ssize_t read(int descriptor, void* bytes, size_t count) {
  NEXT("read", ssize_t(*)(int, void*, size_t));
  return fails(descriptor, false) ? -1 : next(descriptor, bytes, count);
}

ssize_t pread(int descriptor, void* bytes, size_t count, off_t offset) {
  NEXT("pread", ssize_t(*)(int, void*, size_t, off_t));
  return fails(descriptor, false) ? -1 : next(descriptor, bytes, count, offset);
}

ssize_t pread64(int descriptor, void* bytes, size_t count, off64_t offset) {
  return pread(descriptor, bytes, count, offset);
}

int fsync(int descriptor) {
  NEXT("fsync", int (*)(int));
  return fails(descriptor) ? -1 : next(descriptor);
}

int open(const char* path, int flags, ...) {
  NEXT("open", int (*)(const char*, int, ...));
  va_list words;
  va_start(words, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(words, mode_t) : 0;
  va_end(words);
  return fails(path, flags & O_CREAT) ? -1 : next(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list words;
  va_start(words, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(words, mode_t) : 0;
  va_end(words);
  return open(path, flags, mode);
}

int mkdir(const char* path, mode_t mode) {
  NEXT("mkdir", int (*)(const char*, mode_t));
  return fails(path) ? -1 : next(path, mode);
}

int rename(const char* from, const char* to) {
  NEXT("rename", int (*)(const char*, const char*));
  return fails(from) ? -1 : next(from, to);
}
}
