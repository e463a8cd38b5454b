/** `data prepare --part` by eight processes, one of them killed and repeated, and `data join`: the files of one process. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { trefoil, trefoilMain } from '../src/testing/cli.js';
import { temporaryFolder } from '../src/testing/run.js';

const folder = temporaryFolder();
afterAll(() => folder.remove());
const at = (name: string) => join(folder.path, name);
const PARTS = 8;

const documents = (file: number) =>
  Array.from(
    { length: 400 },
    (_, i) => `Document ${i} of file ${file}: ${`the ${i}th word of it, `.repeat((i * 7) % 40)}`,
  );

const filesOf = (path: string) =>
  Object.fromEntries(readdirSync(path).map((name) => [name, readFileSync(join(path, name)).toString('base64')]));

it('eight processes, one killed and repeated, make the files of one', async () => {
  const corpus = at('corpus.jsonl');
  const lines = [0, 1, 2, 3].flatMap((file) => documents(file).map((text) => JSON.stringify({ text })));
  writeFileSync(corpus, `${lines.join('\n')}\n`);
  const flags = [
    '--local-path',
    corpus,
    '--tokenizer',
    'gpt2',
    '--workers',
    '1',
    '--shard-bytes',
    '40KB',
    '--part-bytes',
    '5KB',
  ];
  const whole = await trefoil(['data', 'prepare', ...flags, '--out', at('whole'), '--json']);
  expect(whole.code, whole.stderr).toBe(0);
  const { checksum, shards } = JSON.parse(whole.stdout);
  expect(shards).toBeGreaterThan(PARTS);

  const out = at('shards');
  const words = (part: number) => ['data', 'prepare', ...flags, '--part', `${part}/${PARTS}`, '--out', out, '--json'];
  // The fifth is killed when it has finished its first unit.
  const killed = spawn(process.execPath, [trefoilMain(), ...words(5)], { stdio: 'ignore' });
  const working = join(out, `part-5-of-${PARTS}.preparing`);
  const timer = setInterval(() => {
    if (existsSync(working) && readdirSync(working).some((name) => /^part-\d+$/.test(name))) killed.kill('SIGKILL');
  }, 1);
  const others = [1, 2, 3, 4, 6, 7, 8].map(async (part) => {
    const { code, stderr } = await trefoil(words(part));
    expect(code, stderr).toBe(0);
  });
  const [, signal] = await once(killed, 'exit');
  clearInterval(timer);
  expect(signal).toBe('SIGKILL');
  await Promise.all(others);

  const early = await trefoil(['data', 'join', '--out', out]);
  expect([early.code, early.stderr.trim()]).toEqual([
    2,
    `trefoil: ${out}: part 5 of 8 is missing; run trefoil data prepare --part 5/8 again`,
  ]);
  const again = await trefoil(words(5));
  expect(again.code, again.stderr).toBe(0);
  expect(again.stderr).toMatch(/[1-9]\d* of \d+ units are done already/);
  const joined = await trefoil(['data', 'join', '--out', out, '--json']);
  expect(JSON.parse(joined.stdout)).toMatchObject({ checksum, shards });
  expect(filesOf(out)).toEqual(filesOf(at('whole')));

  const inspected = await trefoil(['data', 'inspect', '--local-path', out, '--tokenizer', 'gpt2', '--json']);
  expect(JSON.parse(inspected.stdout)).toMatchObject({ documents: lines.length });
}, 180_000);

it.each(['0/8', '9/8', '3', 'x/y'])('--part %s is refused in one line', async (part) => {
  const { code, stderr } = await trefoil(['data', 'prepare', '--out', at('refused'), '--part', part]);
  expect(code).toBe(2);
  expect(stderr.trim()).toMatch(/^trefoil: .*--part.*It must be i\/n with i from 1 to n, such as 3\/8\.$/);
});
