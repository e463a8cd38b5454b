// Compiles the five kernel files with NVRTC, as the program does at run time: no nvcc, no system headers.
//   nvrtc <libnvrtc.so> [extra options]   from the repository's root; prints the time and the size of each cubin
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

// The few declarations of nvrtc.h that are used; the library is opened by name.
typedef struct Program* nvrtcProgram;
typedef int nvrtcResult;
constexpr nvrtcResult NVRTC_SUCCESS = 0;

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  void* const library = dlopen(argv[1], RTLD_NOW);
  if (!library) {
    printf("nvrtc: %s\n", dlerror());
    return 3;
  }
#define FUNCTION(result, name, ...) const auto name = (result (*)(__VA_ARGS__))dlsym(library, #name)
  FUNCTION(nvrtcResult, nvrtcCreateProgram, nvrtcProgram*, const char*, const char*, int, const char* const*,
           const char* const*);
  FUNCTION(nvrtcResult, nvrtcCompileProgram, nvrtcProgram, int, const char* const*);
  FUNCTION(nvrtcResult, nvrtcGetCUBINSize, nvrtcProgram, size_t*);
  FUNCTION(nvrtcResult, nvrtcGetProgramLogSize, nvrtcProgram, size_t*);
  FUNCTION(nvrtcResult, nvrtcGetProgramLog, nvrtcProgram, char*);
  FUNCTION(nvrtcResult, nvrtcDestroyProgram, nvrtcProgram*);
  FUNCTION(const char*, nvrtcGetErrorString, nvrtcResult);
  int failures = 0;
  double total = 0;
  for (const char* op : {"compressed", "select", "selected", "window", "combine", "joint"}) {
    const std::string path = std::string("src/ops/attention/fused/") + op + ".cu";
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    const std::string source = text.str(), include = "-Isrc/ops/attention/fused";
    nvrtcProgram program;
    if (nvrtcCreateProgram(&program, source.c_str(), path.c_str(), 0, nullptr, nullptr) != NVRTC_SUCCESS) return 3;
    std::vector<const char*> options = {"-std=c++17", "--gpu-architecture=sm_90a", "-Isrc/device/cuda",
                                        include.c_str()};
    for (int i = 2; i < argc; i++) options.push_back(argv[i]);
    const auto start = std::chrono::steady_clock::now();
    const nvrtcResult result = nvrtcCompileProgram(program, (int)options.size(), options.data());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    total += seconds;
    size_t size = 0;
    if (result == NVRTC_SUCCESS) nvrtcGetCUBINSize(program, &size);
    printf("nvrtc %-10s %s %.2f s, cubin %zu bytes\n", op, nvrtcGetErrorString(result), seconds, size);
    if (result != NVRTC_SUCCESS) {
      failures++;
      nvrtcGetProgramLogSize(program, &size);
      std::string log(size, 0);
      nvrtcGetProgramLog(program, &log[0]);
      printf("%s\n", log.substr(0, 3000).c_str());
    }
    nvrtcDestroyProgram(&program);
  }
  printf("nvrtc total %.2f s, %d failed\n", total, failures);
  return failures;
}
