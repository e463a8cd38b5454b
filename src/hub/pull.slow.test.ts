/** Downloads by the built program: two at once, ended by signals, on a full disk. */
import { spawnSync } from 'node:child_process';
import { mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterEach, describe, expect, it } from 'vitest';
import { testFolder } from '../data/testing/folder.js';
import { ended, startTrefoil, trefoil } from '../testing/cli.js';
import { type Fault, type HubModel, type HubServer, SHA, startHub } from './testing/hub-server.js';
import { MODEL, NEEDED, shardedModel } from './testing/models.js';

const folder = testFolder();
const servers: HubServer[] = [];
afterEach(async () => {
  await Promise.all(servers.splice(0).map((server) => server.close()));
});

async function setting(fault: (number: number) => Fault | undefined) {
  const model = shardedModel();
  let number = 0;
  const server = await startHub({
    models: [model],
    fault: ({ path }) => (path.endsWith('.safetensors') ? fault(number++) : undefined),
  });
  servers.push(server);
  const home = folder.fresh();
  const env = { HF_HOME: home, HF_ENDPOINT: server.endpoint, HF_TOKEN: '', HF_HUB_CACHE: '', HF_HUB_OFFLINE: '' };
  return { model, server, env, repository: join(home, 'hub', 'models--owner--small') };
}

function expectFiles(model: HubModel, repository: string): void {
  const snapshot = join(repository, 'snapshots', SHA);
  expect(readdirSync(snapshot).sort()).toEqual([...NEEDED].sort());
  for (const name of NEEDED) expect(readFileSync(join(snapshot, name)).equals(model.files.get(name)!), name).toBe(true);
  expect(readdirSync(join(repository, 'blobs'))).toHaveLength(NEEDED.length);
}

const partials = (repository: string) =>
  readdirSync(join(repository, 'blobs')).filter((name) => name.endsWith('.incomplete'));

describe('trefoil pull', () => {
  it('by four processes at once, from a hub that resets, gives each the right files', async () => {
    const { model, env, repository } = await setting((n) => (n < 8 ? { resetAfter: 10_000 * n } : undefined));
    const results = await Promise.all([1, 2, 3, 4].map(() => trefoil(['pull', `hf:${MODEL}`, '--json'], { env })));
    for (const { code, stdout, stderr } of results) {
      expect(code, stderr).toBe(0);
      expect(JSON.parse(stdout)).toMatchObject({ name: `hf:${MODEL}@${SHA}`, commit: SHA, files: 6 });
    }
    expectFiles(model, repository);
  });

  it.each(['SIGINT', 'SIGTERM', 'SIGKILL'] as const)(
    'ended by %s keeps what has arrived and continues',
    async (signal) => {
      const { model, server, env, repository } = await setting((n) => (n < 2 ? 'stall' : undefined));
      const child = startTrefoil(['pull', `hf:${MODEL}`], env);
      let text = '';
      child.stderr!.on('data', (chunk) => {
        text += chunk;
      });
      const weigh = () => {
        try {
          return partials(repository).map((name) => statSync(join(repository, 'blobs', name)).size);
        } catch {
          return []; // no folder yet
        }
      };
      while (weigh().filter((bytes) => bytes === 50_000).length < 2) await sleep(20);
      child.kill(signal);
      expect(await ended(child)).toEqual({ code: null, signal });
      if (signal !== 'SIGKILL')
        expect(text).toContain('interrupted; what has arrived is kept, and the same command continues\n');
      const asked = server.requests.length;
      const { code, stderr } = await trefoil(['pull', `hf:${MODEL}`], { env });
      expect(code, stderr).toBe(0);
      expectFiles(model, repository);
      expect(server.requests.slice(asked).filter((line) => line.endsWith('bytes=50000-99999'))).toHaveLength(2);
    },
  );

  it('says that a disk is full, before and during the download', async ({ skip }) => {
    const { model, env } = await setting((n) => (n < 2 ? 'stall' : undefined));
    const disk = folder.path('disk');
    mkdirSync(disk);
    const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=256k', 'tmpfs', disk], { encoding: 'utf8' });
    if (mount.status !== 0) return skip(`cannot mount a tmpfs: ${mount.error?.message ?? mount.stderr.trim()}`);
    try {
      const here = { ...env, HF_HOME: disk };
      writeFileSync(join(disk, 'other'), Buffer.alloc(150_000));
      const before = await trefoil(['pull', `hf:${MODEL}`], { env: here });
      expect(before.code).toBe(1);
      expect(before.stderr).toMatch(
        /disk\/hub: 1 MB are to be downloaded, and the disk has 1 MB left; free some space, or set/,
      );
      writeFileSync(join(disk, 'other'), '');
      const child = startTrefoil(['pull', `hf:${MODEL}`], here);
      let text = '';
      child.stderr!.on('data', (chunk) => {
        text += chunk;
      });
      const repository = join(disk, 'hub', 'models--owner--small');
      while (!readdirSync(join(repository, 'blobs')).some((name) => name.endsWith('.incomplete'))) await sleep(20);
      try {
        writeFileSync(join(disk, 'other'), Buffer.alloc(256_000)); // another program takes the rest
      } catch (error) {
        expect(error).toMatchObject({ code: 'ENOSPC' });
      }
      expect(await ended(child)).toEqual({ code: 1, signal: null });
      expect(text).toMatch(/\.incomplete: cannot write: no space left on the disk; free some space/);
      writeFileSync(join(disk, 'other'), '');
      const { code, stderr } = await trefoil(['pull', `hf:${MODEL}`], { env: here });
      expect(code, stderr).toBe(0);
      expectFiles(model, repository);
    } finally {
      expect(spawnSync('umount', ['-l', disk]).status).toBe(0);
    }
  });
});
