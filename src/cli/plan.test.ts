import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { temporaryFolder } from '../testing/run.js';
import { runCli } from './testing/run.js';

const root = join(import.meta.dirname, '..', '..');

async function planned(...flags: string[]) {
  const { code, stdout, stderr } = await runCli(['plan', ...flags, '--json']);
  expect(code, stderr).toBe(0);
  expect(stderr).toBe('');
  return JSON.parse(stdout);
}

describe('trefoil plan', () => {
  it('scales the figures of the H200 to other GPUs and states the assumption', async () => {
    const stepOf = async (gpu: string) =>
      (await planned('--gpus', '1', '--config', '1b', '--gpu', gpu)).rows[0].step_ms;
    const [a100, h100, h200, b200] = await Promise.all(['a100', 'h100', 'h200', 'b200'].map(stepOf));
    expect(a100 / h200).toBeGreaterThan(2.5);
    expect(a100 / h200).toBeLessThan(989 / 312);
    expect(h100).toBeGreaterThan(h200);
    expect(b200).toBeLessThan(h200 / 2);
    const { stdout } = await runCli(['plan', '--gpus', '1', '--gpu', 'b200']);
    expect(stdout.replace(/\s+/g, ' ')).toContain(
      'assumed for B200, on which nothing was measured: the share of the peak',
    );
    expect((await runCli(['plan', '--gpus', '1'])).stdout.replace(/\s+/g, ' ')).toContain('measured on NVIDIA H200');
    const twice = await runCli(['plan', '--gpu', 'a100', '--measured', 'mine.json']);
    expect(twice).toMatchObject({ code: 2, stderr: expect.stringContaining('leave it out with --measured') });
  });

  it('prints one JSON value: settings, rows up to the number of GPUs, where it stops, what is next', async () => {
    const plan = await planned('--gpus', '24', '--per-node', '4', '--link', '25');
    expect(Object.keys(plan)).toEqual([
      ...['machine', 'device', 'config', 'params', 'attention', 'step', 'network', 'parallel', 'limits'],
      ...['rows', 'stops', 'next'],
    ]);
    expect(plan).toMatchObject({
      config: '125m',
      device: 'cuda',
      params: 155_475_120,
      attention: 'nsa',
      step: {
        seq_len: 2048,
        batch_size: 32,
        accumulate_grad_batches: 1,
        gradient_checkpointing: false,
        precision: 'bf16',
      },
      network: { per_node: 4, node_link_gbs: 450, link_gbs: 25, latency_us: 10 },
      parallel: { wire: 'f32', zero1: false, bucket_bytes: 16_777_216, overlap: true },
    });
    expect(plan.rows.map(({ gpus, nodes }: { gpus: number; nodes: number }) => [gpus, nodes])).toEqual([
      ...[[1, 1], [2, 1], [4, 1], [8, 2], [16, 4]], // biome-ignore format: pairs
      [24, 6],
    ]);
  });

  it('takes model and step from a config, and flags before it', async () => {
    const plan = await planned('--gpus', '2', '--config', '125m_2xa100_production', '--batch-size', '4');
    expect(plan.config).toBe('125m_2xa100_production');
    expect(plan.step).toEqual({
      seq_len: 2048,
      batch_size: 4,
      accumulate_grad_batches: 1,
      gradient_checkpointing: true,
      precision: 'bf16',
    });
    const changed = await planned('--gpus', '1', '--seq-len', '8192', '--set', 'model.n_layers=24');
    expect(changed.step).toMatchObject({ seq_len: 8192, batch_size: 8 }); // 65,536 tokens, as measured
    expect(changed.params).toBeGreaterThan(plan.params);
    const accumulated = await planned('--gpus', '1', '--accum-batches', '4');
    expect(accumulated.rows[0].global_batch).toBe(4 * 65_536);
  });

  it('every way to exchange gradients changes the rows', async () => {
    const last = async (...flags: string[]) =>
      (await planned('--gpus', '64', '--link', '2', ...flags)).rows.at(-1) as Record<string, number>;
    const plain = await last();
    expect((await last('--wire', 'bf16')).exposed_ms).toBeLessThan(0.6 * plain['exposed_ms']);
    expect((await last('--no-overlap')).exposed_ms).toBeGreaterThan(plain['exposed_ms']);
    expect((await last('--zero1')).memory_mib).toBeLessThan(plain['memory_mib'] - 1000);
    expect((await last('--bucket', '1')).buckets).toBe(7 * 12 + 3); // no gradient is cut: seven of a block and the tables are larger
    expect((await last('--latency', '1000')).communication_ms).toBeGreaterThan(plain['communication_ms']);
    const wide = ['--node-link', '1000', '--per-node', '64'];
    expect((await last(...wide)).exposed_ms).toBeLessThan(plain['exposed_ms']);
  });

  it('says in words where it stops and what would come next', async () => {
    const { code, stdout } = await runCli(['plan', '--gpus', '64', '--gpu-memory', '20', '--min-efficiency', '0.999']);
    expect(code).toBe(0);
    expect(stdout.replace(/\s+/g, ' ')).toContain('measured on NVIDIA H200');
    expect(stdout).toContain('memory: more than 20 GiB on each of 1 GPU\n');
    expect(stdout).toContain('communication: efficiency is below 100 % from 2 GPUs on');
    expect(stdout).toContain('batch: beyond 1.05M tokens from 32 GPUs on');
    expect(stdout).toMatch(/^ {2}checkpointing: \d+\.\d GiB per GPU, fits$/m);
    expect(stdout).toMatch(/^ {2}sequence parallel over 4 \(not built\): /m);
    const calm = await runCli(['plan', '--gpus', '64', '--critical-batch', '100000000']);
    expect(calm.stdout).not.toContain('What would help next');
  });

  it('takes figures of your own, of the CPU too', async () => {
    const { runs } = JSON.parse(readFileSync(join(root, 'bench', 'results', 'cpu.json'), 'utf8'));
    const own = runs.find(({ name }: { name: string }) => name === 'training');
    const folder = temporaryFolder();
    try {
      const measured = join(folder.path, 'measured.json');
      writeFileSync(measured, JSON.stringify(own));
      const plan = await planned('--measured', measured, '--config', 'base', '--gpus', '2', '--per-node', '1');
      expect(plan.device).toBe('cpu');
      expect(plan.rows[0].tokens_per_s).toBeCloseTo(302, 0);
    } finally {
      folder.remove();
    }
  });

  it.each([
    [['--gpus', '0'], 'It must be an integer >= 1'],
    [['--link', '0'], 'It must be greater than 0'],
    [['--wire', 'fp8'], 'Allowed choices are f32, bf16'],
    [['--measured', '/no/such/file'], '/no/such/file: cannot be read (ENOENT)'],
    [['--set', 'model.attention=dense'], 'no dense attention among the measured figures'],
    [['--config', 'nowhere'], 'no such file and no shipped config'],
    [['--gpuz', '4'], 'unknown option'],
  ])('%j: one line, code 2', async (flags, message) => {
    const { code, stdout, stderr } = await runCli(['plan', ...flags]);
    expect(code).toBe(2);
    expect(stderr).toContain(message);
    expect(stderr.trim().split('\n')).toHaveLength(1);
    expect(stdout).toBe('');
  });
});
