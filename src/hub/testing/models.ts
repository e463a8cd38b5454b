/** Models on a test hub: the right files, small, and others beside them that no model needs. */
import { randomBytes } from 'node:crypto';
import type { HubModel } from './hub-server.js';

export const MODEL = 'owner/small';
/** The files of `shardedModel` that `pullModel` downloads. */
export const NEEDED = [
  'config.json',
  'generation_config.json',
  'model-00001-of-00002.safetensors',
  'model-00002-of-00002.safetensors',
  'model.safetensors.index.json',
  'tokenizer.json',
];

/** Content without meaning, which a download does not look at. Shards of 100,000 bytes arrive in several pieces. */
export function shardedModel(commit?: string): HubModel {
  const shards = NEEDED.filter((name) => name.includes('-of-'));
  const files = new Map<string, Uint8Array>([
    ['.gitattributes', Buffer.from('*')],
    ['README.md', Buffer.from('# A model')],
    ['config.json', Buffer.from('{"architectures": ["LlamaForCausalLM"]}')],
    ['generation_config.json', Buffer.from('{}')],
    ['tokenizer.json', Buffer.from('{"model": {}}')],
    ['vocab.json', Buffer.from('{}')],
    ['pytorch_model.bin', randomBytes(1000)],
    ['onnx/model.onnx', randomBytes(1000)],
    ['original/config.json', Buffer.from('{}')],
    ...shards.map((name) => [name, randomBytes(100_000)] as const),
    ['model.safetensors.index.json', index({ 'a.weight': shards[0], 'b.weight': shards[1], 'c.weight': shards[0] })],
  ]);
  return { name: MODEL, files, ...(commit !== undefined && { commit }) };
}

/** One file of weights, and whatever else is given. */
export function plainModel(files: Readonly<Record<string, Uint8Array>> = {}): HubModel {
  const own = { 'config.json': Buffer.from('{}'), 'model.safetensors': randomBytes(100_000) };
  return { name: MODEL, files: new Map(Object.entries({ ...own, ...files })) };
}

export function index(map: Readonly<Record<string, string>>): Uint8Array {
  return Buffer.from(JSON.stringify({ weight_map: map }));
}
