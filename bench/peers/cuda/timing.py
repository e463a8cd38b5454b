"""Milliseconds of work on the GPU, by its own events."""

import torch


def median_ms(work, repeats):
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        work()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return sorted(times)[len(times) // 2]
