// For LD_PRELOAD: write(2) and pwrite(2) to files whose path contains $SLOW_FILES take as long as on a disk that writes
// $SLOW_BYTES_PER_S bytes a second.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_for_disk(int descriptor, size_t count) {
  const char* names = getenv("SLOW_FILES");
  const char* rate = getenv("SLOW_BYTES_PER_S");
  if (!names || !rate) return;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = 0;
  if (strstr(path, names)) usleep((useconds_t)(1e6 * count / atof(rate)));
}

extern "C" ssize_t write(int descriptor, const void* bytes, size_t count) {
  static auto next = (ssize_t(*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
  wait_for_disk(descriptor, count);
  return next(descriptor, bytes, count);
}

extern "C" ssize_t pwrite(int descriptor, const void* bytes, size_t count, off_t offset) {
  static auto next = (ssize_t(*)(int, const void*, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
  wait_for_disk(descriptor, count);
  return next(descriptor, bytes, count, offset);
}

extern "C" ssize_t pwrite64(int descriptor, const void* bytes, size_t count, off64_t offset) {
  return pwrite(descriptor, bytes, count, offset);
}
