// Trefoil beside PyTorch on one GPU, in one run: attention (dense SDPA by cuDNN and flash, FlexAttention) and whole
// training steps (dense, torch.compile). Needs `npm run build` and a Python with PyTorch. `--part nsa`, which also needs
// the package `fla` (nsa_fla.py): sparse attention beside a public implementation, 64 heads in 4 groups of 128.
//   node bench/peers/cuda/compare.mjs [--python python3] [--part attention|train|nsa] [--lengths 2048,8192] [--out FILE]
import { spawnSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const here = dirname(fileURLToPath(import.meta.url));
const cli = join(here, '..', '..', '..', 'dist', 'cli', 'main.js');
const { values } = parseArgs({
  options: {
    python: { type: 'string', default: 'python3' },
    part: { type: 'string' },
    lengths: { type: 'string' },
    out: { type: 'string' },
  },
});

function run(command, words) {
  const child = spawnSync(command, words, {
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'inherit'],
    maxBuffer: 2 ** 28,
  });
  if (child.status !== 0) throw new Error(`${command} ${words.join(' ')} ended with ${child.status ?? child.signal}`);
  return JSON.parse(child.stdout.slice(child.stdout.indexOf('{')));
}

const trefoil = (...words) => run(process.execPath, [cli, ...words, '--device', 'cuda', '--json']);
const torch = (script, ...words) => run(values.python, [join(here, script), ...words]);
const lengths = (fallback) => ['--lengths', values.lengths ?? fallback];

function attention(script = 'attention_torch.py', ...shape) {
  const [, list] = lengths('8192,65536');
  const ours = trefoil('bench', 'attention', '--lengths', list, ...shape);
  const peers = torch(script, '--lengths', list);
  for (const { peer, S, forward_ms, backward_ms } of peers.rows) {
    const row = (pass) => ours.rows.find(({ what, pass: p, S: s }) => what === 'nsa' && p === pass && s === S);
    const [forward, backward] = [row('forward').ms, row('backward').ms];
    console.log(
      `S ${S}: NSA ${forward.toFixed(2)} / ${backward.toFixed(2)} ms, ${peer} ${forward_ms.toFixed(2)} / ` +
        `${backward_ms.toFixed(2)} ms: ${(forward_ms / forward).toFixed(2)}x / ${(backward_ms / backward).toFixed(2)}x`,
    );
  }
  return { ours, peers };
}

function train() {
  const [, list] = lengths('2048,8192,32768,65536');
  const ours = trefoil('bench', 'train', '--attention', 'both', '--kernel', 'adaptive', '--seq-len', list);
  const peers = torch('train_torch.py', '--lengths', list);
  for (const { S, batch, tokens_per_s } of peers.rows) {
    const speed = (attention) => ours.rows.find((row) => row.attention === attention && row.S === S).tokens_per_s;
    const ratio = tokens_per_s === null ? 'out of memory' : `${(speed('nsa') / tokens_per_s).toFixed(2)}x`;
    console.log(
      `S ${S}: NSA ${speed('nsa').toFixed(0)} tok/s, our dense ${speed('dense').toFixed(0)}, torch.compile dense ` +
        `(${batch} sequences) ${tokens_per_s?.toFixed(0) ?? 'none'}: ${ratio}`,
    );
  }
  return { ours, peers };
}

const nsa = () => attention('nsa_fla.py', '--heads', '64', '--groups', '4', '--dim', '128');
const PARTS = { attention, train, nsa };
const parts = values.part === undefined ? ['attention', 'train'] : [values.part];
if (!parts.every((part) => part in PARTS)) throw new Error(`--part: expected one of ${Object.keys(PARTS).join(', ')}`);
const result = Object.fromEntries(parts.map((part) => [part, PARTS[part]()]));
if (values.out) writeFileSync(values.out, `${JSON.stringify(result, null, 1)}\n`);
