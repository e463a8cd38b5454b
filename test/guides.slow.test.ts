/**
 * Runs every command of the guides and runbooks. Blocks marked ```bash run as they are, in order, in an empty folder; those
 * marked `slow` run only with TREFOIL_LONG=1. Blocks marked `gpu` or `remote` need another machine: their shell runs with
 * stand-ins, and each `trefoil` command in them is checked against the real CLI: `train` must resolve its config with these
 * flags and variables, other commands must know their flags.
 */
import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { runCli } from '../src/cli/testing/run.js';
import { root } from '../src/testing/cli.js';
import { temporaryFolder } from '../src/testing/run.js';

const main = join(root, 'dist', 'cli', 'main.js');
const documents = ['guide', 'runbooks'].flatMap((folder) =>
  readdirSync(join(root, 'docs', folder))
    .filter((name) => name.endsWith('.md'))
    .map((name) => join(folder, name)),
);
/** Documents about code: they have no commands to run. */
const WITHOUT_COMMANDS = new Set([
  ...['add-an-operation.md', 'change-the-model.md', 'typescript.md'].map((name) => join('guide', name)),
  join('runbooks', 'ends.md'), // test/ends.slow.test.ts reads its table
]);

/** Blocks that take minutes run in the long form only. */
const HERE = new Set(process.env['TREFOIL_LONG'] ? ['bash', 'bash slow'] : ['bash']);

/** The port of the guides; here it may be in use. */
const PORT = '18080';

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, 'close');
  return port;
}

interface Block {
  readonly kind: string;
  readonly text: string;
}

function blocksOf(document: string): Block[] {
  const page = readFileSync(join(root, 'docs', document), 'utf8');
  return [...page.matchAll(/^```(bash[^\n]*|ini)\n([\s\S]*?)^```/gm)].map(([, kind, text]) => ({ kind, text }));
}

let folder: { path: string; remove: () => void };
let [real, dry] = ['', ''];
beforeAll(() => {
  folder = temporaryFolder();
  [real, dry] = [join(folder.path, 'real'), join(folder.path, 'dry')];
  for (const path of [real, dry]) mkdirSync(path);
  script(join(real, 'trefoil'), `exec "${process.execPath}" "${main}" "$@"`);
  script(join(real, 'npx'), '[ "$1" = -c ] && exec sh -c "$2"\n[ "$1" = trefoil ] || exit 9\nexec "$@"');
  script(
    join(dry, 'npx'),
    `[ "$1" = trefoil ] || exit 9\nshift\n{ printf '%s\\0' "$@"; printf '\\0'; env -0; } > "$(mktemp "$RECORDS/XXXXXXXX")"`,
  );
  // ssh and tmux pass their arguments to a shell; the others do nothing.
  script(join(dry, 'ssh'), 'shift\nexec bash -euo pipefail -c "$*"');
  const lastWord = 'for word; do :; done';
  script(join(dry, 'tmux'), `${lastWord}\ncase "$1" in new-*) exec bash -euo pipefail -c "$word";; esac`);
  script(join(dry, 'sudo'), 'exec "$@"');
  for (const name of [
    'apt-get',
    'git',
    'npm',
    'nvidia-smi',
    'scp',
    'rsync',
    'systemctl',
    'journalctl',
    'watch',
    'tail',
  ])
    script(join(dry, name), ':');
});
afterAll(() => folder.remove());

function script(path: string, body: string): void {
  writeFileSync(path, `#!/usr/bin/env bash\n${body}\n`);
  chmodSync(path, 0o755);
}

/** The words and the variables of each command that the stand-in of npx recorded. */
function recorded(records: string): { words: string[]; env: Record<string, string> }[] {
  return readdirSync(records).map((name) => {
    const [words, variables] = readFileSync(join(records, name), 'utf8').split('\0\0');
    const pairs = variables.split('\0').filter((pair) => pair !== '');
    const env = Object.fromEntries(pairs.map((pair) => [pair.split('=')[0], pair.slice(pair.indexOf('=') + 1)]));
    return { words: words.split('\0'), env };
  });
}

/** `train` must resolve; other commands must know every flag they are given. */
async function expectValid(words: readonly string[], env: Record<string, string>): Promise<void> {
  const line = words.join(' ');
  const end = words.includes('--') ? words.indexOf('--') : words.length;
  const training = withModel(words[0] === 'train' ? words : words[0] === 'launch' ? words.slice(end + 1) : []);
  if (training.length > 0) {
    const { code, stderr } = await runCli([...training, '--print-config'], { env });
    expect(code, `${line}: ${stderr}`).toBe(0);
  }
  if (words[0] === 'train') return;
  const command = GROUPS.has(words[0]) ? words.slice(0, 2) : words.slice(0, 1);
  const { code, stdout } = await runCli([...command, '--help'], { env });
  expect(code, `${line}: no such command`).toBe(0);
  for (const flag of words.slice(0, end).filter((word) => word.startsWith('--')))
    expect(stdout, `${line}: ${flag}`).toContain(flag.split('=')[0]);
}

