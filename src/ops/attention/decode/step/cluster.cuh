// Synchronization and shared-memory writes between the blocks of a cluster. CLUSTER 1: single blocks, on any GPU.
#pragma once
#include "elements.cuh"

#ifndef CLUSTER
#define CLUSTER 8
#endif

#if CLUSTER > 1
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// All that the cluster's blocks wrote before they arrived, to shared memory and elsewhere, is visible to all of them.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ int cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return (int)rank;
}
// To the same place in the shared memory of a block of the cluster, which must have started: 4, 8 or 16 bytes.
template <class X> __device__ __forceinline__ void write_to(int rank, X* own, X value) {
  static_assert(sizeof(X) == 4 || sizeof(X) == 8 || sizeof(X) == 16, "words only");
  u32 at = (u32)__cvta_generic_to_shared(own), there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  const u32* const x = (const u32*)&value;
  if constexpr (sizeof(X) == 4)
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(x[0]) : "memory");
  else if constexpr (sizeof(X) == 8)
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(there), "r"(x[0]), "r"(x[1]) : "memory");
  else
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(there), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                 "r"(x[3])
                 : "memory");
}
template <class X> __device__ __forceinline__ X read_from(int rank, const X* own) {
  static_assert(sizeof(X) == 4, "words only");
  u32 at = (u32)__cvta_generic_to_shared(own), there, x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(there) : "memory");
  return *(X*)&x;
}
#else
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
__device__ __forceinline__ int cluster_rank() { return 0; }
template <class X> __device__ __forceinline__ void write_to(int, X* own, X value) { *own = value; }
template <class X> __device__ __forceinline__ X read_from(int, const X* own) { return *own; }
#endif
