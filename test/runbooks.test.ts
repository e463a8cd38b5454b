/**
 * Every command of the runbooks. Blocks ```bash are run as they are, in order, in a folder of their own; those marked `slow`
 * only with TREFOIL_LONG=1. Blocks marked `gpu` or `remote` need a machine that is not here: their shell runs with stand-ins,
 * and each `trefoil` in them is held against the real one: `train` resolves its config with these flags and variables, the
 * others must know their flags.
 */
import { spawn, spawnSync } from 'node:child_process';
import { chmodSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { root } from '../src/testing/cli.js';
import { temporaryFolder } from '../src/testing/run.js';

const main = join(root, 'dist', 'cli', 'main.js');
const folderOfBooks = join(root, 'docs', 'runbooks');
const books = readdirSync(folderOfBooks).filter((name) => name.endsWith('.md'));

/** What takes minutes is run for the long form of the tests. */
const HERE = new Set(process.env['TREFOIL_LONG'] ? ['bash', 'bash slow'] : ['bash']);

interface Block {
  readonly kind: string;
  readonly text: string;
}

function blocksOf(book: string): Block[] {
  const page = readFileSync(join(folderOfBooks, book), 'utf8');
  return [...page.matchAll(/^```(bash[^\n]*|ini)\n([\s\S]*?)^```/gm)].map(([, kind, text]) => ({ kind, text }));
}

let folder: { path: string; remove: () => void };
let [real, dry] = ['', ''];
beforeAll(() => {
  folder = temporaryFolder();
  [real, dry] = [join(folder.path, 'real'), join(folder.path, 'dry')];
  for (const path of [real, dry]) mkdirSync(path);
  script(join(real, 'npx'), `[ "$1" = trefoil ] || exit 9\nshift\nexec "${process.execPath}" "${main}" "$@"`);
  writeFileSync(join(dry, 'dry.mjs'), DRY);
  script(
    join(dry, 'npx'),
    `[ "$1" = trefoil ] || exit 9\nshift\nexec "${process.execPath}" "${join(dry, 'dry.mjs')}" "${main}" "$@"`,
  );
  // ssh and tmux hand what they were given to a shell; everything else only exists.
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

/** `train` must resolve; other commands must know every flag they are given. */
const DRY = `import { spawnSync } from 'node:child_process';
const [, , main, ...words] = process.argv;
const run = (args) => spawnSync(process.execPath, [main, ...args], { encoding: 'utf8' });
const fail = (text) => { console.error(text); process.exit(1); };
if (words[0] === 'train') {
  const { status, stderr } = run([...words, '--print-config']);
  if (status !== 0) fail(words.join(' ') + ': ' + stderr);
} else {
  const command = words[0] === 'bench' ? words.slice(0, 2) : words.slice(0, 1);
  const { status, stdout } = run([...command, '--help']);
  if (status !== 0) fail(words.join(' ') + ': no such command');
  for (const flag of words.filter((word) => word.startsWith('--')))
    if (!stdout.includes(flag.split('=')[0])) fail(words.join(' ') + ': no flag ' + flag);
}
console.log('dry: trefoil ' + words.join(' '));
`;

interface Outcome {
  readonly status: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

/** Not waited for in place: a runbook may take a minute, and the test runner wants to hear from its worker meanwhile. */
function bash(text: string, bin: string, cwd: string): Promise<Outcome> {
  const child = spawn('bash', ['-euo', 'pipefail', '-c', text], {
    cwd,
    env: { ...process.env, PATH: `${bin}:${process.env['PATH']}`, HOME: cwd, TREFOIL_CACHE: cacheFolder() },
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

/** HOME is another one, so that a runbook cannot touch the user's; compiled kernels are still those of the user. */
function cacheFolder(): string {
  const { TREFOIL_CACHE, XDG_CACHE_HOME, HOME } = process.env;
  return TREFOIL_CACHE || join(XDG_CACHE_HOME || join(HOME ?? '/tmp', '.cache'), 'trefoil');
}

describe.each(books)('runbook %s', (book) => {
  const blocks = blocksOf(book);

  it('has commands, each of a kind that is known', () => {
    expect(blocks.length).toBeGreaterThan(2);
    expect(
      blocks
        .map(({ kind }) => kind)
        .filter((kind) => !['bash', 'bash slow', 'bash gpu', 'bash remote', 'ini'].includes(kind)),
    ).toEqual([]);
  });

  it('does here what it says', async () => {
    const cwd = join(folder.path, book.replace('.md', ''));
    mkdirSync(cwd);
    const git = (...words: string[]) =>
      spawnSync('git', ['-c', 'user.name=t', '-c', 'user.email=t@localhost', ...words], { cwd });
    git('init', '-q');
    git('commit', '-q', '--allow-empty', '-m', 'start');
    const text = blocks
      .filter(({ kind }) => HERE.has(kind))
      .map((block) => block.text)
      .join('\n');
    const result = await bash(text, real, cwd);
    expect(result.status, `${result.stdout.slice(-3000)}\n${result.stderr.slice(-3000)}`).toBe(0);
  }, 600_000);

  const elsewhere = blocks
    .filter(({ kind }) => kind !== 'ini' && !HERE.has(kind))
    .map(({ text }) => ({ text, title: text.split('\n')[0].slice(0, 80) }));
  it.each(elsewhere)('would be understood elsewhere: $title', async ({ text }) => {
    const cwd = join(folder.path, `dry-${book.replace('.md', '')}`);
    mkdirSync(cwd, { recursive: true });
    const result = await bash(`cd() { :; }; export -f cd; ${text}`, dry, cwd);
    expect(result.status, result.stdout + result.stderr).toBe(0);
    const named = [...text.matchAll(/npx trefoil [a-z]/g)].length;
    const understood = result.stdout.split('\n').filter((line) => line.startsWith('dry: ')).length;
    expect(understood).toBeGreaterThanOrEqual(named);
  });

  it('has units that systemd understands', (context) => {
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
      writeFileSync(file, text.replace('/usr/bin/npx', '/bin/true').replace('/srv/trefoil', '/'));
      const result = spawnSync('systemd-analyze', ['verify', file], { encoding: 'utf8' });
      const complaints = result.stderr.split('\n').filter((line) => line.includes(name));
      expect(complaints).toEqual([]);
    }
  });
});
