// One measurement of llama.cpp (node-llama-cpp), for inference.mjs: node inference-llama.mjs MODULES FILE.gguf THREADS TASK
import { createRequire } from 'node:module';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { cpuSeconds, measure, report } from './inference-task.mjs';

const [modules, file, threads, task] = process.argv.slice(2);
const { getLlama, LlamaLogLevel } = await import(
  pathToFileURL(createRequire(join(resolve(modules), 'x')).resolve('node-llama-cpp')).href
);
const llama = await getLlama({
  gpu: false,
  build: 'never',
  maxThreads: Number(threads),
  logLevel: LlamaLogLevel.error,
});
const model = await llama.loadModel({ modelPath: resolve(file), useMmap: true });

await measure(task, async ({ prompt, decode, length }) => {
  const context = await model.createContext({
    contextSize: length,
    batchSize: 512,
    sequences: 1,
    threads: Number(threads),
    flashAttention: true,
  });
  const sequence = context.getSequence();
  const counts = { promptSeconds: 0, decodeSeconds: 0, tokens: [] };
  let before = cpuSeconds();
  // The last token of the prompt is read by the first step of decoding.
  if (prompt.length > 1) await sequence.evaluateWithoutGeneratingNewTokens(prompt.slice(0, -1));
  counts.promptSeconds = cpuSeconds() - before;
  before = cpuSeconds();
  if (decode > 0)
    for await (const token of sequence.evaluate(prompt.slice(-1), { temperature: 0, yieldEogToken: true })) {
      counts.tokens.push(token);
      if (counts.tokens.length === 1) counts.firstTokenSeconds = cpuSeconds();
      if (counts.tokens.length === decode) break;
    }
  counts.decodeSeconds = cpuSeconds() - before;
  return counts;
});
report();
await llama.dispose();
