// Blocks of a cluster wait for each other and read each other's shared memory. CLUSTER 1: a block alone, on any GPU.
#pragma once
#include "elements.cuh"

#ifndef CLUSTER
#define CLUSTER 8
#endif

#if CLUSTER > 1
// All writes of the cluster's blocks, to their shared memory and elsewhere, are there for all of them.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ int cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return (int)rank;
}
// The same place in the shared memory of another block of the cluster.
template <class X> __device__ __forceinline__ X read_from(int rank, const X* own) {
  static_assert(sizeof(X) == 4, "words only");
  u32 at = (u32)__cvta_generic_to_shared(own), there, x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(there) : "memory");
  return *(X*)&x;
}
#else
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ int cluster_rank() { return 0; }
template <class X> __device__ __forceinline__ X read_from(int, const X* own) { return *own; }
#endif
