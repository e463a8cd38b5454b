// A worker that helps with kernels in WebAssembly. Plain JavaScript: it is started as it lies here, from sources and from dist/.
import { readSync } from 'node:fs';
import { workerData } from 'node:worker_threads';

const { module, memory, id, stack, tls, failed } = workerData;
let outcome = 1;
const env = {
  memory,
  seconds: () => performance.now() / 1000,
  fail: (bytes) => {
    if (bytes > 0) outcome = 2;
    throw new Error('a helper cannot go on');
  },
  read_file: (descriptor, offset, to, bytes) => {
    const into = new Uint8Array(memory.buffer, to >>> 0, bytes);
    for (let at = 0; at < bytes; ) {
      const count = readSync(descriptor, into, at, bytes - at, offset + at);
      if (count <= 0) return 0;
      at += count;
    }
    return 1;
  },
};
try {
  const { exports } = new WebAssembly.Instance(module, { env });
  exports.__stack_pointer.value = stack;
  exports.__wasm_init_tls(tls);
  exports.trefoil_help(id);
} catch {
  // The thread that waits for this one throws, with the reason that it finds here.
  Atomics.store(new Int32Array(memory.buffer, failed, 1), 0, outcome);
}
