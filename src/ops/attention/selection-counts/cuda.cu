// counts[c] += rows of `selected` with c blocks. Whole numbers: the order of the sums does not matter.
extern "C" __global__ void selection_counts(const int* selected, int* counts, long long rows, int slots,
                                            int rows_per_block) {
  extern __shared__ int own[];
  for (int i = threadIdx.x; i <= slots; i += blockDim.x) own[i] = 0;
  __syncthreads();
  const long long first = (long long)blockIdx.x * rows_per_block;
  const long long end = first + rows_per_block < rows ? first + rows_per_block : rows;
  for (long long row = first + threadIdx.x; row < end; row += blockDim.x) {
    int count = 0;
    for (int s = 0; s < slots; s++) count += selected[row * slots + s] >= 0;
    atomicAdd(own + count, 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i <= slots; i += blockDim.x)
    if (own[i] > 0) atomicAdd(counts + i, own[i]);
}
