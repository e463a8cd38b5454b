/** Ranks on several hosts, which are network namespaces of this machine: mpirun starts them, and TCP lies between them. */
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { pathToFileURL } from 'node:url';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { writeFileAtomic } from '../src/files.js';
import { pidExists } from '../src/process-identity.js';
import { readSection } from '../src/run/logs/heartbeat.js';
import { runPaths } from '../src/run/paths.js';
import { trefoilMain } from '../src/testing/cli.js';
import { type Hosts, openHosts } from '../src/testing/hosts.js';
import { mpirunAbsence, startMpirun, startMpirunWith } from '../src/testing/ranks.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';

let folder: ReturnType<typeof temporaryFolder>;
let hosts: Hosts | string;

beforeAll(() => {
  folder = temporaryFolder();
  hosts = mpirunAbsence() ?? openHosts(folder.path);
});
afterAll(() => {
  if (typeof hosts !== 'string') hosts.remove();
  folder.remove();
});

function trainWords(name: string, steps: number): string[] {
  const path = join(folder.path, `${name}.yaml`);
  const train = { steps, save_every: 5, eval_every: 5, zero: 1, out_dir: join(folder.path, name) };
  writeFileAtomic(path, stringify(tinyConfig(folder.path, { runtime: { threads: 1, tensorboard: false }, train })));
  return [process.execPath, trefoilMain(), 'train', '--config', path];
}

it('two hosts give the bits of two ranks on one', async ({ skip }) => {
  if (typeof hosts === 'string') return skip(hosts);
  const near = await startMpirun(2, trainWords('near', 12)).ended;
  expect(near.code, near.stderr).toBe(0);
  const far = await startMpirunWith(hosts.mpirunWords, trainWords('far', 12)).ended;
  expect(far.code, far.stderr).toBe(0);
  expect(far.stdout).toContain(`ranks: 2 over mpi on 2 hosts (${hosts.names.join(', ')})`);
  const weights = (name: string) => readFileSync(runPaths(join(folder.path, name)).model);
  expect(weights('far').equals(weights('near'))).toBe(true);
});

it('a rank that hangs on another host is named by it', async ({ skip }) => {
  if (typeof hosts === 'string') return skip(hosts);
  const words = ['-x', 'NSA_PG_TIMEOUT_MIN', ...hosts.mpirunWords];
  const run = startMpirunWith(words, trainWords('hung', 100_000), { NSA_PG_TIMEOUT_MIN: '0.3' });
  const path = runPaths(join(folder.path, 'hung')).section(1);
  const end = performance.now() + 300_000;
  while ((readSection(path)?.step ?? 0) < 3) {
    expect(performance.now(), run.output()).toBeLessThan(end);
    await sleep(20);
  }
  const { pid } = readSection(path)!;
  process.kill(pid, 'SIGSTOP');
  const stopped = performance.now();
  expect((await run.ended).code, run.output()).not.toBe(0);
  expect((performance.now() - stopped) / 1000).toBeLessThan(90);
  expect(run.output()).toMatch(
    new RegExp(`rank 1 on ${hosts.names[1]} \\(pid ${pid}, section \\w+ at step \\d+\\): kept`),
  );
});

/** Rank 0 waits for rank 1 before there are files of a run; rank 1 says its pid, and for `busyMs` does not come. */
function startBeforeRun({ mpirunWords }: Hosts, busyMs: number) {
  const program = join(folder.path, 'before-run.mjs');
  const dist = join(dirname(trefoilMain()), '..');
  const [devices, runs] = ['device.js', 'run.js'].map((name) => pathToFileURL(join(dist, 'exports', name)).href);
  writeFileAtomic(
    program,
    `import { CpuDevice } from ${JSON.stringify(devices)};
    import { openWorld, resolveRank } from ${JSON.stringify(runs)};
    const world = await openWorld(resolveRank(process.env), new CpuDevice({ threads: 1 }), { timeoutSeconds: ${LIMIT_S} });
    if (world.rank === 1) {
      process.stdout.write(\`busy: \${process.pid} \\n\`);
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ${busyMs});
    }
    try {
      world.agreement.wait();
      console.log(\`rank \${world.rank} met the other\`);
      world.close();
    } catch (error) {
      console.error(error.message);
      world.abort(1);
    }`,
  );
  return startMpirunWith(mpirunWords, [process.execPath, program]);
}

/** Far more than a busy machine keeps a thread waiting. */
const LIMIT_S = 12;

it('a rank that is stopped on another host before the run has files is named by it', async ({ skip }) => {
  if (typeof hosts === 'string') return skip(hosts);
  const run = startBeforeRun(hosts, 600_000);
  await expect.poll(run.output).toMatch(/busy: \d+ /);
  const pid = Number(run.output().match(/busy: (\d+) /)![1]);
  await sleep(2000); // its guard has said who it is
  process.kill(pid, 'SIGSTOP');
  const stopped = performance.now();
  try {
    const end = await Promise.race([run.ended, sleep(1000 * (LIMIT_S + 60)).then(() => null)]);
    expect(end, run.output()).not.toBeNull();
    expect(end!.code).not.toBe(0);
    expect(performance.now() - stopped).toBeGreaterThan(900 * LIMIT_S - 2000);
    expect(end!.stderr).toContain(`rank 1 on ${hosts.names[1]} (pid ${pid}, no section known): kept the other ranks`);
  } finally {
    if (pidExists(pid)) process.kill(pid, 'SIGKILL');
    run.child.kill('SIGKILL');
  }
});

it('a rank that is busy there for longer than the time limit is waited for', async ({ skip }) => {
  if (typeof hosts === 'string') return skip(hosts);
  if (!process.env['TREFOIL_LONG']) return skip('waits half a minute: TREFOIL_LONG=1');
  const { code, stdout, stderr } = await startBeforeRun(hosts, 2500 * LIMIT_S).ended;
  expect(code, stderr).toBe(0);
  for (const rank of [0, 1]) expect(stdout).toContain(`rank ${rank} met the other`);
});