/** A model that is on another machine: a golden one where the config needs one, else the config alone is checked. */
function withModel(words: readonly string[]): readonly string[] {
  const at = words.indexOf('--from');
  if (at < 0 || existsSync(words[at + 1])) return words;
  const isNeeded = words.includes('lora');
  return [
    ...words.slice(0, at),
    ...(isNeeded ? ['--from', join(root, 'test/golden/hf/llama')] : []),
    ...words.slice(at + 2),
  ];
}

/** Commands that have commands of their own. */
const GROUPS = new Set(['bench', 'data', 'eval', 'import', 'export']);

interface Outcome {
  readonly status: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

/** Asynchronous: a document may take a minute, and vitest gives up on a worker that blocks for that long. */
function bash(text: string, bin: string, cwd: string, env: Record<string, string> = {}): Promise<Outcome> {
  const child = spawn('bash', ['-euo', 'pipefail', '-c', text], {
    cwd,
    env: { ...process.env, PATH: `${bin}:${process.env['PATH']}`, HOME: cwd, TREFOIL_CACHE: cacheFolder(), ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let [stdout, stderr] = ['', ''];
  child.stdout.on('data', (chunk) => {
    stdout += chunk;
  });
  child.stderr.on('data', (chunk) => {
    stderr += chunk;
  });
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('close', (status) => resolve({ status, stdout, stderr }));
  });
}

/** HOME is an empty folder, so that a document cannot touch the user's files; the kernel cache is still the user's. */
function cacheFolder(): string {
  const { TREFOIL_CACHE, XDG_CACHE_HOME, HOME } = process.env;
  return TREFOIL_CACHE || join(XDG_CACHE_HOME || join(HOME ?? '/tmp', '.cache'), 'trefoil');
}

describe.each(documents.filter((name) => !WITHOUT_COMMANDS.has(name)))('%s', (document) => {
  const blocks = blocksOf(document);
  const folderName = document.replace(/\W/g, '-');

  it('has commands, each of a known kind', () => {
    expect(blocks.length).toBeGreaterThan(1);
    expect(
      blocks
        .map(({ kind }) => kind)
        .filter((kind) => !['bash', 'bash slow', 'bash gpu', 'bash remote', 'ini'].includes(kind)),
    ).toEqual([]);
  });

  it('signals no program through npx, which does not pass signals on', () => {
    const all = blocks.map(({ text }) => text).join('\n');
    if (/^kill /m.test(all)) expect(all).not.toMatch(/^npx trefoil .*&$/m);
  });

  it('runs its commands', async () => {
    const cwd = join(folder.path, folderName);
    mkdirSync(cwd);
    const git = (...words: string[]) =>
      spawnSync('git', ['-c', 'user.name=t', '-c', 'user.email=t@localhost', ...words], { cwd });
    git('init', '-q');
    git('commit', '-q', '--allow-empty', '-m', 'start');
    const text = blocks
      .filter(({ kind }) => HERE.has(kind))
      .map((block) => block.text)
      .join('\n')
      .replaceAll(PORT, String(await freePort()));
    const result = await bash(text, real, cwd);
    expect(result.status, `${result.stdout.slice(-3000)}\n${result.stderr.slice(-3000)}`).toBe(0);
  });

  const elsewhere = blocks
    .filter(({ kind }) => kind !== 'ini' && !HERE.has(kind))
    .map(({ text }) => ({ text, title: text.split('\n')[0].slice(0, 80) }));
  it.each(elsewhere)('has valid commands for another machine: $title', async ({ text }) => {
    const cwd = join(folder.path, `dry-${folderName}`);
    mkdirSync(cwd, { recursive: true });
    const records = mkdtempSync(join(folder.path, 'records-'));
    const result = await bash(`cd() { :; }; export -f cd; ${text}`, dry, cwd, { RECORDS: records });
    expect(result.status, result.stdout + result.stderr).toBe(0);
    const all = recorded(records);
    expect(all.length).toBeGreaterThanOrEqual([...text.matchAll(/npx trefoil [a-z]/g)].length);
    const here = process.cwd();
    process.chdir(cwd); // configs are named relative to it
    try {
      for (const { words, env } of all) await expectValid(words, env);
    } finally {
      process.chdir(here);
    }
  });

  it('has valid systemd units', (context) => {
    const units = blocks.filter(({ kind }) => kind === 'ini');
    if (units.length === 0) return;
    const probe = spawnSync('systemd-analyze', ['--version']);
    if (probe.status !== 0) {
      console.warn('skipped: systemd-analyze is not installed here');
      context.skip('systemd-analyze is not installed here');
    }
    for (const { text } of units) {
      const name = /system\/(\S+\.service)/.exec(text)![1];
      const file = join(folder.path, name);
      // The program and its folder need not exist here; everything else is judged.
      writeFileSync(file, text.replace(/^ExecStart=\S+/m, 'ExecStart=/bin/true').replace('/srv/trefoil', '/'));
      const result = spawnSync('systemd-analyze', ['verify', file], { encoding: 'utf8' });
      const complaints = result.stderr.split('\n').filter((line) => line.includes(name));
      expect(complaints).toEqual([]);
    }
  });
});
