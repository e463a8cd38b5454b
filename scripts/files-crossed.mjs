// Lists the source files of which a function ran in a command, by room and by number of calls. By default of three
// commands: a training of six steps, its continuation, and the generation of 40 tokens.
//
//   npm run build && node scripts/files-crossed.mjs [COMMAND WORD...]
//
// Files that were only loaded are not listed. Worker threads are included.
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const dist = new URL('../dist/', import.meta.url).href;
const folder = mkdtempSync(join(tmpdir(), 'trefoil-files-crossed-'));
const run = join(folder, 'run');
const train = ['train', '--config', 'quickstart', '--device', 'cpu', '--out-dir', run, '--set', 'train.save_every=6'];
const generate = ['generate', '--model', run, '--device', 'cpu', '--prompt', 'The', '--max-new-tokens', '40'];
const given = process.argv.slice(2);
const commands =
  given.length > 0 ? [given] : [[...train, '--steps', '6'], [...train, '--steps', '7', '--resume', 'auto'], generate];

try {
  commands.forEach((words, i) => {
    report(words, callsByFile(words, join(folder, `coverage-${i}`)));
  });
} finally {
  rmSync(folder, { recursive: true });
}

/** Runs the command; returns how many times functions of each file of dist/ were called. */
function callsByFile(words, coverage) {
  const env = { ...process.env, NODE_V8_COVERAGE: coverage };
  const main = fileURLToPath(new URL('cli/main.js', dist));
  const { status } = spawnSync(process.execPath, [main, ...words], { env, stdio: ['ignore', 'ignore', 'inherit'] });
  if (status !== 0) throw new Error(`${words.join(' ')} exited with ${status}`);
  const calls = new Map();
  for (const file of readdirSync(coverage))
    for (const { url, functions } of JSON.parse(readFileSync(join(coverage, file), 'utf8')).result) {
      if (!url.startsWith(dist)) continue;
      const name = url.slice(dist.length).replace(/\.js$/, '.ts');
      // The body of the module is a function without a name.
      const named = functions.filter(({ functionName }) => functionName !== '');
      const count = named.reduce((sum, { ranges: [{ count }] }) => sum + count, 0);
      if (count > 0) calls.set(name, (calls.get(name) ?? 0) + count);
    }
  return calls;
}

function report(words, calls) {
  const rooms = new Map();
  for (const [file, count] of calls) {
    const room = file.includes('/') ? file.split('/')[0] : 'src';
    rooms.set(room, [...(rooms.get(room) ?? []), [file, count]]);
  }
  console.log(`\ntrefoil ${words.join(' ')}: ${calls.size} files`);
  for (const [name, files] of [...rooms].sort(([, a], [, b]) => b.length - a.length)) {
    console.log(`  ${name}: ${files.length}`);
    for (const [file, count] of files.sort(([, a], [, b]) => b - a)) console.log(`    src/${file} ${count}`);
  }
}
