/** Safetensors of a page: from a Blob, from a server that knows ranges, and from one that does not. */
import { createServer, type Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import { afterEach, describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { cpu } from '../testing/devices.js';
import { createModel, generate, loadModel, parseConfig, saveModel } from './model.js';
import { BrowserTensors } from './tensors.js';
import { openBatches, Training } from './training.js';

const CONFIG = parseConfig({
  model: { dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 8, n_sel: 3, w: 8 },
  data: { source: 'stories', tokenizer: 'stories' },
  train: { steps: 2, seq_len: 64, batch_size: 1, lr: 1e-3 },
});

let server: Server | null = null;
afterEach(() => {
  server?.close();
  server = null;
});

/** Serves `content`; returns the address and the ranges that were asked for. */
async function serve(content: Uint8Array, knowsRanges: boolean): Promise<{ address: string; asked: string[] }> {
  const asked: string[] = [];
  server = createServer((request, response) => {
    const range = request.headers.range ?? '';
    asked.push(range);
    const [, from, to] = /^bytes=(\d+)-(\d+)$/.exec(range) ?? [];
    if (!knowsRanges || from === undefined) return void response.writeHead(200).end(content);
    const part = content.subarray(Number(from), Number(to) + 1);
    response.writeHead(206, { 'Content-Range': `bytes ${from}-${to}/${content.length}` }).end(part);
  });
  await new Promise<void>((resolve) => server!.listen(0, '127.0.0.1', resolve));
  return { address: `http://127.0.0.1:${(server.address() as AddressInfo).port}/model.safetensors`, asked };
}

const values = (model: { parameters: readonly { value: { readBytes(): Uint8Array } }[] }) =>
  model.parameters.map(({ value }) => [...value.readBytes()]);

describe('a model of a page', () => {
  it('trains, is saved and loaded, and writes the same text then', async () => {
    const source = createModel(cpu(), CONFIG);
    const training = new Training({
      model: source.model,
      config: CONFIG,
      batches: openBatches(CONFIG, source.tokenizer),
    });
    const losses = [];
    for (let step = training.step(); step; step = training.step()) losses.push(step.loss);
    expect(losses.length).toBe(2);
    expect(losses[1]).toBeLessThan(losses[0]);
    training.free();
    const files = saveModel(source, 2);
    const loaded = await loadModel(cpu(), files);
    expect(loaded.step).toBe(2);
    expect(values(loaded.model)).toEqual(values(source.model));
    const text = async (of: typeof source) => {
      let written = '';
      for await (const piece of generate(of, 'Once', { maxNewTokens: 8, sampling: { temperature: 0 } }))
        written += piece;
      return written;
    };
    expect(await text(loaded)).toBe(await text(source));
    loaded.free();
    source.free();
  });

  it('writes documents of a schema', async () => {
    const source = createModel(cpu(), parseConfig({ ...CONFIG, data: { ...CONFIG.data, tokenizer: 'byte' } }));
    const schema = {
      type: 'object',
      properties: { n: { enum: [1, 2] } },
      required: ['n'],
      additionalProperties: false,
    };
    const responseFormat = { type: 'json_schema', schema } as const;
    let text = '';
    for await (const piece of generate(source, 'x', { maxNewTokens: 40, responseFormat })) text += piece;
    expect([1, 2]).toContain((JSON.parse(text) as { n: number }).n);
    source.free();
  });

  it.each([true, false])('is read from a server, with ranges: %s', async (knowsRanges) => {
    const source = createModel(cpu(), CONFIG);
    const { weights, config } = saveModel(source, 0);
    const { address, asked } = await serve(new Uint8Array(await weights.arrayBuffer()), knowsRanges);
    const loaded = await loadModel(cpu(), { config, weights: address });
    expect(values(loaded.model)).toEqual(values(source.model));
    expect(asked.length).toBe(knowsRanges ? loaded.model.parameters.length + 3 : 1);
    loaded.free();
    source.free();
  });

  it('is refused in one line when its files do not fit', async () => {
    const source = createModel(cpu(), CONFIG);
    const { weights, config } = saveModel(source, 0);
    const other = JSON.parse(await config.text());
    const refusal = async (changes: object, content: Blob = weights) => {
      const held = cpu().memory.usedBytes;
      const changed = new Blob([JSON.stringify({ ...other, ...changes })]);
      const error = await loadModel(cpu(), { config: changed, weights: content }).then(
        () => expect.unreachable('no error'),
        (thrown: unknown) => thrown,
      );
      expect(error).toBeInstanceOf(UsageError);
      expect(cpu().memory.usedBytes - held).toBeLessThanOrEqual(4096); // the table of rotations
      return (error as Error).message;
    };
    expect(await refusal({ model: { ...other.model, dim: 64 } })).toContain('this model needs F32');
    expect(await refusal({ tokenizer: 'gpt2' })).toContain('a browser has byte and stories, not "gpt2"');
    expect(await refusal({ format: 'other' })).toContain('is not that of a Trefoil model');
    expect(await refusal({}, new Blob([Uint8Array.of(1, 2, 3)]))).not.toContain('\n');
    source.free();
  });

  it('has no tensor of another name', async () => {
    const source = createModel(cpu(), CONFIG);
    const tensors = await BrowserTensors.open(saveModel(source, 0).weights);
    expect((await tensors.read('embedding')).shape).toEqual([source.tokenizer.vocabSize, 32]);
    await expect(tensors.read('nothing')).rejects.toThrow('there is no tensor');
    source.free();
  });
});
