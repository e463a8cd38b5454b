// For LD_PRELOAD: write(2) and pwrite(2) to files whose path contains $HANGING_FILES and that have at least $HANGING_FROM bytes
// block while the file $HANGING_WHILE exists, as on a network file system whose server is gone.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void wait_while_hanging(int descriptor) {
  const char* names = getenv("HANGING_FILES");
  const char* marker = getenv("HANGING_WHILE");
  const char* from = getenv("HANGING_FROM");
  if (!names || !marker || !from) return;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = 0;
  struct stat file;
  if (!strstr(path, names) || fstat(descriptor, &file) != 0 || file.st_size < atol(from)) return;
  while (access(marker, F_OK) == 0) usleep(20000);
}

extern "C" ssize_t write(int descriptor, const void* bytes, size_t count) {
  static auto next = (ssize_t(*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
  wait_while_hanging(descriptor);
  return next(descriptor, bytes, count);
}

extern "C" ssize_t pwrite(int descriptor, const void* bytes, size_t count, off_t offset) {
  static auto next = (ssize_t(*)(int, const void*, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
  wait_while_hanging(descriptor);
  return next(descriptor, bytes, count, offset);
}

extern "C" ssize_t pwrite64(int descriptor, const void* bytes, size_t count, off64_t offset) {
  return pwrite(descriptor, bytes, count, offset);
}
