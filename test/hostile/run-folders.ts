/** Run folders of a stranger who means harm: a sound run, of which one part is replaced. */
import { execFileSync } from 'node:child_process';
import { appendFileSync, mkdirSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { writeExampleRun } from '../../src/dashboard/testing/example-run.js';
import { type HostileCase, SECRET } from './model-folders.js';

const SECRET_FILE = join('/tmp', `trefoil-secret-run-${process.pid}`);
const FILES = [
  'heartbeat_rank0.jsonl',
  'training.csv',
  'val.csv',
  'config.yaml',
  'env.json',
  'metrics.json',
  '.lock',
  '.HALT',
  '.anomaly_type',
  '.section_rank0',
];

const beat = (more: string) => `{"ts":1e9,"iso":"x","pid":1,"rank":0,"step":30,"msg":"progress"${more}}\n`;
const nested = (depth: number) => `${'{"a":'.repeat(depth)}1${'}'.repeat(depth)}`;
const append = (name: string, text: string) => (dir: string) => appendFileSync(join(dir, name), text);
const put = (name: string, text: string) => (dir: string) => writeFileSync(join(dir, name), text);

const HEARTBEATS: Readonly<Record<string, string>> = {
  ...Object.fromEntries(
    ['1000000000', '9007199254740993', '-1', '0.5', '"8"', '65536', '[]', '1e400'].map((world) => [
      `world ${world}`,
      beat(`,"world":${world}`),
    ]),
  ),
  'a pid of init': beat(',"pid":1,"status":"done"'),
  'a pid of 2^60': '{"ts":1e9,"iso":"x","pid":1152921504606846976,"rank":0,"step":9,"msg":"progress"}\n',
  'a step of 1e300': '{"ts":1e9,"iso":"x","pid":1,"rank":0,"step":1e300,"msg":"progress"}\n',
  'a time of 1e300': '{"ts":1e300,"iso":"x","pid":1,"rank":0,"step":9,"msg":"progress"}\n',
  'a reason with ESC': beat(',"detail":"\\u001b[2J\\u0007\\u009b31m","status":"failed"').replace('progress', 'halt'),
  'a reason of 5 MB': beat(`,"detail":"${'x'.repeat(5e6)}"`).replace('progress', 'halt'),
  'a reason of 900 KB': beat(`,"detail":"${'x'.repeat(9e5)}"`).replace('progress', 'halt'),
  'an unknown status': beat(',"status":"\\u001b[2J"').replace('progress', 'stop'),
  'a status of Object': beat(',"status":"constructor"').replace('progress', 'stop'),
  'a message of 1 MB': beat('').replace('progress', 'x'.repeat(1e6)),
  'a thousand counters': beat(Array.from({ length: 1e4 }, (_, i) => `,"fb_c${i}":${i}`).join('')),
  'counters with ESC': beat(',"fb_\\u001b[2J":5'),
  'shares of 1e5 branches': beat(`,"gate_branch_shares":[${Array(1e5).fill(0.1)}]`),
  'deep JSON': `${nested(2e5)}\n`,
  prototypes: beat(',"__proto__":{"loss":1},"constructor":1'),
  '200,000 short lines': Array.from(
    { length: 2e5 },
    (_, i) => `{"ts":${1e9 + i},"pid":1,"rank":0,"step":${i},"msg":"progress","gpu_mem_reserved":1}\n`,
  ).join(''),
  '20 MB without a newline': 'x'.repeat(2e7),
  '20 MB of newlines': '\n'.repeat(2e7),
  '20 MB of braces': '{\n'.repeat(1e7),
  '20 MB of long lines': `{"a":[${Array(8_000).fill('1')}]}\n`.repeat(1250),
  NULs: '\0'.repeat(1e6),
  'no UTF-8': '\ud800'.repeat(1000),
};
const RANKS = Object.fromEntries(
  [100, 3000].map((count) => [
    `${count} files of ranks`,
    (dir: string) => {
      for (let rank = 1; rank < count; rank++)
        writeFileSync(
          join(dir, `heartbeat_rank${rank}.jsonl`),
          beat(`,"world":${count}`).replace('"rank":0', `"rank":${rank}`),
        );
    },
  ]),
);
const LOCKS: Readonly<Record<string, string>> = {
  ...Object.fromEntries(
    ['0', '-1', '1', '1e300', '"x"'].map((pid) => [
      `pid ${pid}`,
      `{"pid":${pid},"host":"h","nonce":"n","run_start":"x","process_start":null,"boot_id":null}`,
    ]),
  ),
  'a host with ESC': '{"pid":1,"host":"\\u001b[2J","nonce":"n","run_start":"x"}',
  'a host of 5 MB': `{"pid":1,"host":"${'x'.repeat(5e6)}","nonce":"n","run_start":"x"}`,
  'deep JSON': nested(1e5),
  'no JSON': '\0',
};
const TEXTS: Readonly<Record<string, readonly [name: string, text: string]>> = {
  'a .HALT of 20 MB': ['.HALT', 'x'.repeat(2e7)],
  'a .HALT with ESC': ['.HALT', 'halt: \u001b[2J\u0007'],
  'an .anomaly_type with ESC': ['.anomaly_type', '\u001b]0;x\u0007'],
  'an .anomaly_type with lines': ['.anomaly_type', 'a\nb\n'.repeat(500)],
  'a YAML bomb': [
    'config.yaml',
    `a: &a [x]\n${Array.from({ length: 9 }, (_, i) => `${'bcdefghij'[i]}: &${'bcdefghij'[i]} [${Array(10).fill(`*${'abcdefghi'[i]}`)}]`).join('\n')}\n`,
  ],
  'a deep YAML': ['config.yaml', `a: ${'['.repeat(5000)}${']'.repeat(5000)}`],
  'a YAML of empty items': ['config.yaml', `[${','.repeat(65_000)}]`],
  'a YAML of quoted texts in lists': ['config.yaml', '["a\n b",'.repeat(7000)],
  'a long YAML': ['config.yaml', Array.from({ length: 2e4 }, (_, i) => `k${i}: v`).join('\n')],
  'a YAML with ESC': ['config.yaml', 'model: "\\e[2J"'],
  'a deep metrics.json': ['metrics.json', nested(1e5)],
  'a deep env.json': ['env.json', nested(1e5)],
  'an env.json of lists': ['env.json', '{"machine":[],"versions":[],"git":[],"device":[],"ranks":[]}'],
  'an env.json with ESC': ['env.json', '{"machine":{"host":"\\u001b[2J","cpu":"\\u0007"}}'],
  'a section of no name': ['.section_rank0', '{"ts":1,"pid":1,"rank":0,"step":1,"section":"\\u001b[2J"}'],
  'a section of Object': ['.section_rank0', '{"ts":1,"pid":1,"rank":0,"step":1,"section":"__proto__"}'],
  'a CSV without columns': ['training.csv', 'x\n'.repeat(1e5)],
  'a CSV of one line': ['training.csv', `step,loss,lr,toks_per_s\n${'1,'.repeat(1e6)}\n`],
  'a CSV of numbers out of range': ['training.csv', 'step,loss,lr,toks_per_s\n1e308,1e309,-1e309,NaN\n-1,0,0,0\n'],
  'a CSV of 2 MB': ['val.csv', `step,val_loss,ppl\n${'1,2,3\n'.repeat(3e5)}`],
  'a needle.json of lists': ['needle.json', '[[[[]]]]'],
  'samples with ESC': ['samples.jsonl', '{"step":1,"text":"\\u001b[2J"}\n'],
  'deep samples': ['samples.jsonl', `{"step":1,"text":${nested(5e4)}}\n`],
  'attention of another form': ['attention.jsonl', '{"step":1,"layers":"x"}\n{"step":2,"gate_entropy":[[["x"]]]}\n'],
};
const linked = (name: string, target: string) => (dir: string) => {
  writeFileSync(SECRET_FILE, SECRET);
  rmSync(join(dir, name), { force: true });
  symlinkSync(target, join(dir, name));
};
const replace = (name: string, make: (path: string) => void) => (dir: string) => {
  rmSync(join(dir, name), { force: true });
  make(join(dir, name));
};

const KINDS: Readonly<Record<string, Readonly<Record<string, (dir: string) => void>>>> = {
  heartbeats: {
    ...Object.fromEntries(
      Object.entries(HEARTBEATS).map(([name, text]) => [name, append('heartbeat_rank0.jsonl', text)]),
    ),
    ...RANKS,
  },
  locks: Object.fromEntries(Object.entries(LOCKS).map(([name, text]) => [name, put('.lock', text)])),
  'other files': Object.fromEntries(Object.entries(TEXTS).map(([title, [name, text]]) => [title, put(name, text)])),
  links: Object.fromEntries(
    FILES.flatMap((name) => [
      [`${name} to a file of the user`, linked(name, SECRET_FILE)],
      [`${name} to /dev/zero`, linked(name, '/dev/zero')],
    ]),
  ),
  'special files': Object.fromEntries(
    FILES.flatMap((name) => [
      [`${name} is a pipe`, replace(name, (path) => execFileSync('mkfifo', [path]))],
      [`${name} is a folder`, replace(name, (path) => mkdirSync(path))],
    ]),
  ),
};

/** All cases, by kind. */
export const RUN_FOLDERS: readonly HostileCase[] = Object.entries(KINDS).flatMap(([kind, cases]) =>
  Object.entries(cases).map(([name, spoil]) => ({
    kind,
    name,
    write: (dir: string) => {
      writeExampleRun(dir, { steps: 30 });
      spoil(dir);
    },
  })),
);
