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
// For when nothing that was written has to be seen: a thread has only read.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// All that the cluster's blocks wrote before they arrived, unless relaxed, to shared memory and elsewhere, is visible
// to all of them.
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

// An exchange: what the blocks of a cluster send to this one, as an mbarrier in shared memory that counts the bytes. A
// store and its signal are one message, so the sender waits for nothing; a barrier of the cluster first waits until the
// stores of all threads have arrived. Used once.
//
// By one thread before the cluster meets for the first time. arrivals: how often `exchange_arrive` is called on it.
__device__ __forceinline__ void exchange_begin(u64* exchange, int arrivals, int bytes) {
  const u32 at = (u32)__cvta_generic_to_shared(exchange);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals + 1) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
// This thread's writes, to shared and global memory, are visible to the block `rank` after its wait.
__device__ __forceinline__ void exchange_arrive(u64* exchange, int rank) {
  u32 at = (u32)__cvta_generic_to_shared(exchange), there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
__device__ __forceinline__ void exchange_wait(u64* exchange) {
  const u32 at = (u32)__cvta_generic_to_shared(exchange);
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n}" ::"r"(at)
      : "memory");
}
// As `write_to`, and counted by the exchange of that block.
template <class X> __device__ __forceinline__ void send_to(int rank, X* own, X value, u64* exchange) {
  static_assert(sizeof(X) == 4 || sizeof(X) == 8 || sizeof(X) == 16, "words only");
  u32 at = (u32)__cvta_generic_to_shared(own), signal = (u32)__cvta_generic_to_shared(exchange), there, counted;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(signal), "r"(rank));
  const u32* const x = (const u32*)&value;
  if constexpr (sizeof(X) == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(x[0]),
                 "r"(counted)
                 : "memory");
  else if constexpr (sizeof(X) == 8)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(there),
                 "r"(x[0]), "r"(x[1]), "r"(counted)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     there),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(counted)
                 : "memory");
}
#else
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
__device__ __forceinline__ int cluster_rank() { return 0; }
template <class X> __device__ __forceinline__ void write_to(int, X* own, X value) { *own = value; }
template <class X> __device__ __forceinline__ X read_from(int, const X* own) { return *own; }
__device__ __forceinline__ void exchange_begin(u64*, int, int) {}
__device__ __forceinline__ void exchange_arrive(u64*, int) {}
__device__ __forceinline__ void exchange_wait(u64*) { __syncthreads(); }
template <class X> __device__ __forceinline__ void send_to(int, X* own, X value, u64*) { *own = value; }
#endif
