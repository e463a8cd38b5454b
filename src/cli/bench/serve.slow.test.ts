import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { writeFinalModel } from '../../infer/load.js';
import { tinyConfig, tinyModel } from '../../infer/testing/tiny-model.js';
import { trefoil } from '../../testing/cli.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-bench-serve-'));
beforeAll(() => {
  const config = tinyConfig();
  const model = tinyModel(config);
  writeFinalModel(folder, model, config);
  model.free();
});
afterAll(() => rmSync(folder, { recursive: true }));

const bench = (...words: string[]) => trefoil(['bench', 'serve', '--device', 'cpu', '--threads', '1', ...words]);

it('measures a closed loop, and compares with the model alone', async () => {
  const load = ['--requests', '12', '--concurrency', '4', '--prompt-tokens', '5-40', '--output-tokens', '4-9'];
  const { code, stdout, stderr } = await bench('--model', folder, ...load, '--json');
  expect(code, stderr).toBe(0);
  const result = JSON.parse(stdout);
  expect(result).toMatchObject({ requests: 12, completed: 12, refused: 0, disconnected: 0, failed: 0 });
  expect(result.goodput).toBeGreaterThan(0);
  expect(result.decode_alone).toBeGreaterThan(0);
  for (const name of ['first_byte_ms', 'ttft_ms', 'itl_ms', 'tpot_ms', 'e2e_ms'])
    expect(result[name].p50, name).toBeLessThanOrEqual(result[name].p99);
  expect(result.ttft_ms.p50).toBeLessThan(result.e2e_ms.p50);
});

it('has null for what so few requests do not measure', async () => {
  const load = ['--model', folder, '--requests', '2', '--concurrency', '1', '--output-tokens', '1'];
  const { stdout } = await bench(...load, '--json');
  expect(JSON.parse(stdout)).toMatchObject({
    completed: 2,
    decode_tokens_per_s: null,
    decode_ratio: null,
    itl_ms: { p50: null, p99: null, max: null },
  });
  expect((await bench(...load)).stdout).toMatch(/^ITL +– +– +–$/m);
});

it('refuses what a full queue cannot take under Poisson arrivals, and survives disconnects', async () => {
  const load = ['--requests', '60', '--rate', '500', '--output-tokens', '30', '--disconnect', '0.3'];
  const { code, stdout } = await bench('--model', folder, ...load, '--max-batch', '2', '--max-queued', '4');
  expect(code).toBe(0);
  const [, completed, refused, disconnected, failed] =
    /: (\d+) completed, (\d+) refused \(429\), (\d+) disconnected, (\d+) failed/.exec(stdout)!.map(Number);
  expect(completed + refused + disconnected).toBe(60);
  expect(refused).toBeGreaterThan(0);
  expect(completed).toBeGreaterThan(0);
  expect(failed).toBe(0);
  expect(stdout).toMatch(/^TTFT +\d/m);
});

it('needs a server or a model', async () => {
  const { code, stderr } = await bench();
  expect(stderr).toContain('give --url or --model');
  expect(code).toBe(2);
});
