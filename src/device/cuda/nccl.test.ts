/** NCCL: what can be tested without a GPU, and two ranks that share one. */

import { type ChildProcess, spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, symlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { afterEach, beforeAll, describe, expect, it } from 'vitest';
import { root } from '../../testing/cli.js';
import { buildIdleGpu, idleGpuAbsence } from '../../testing/idle-gpu.js';
import { ncclAbsence } from '../../testing/nccl.js';
import { cudaAbsence } from './cuda.js';
import { chooseGpu, refuseSharedGpus, sharedGpuSettings } from './gpu-choice.js';
import { NCCL_ID_BYTES, NcclLibrary } from './nccl-library.js';

const missing = ncclAbsence();
const absence = cudaAbsence() ?? missing;

describe('the NCCL library', () => {
  it('is named with the remedy if it is missing', (context) => {
    if (missing === null) return context.skip('NCCL is installed here');
    expect(() => new NcclLibrary()).toThrow(/^NCCL \(libnccl\.so\.2\) was not found: .*pip install nvidia-nccl/);
  });

  it('has a version, unique ids and error messages', (context) => {
    if (missing) return context.skip(missing);
    const library = new NcclLibrary();
    expect(library.version).toMatch(/^2\.\d+\.\d+$/);
    const [first, second] = [library.uniqueId(), library.uniqueId()];
    expect([first.length, second.length]).toEqual([NCCL_ID_BYTES, NCCL_ID_BYTES]);
    expect(Buffer.compare(first, second)).not.toBe(0);
    expect(() => library.join(new Uint8Array(5), 0, 1)).toThrow('an NCCL id has 128 bytes, not 5');
    // Rank 7 of 2 is invalid with and without a GPU.
    expect(() => library.join(first, 7, 2)).toThrow(/^NCCL: ncclCommInitRank failed: .*; NCCL_DEBUG=INFO prints/);
  });
});

it('every function of NCCL can be called from here, by a library of the tests', (context) => {
  const absence = idleGpuAbsence();
  if (absence) return context.skip(absence);
  const gpu = buildIdleGpu();
  const home = mkdtempSync(join(tmpdir(), 'trefoil-nccl-'));
  try {
    symlinkSync(gpu.folder, join(home, 'lib64'));
    const library = new NcclLibrary({ CUDA_HOME: home });
    expect(library.version).toMatch(/^\d+\.\d+\.\d+$/);
    expect(library.uniqueId()).toHaveLength(NCCL_ID_BYTES);
    expect(() => library.join(new Uint8Array(5), 0, 1)).toThrow('an NCCL id has 128 bytes, not 5');
  } finally {
    rmSync(home, { recursive: true });
    gpu.remove();
  }
});

describe('the GPU of a rank', () => {
  it('is the one of its local rank, or the only visible one', () => {
    expect([0, 1, 7].map((local) => chooseGpu(local, 8, {}))).toEqual([0, 1, 7]);
    expect(chooseGpu(3, 1, {})).toBe(0);
    expect(() => chooseGpu(2, 2, {})).toThrow('LOCAL_RANK 2: 2 GPUs are visible, numbered from 0; start 2 ranks');
    expect(chooseGpu(3, 2, { TREFOIL_SHARE_GPU: '1' })).toBe(1);
  });

  it('belongs to one rank unless sharing is enabled', () => {
    const gpus = [
      { uuid: 'a', host: 'node0' },
      { uuid: 'b', host: 'node0' },
      { uuid: 'a', host: 'node0' },
    ];
    expect(() => refuseSharedGpus(gpus.slice(0, 2), {})).not.toThrow();
    expect(() => refuseSharedGpus(gpus, {})).toThrow('ranks 0 and 2 have the same GPU of node0: start one rank');
    expect(() => refuseSharedGpus(gpus, { TREFOIL_SHARE_GPU: '1' })).not.toThrow();
    expect(sharedGpuSettings(1, { NCCL_SOCKET_IFNAME: 'eth0' })).toEqual({
      NCCL_HOSTID: 'trefoil-rank-1',
      NCCL_P2P_DISABLE: '1',
      NCCL_SHM_DISABLE: '1',
      NCCL_IB_DISABLE: '1',
    });
  });
});

interface Line {
  readonly [key: string]: unknown;
  readonly error?: string;
}

describe('two ranks that share a GPU', () => {
  const onGpu = (name: string, body: () => Promise<void>) =>
    it(name, async (context) => {
      if (absence) return context.skip(absence);
      await body();
    });
  // Inside the repository, so that its packages resolve.
  const program = join(root, 'artifacts', 'testing', 'nccl-rank.mjs');
  const children: ChildProcess[] = [];

  beforeAll(async () => {
    if (absence) return;
    mkdirSync(join(root, 'artifacts', 'testing'), { recursive: true });
    const settings = { bundle: true, platform: 'node', format: 'esm', packages: 'external' } as const;
    for (const [source, outfile] of [
      ['./testing/nccl-rank.ts', program],
      ['../../train/ranks/guard-thread.ts', join(dirname(program), 'guard-thread.js')],
    ])
      await build({ entryPoints: [fileURLToPath(new URL(source, import.meta.url))], outfile, ...settings });
  });
  afterEach(() => {
    for (const child of children.splice(0)) child.kill('SIGKILL');
  });

  function start(scenario: string, rank: number, env: Record<string, string> = { TREFOIL_SHARE_GPU: '1' }) {
    const port = 23_000 + (process.pid % 1000) * 20; // the store tries further ports if it is in use
    const options = { rank, world: 2, key: `${scenario} ${process.pid}`, port, scenario };
    const child = spawn(process.execPath, [program, JSON.stringify(options)], {
      env: { ...process.env, ...env },
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    children.push(child);
    const lines: Line[] = [];
    let rest = '';
    let onLine = (_line: Line) => {};
    child.stdout.setEncoding('utf8').on('data', (text: string) => {
      const parts = (rest + text).split('\n');
      rest = parts.pop()!;
      for (const part of parts) {
        lines.push(JSON.parse(part));
        onLine(lines.at(-1)!);
      }
    });
    const ended = new Promise<Line[]>((resolve) => child.once('close', () => resolve(lines)));
    const said = (key: string) =>
      new Promise<void>((resolve) => {
        onLine = (line) => key in line && resolve();
        for (const line of lines) onLine(line);
      });
    return { child, lines, ended, said };
  }

  async function run(scenario: string): Promise<Line[][]> {
    const all = await Promise.all([0, 1].map((rank) => start(scenario, rank).ended));
    for (const lines of all) expect(lines.flatMap(({ error }) => error ?? [])).toEqual([]);
    return all.map((lines) => lines.slice(1, -1)); // without the lines of joining and closing
  }

  onGpu('reduce, scatter, gather and broadcast every type, the same bits on both', async () => {
    const [first, second] = await run('operations');
    const right = { allReduce: true, max: true, min: true, reduceScatter: true };
    const rest = { allGather: true, broadcast: true, inPlace: true };
    const types = ['f32', 'f64', 'bf16', 'i32', 'u8'].map((dtype) => ({ dtype, ...right, ...rest }));
    expect(first.slice(0, 5)).toEqual(types);
    expect(second.slice(0, 5)).toEqual(types);
    expect(first[5]).toEqual(second[5]);
    expect(first[5]['isRepeated']).toBe(true);
  });

  onGpu('keep the order of the device’s stream, launched one by one and as a graph', async () => {
    const all = await run('order');
    const expected = (value: number) => [2 * value + 1, 2 * (2 * value + 1), value + 1];
    for (const [line] of all)
      expect(line).toEqual({
        plain: [1, 2].map(expected),
        replayed: [1, 2, 3].map(expected),
        mixed: expected(5),
      });
  });

  onGpu('reduce concurrently with other work', async () => {
    const all = await run('overlap');
    for (const [line] of all) {
      expect(line['launches']).toBe(40);
      expect(line['during']).toBeGreaterThan(0);
    }
  });

  onGpu('abort an operation that another rank never starts', async () => {
    const all = await run('givenUp');
    all.forEach(([line], rank) => {
      expect(line).toMatchObject({ isWaiting: rank === 0, failure: 'collectives were used after they were closed' });
      expect(line['seconds']).toBeLessThan(5);
    });
  });

  onGpu('notice a killed rank', async () => {
    const [first, second] = [0, 1].map((rank) => start('lost', rank));
    await second.said('ready');
    second.child.kill('SIGKILL');
    const line = (await first.ended).at(-1)!;
    expect(line['failure']).toMatch(/^rank 0 of 2 on .*: NCCL: /);
    expect(line['seconds']).toBeLessThan(10);
  });

  onGpu('are refused unless sharing is enabled', async () => {
    const all = await Promise.all([0, 1].map((rank) => start('operations', rank, { TREFOIL_SHARE_GPU: '' }).ended));
    for (const lines of all)
      expect(lines.at(-1)?.error).toMatch(/^ranks 0 and 1 have the same GPU of .*: start one rank/);
  });
});
