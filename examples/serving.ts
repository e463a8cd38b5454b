// A model that answers over HTTP with the OpenAI API, started and asked by one program. The model here is trained for
// a few steps; give `serveModel` the folder of a run to serve yours.
import { openDevice, readConfig, train } from 'trefoil';
import { serveModel } from 'trefoil/serve';

const config = readConfig('quickstart', {
  data: { path: 'package:docs/*.md', tokenizer: 'byte' },
  train: { steps: 4, seq_len: 128, batch_size: 1, out_dir: `artifacts/serving-${Date.now()}` },
});
const { outDir } = await train({ config, device: openDevice('cpu') });

const server = await serveModel(outDir, { id: 'mine', port: 0, device: 'cpu', engine: { maxContext: 256 } });
const response = await fetch(`${server.url}/v1/completions`, {
  method: 'POST',
  headers: { 'content-type': 'application/json' },
  body: JSON.stringify({ model: 'mine', prompt: 'The ', max_tokens: 16, seed: 1 }),
});
const answer = (await response.json()) as { model: string; usage: { completion_tokens: number } };
console.log(`${response.status}: ${answer.model} answered with ${answer.usage.completion_tokens} tokens`);
await server.close();
