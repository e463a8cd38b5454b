// Attention of a decode step beside PyTorch's dense SDPA on one GPU, in one run: one layer of the 125m shape, bf16, one new
// token for each sequence. Needs `npm run build` and a Python with PyTorch.
//   node bench/peers/cuda/decode.mjs [--python python3] [--lengths 65536] [--batch-size 32] [--runs 50] [--out FILE]
import { spawnSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const here = dirname(fileURLToPath(import.meta.url));
const dist = join(here, '..', '..', '..', 'dist');
const { values } = parseArgs({
  options: {
    python: { type: 'string', default: 'python3' },
    lengths: { type: 'string', default: '65536' },
    'batch-size': { type: 'string', default: '32' },
    runs: { type: 'string', default: '50' },
    out: { type: 'string' },
  },
});
const { CudaDevice } = await import(join(dist, 'device/cuda/cuda.js'));
const { benchDecodeAttention } = await import(join(dist, 'bench/decode-cuda.js'));
const { caseShape, trainCases } = await import(join(dist, 'bench/train-cases.js'));

const lengths = values.lengths.split(',').map(Number);
const [batch, runs] = [Number(values['batch-size']), Number(values.runs)];
const [named] = trainCases({ config: '125m_80g', attention: 'nsa' }, {});
const shape = caseShape(named);
const device = new CudaDevice();
const nsa = benchDecodeAttention(device, lengths, { shape, batch, runs });
const dense = benchDecodeAttention(device, lengths, { shape: { ...shape, attention: 'dense' }, batch, runs });
device.pool.trim();

const child = spawnSync(
  values.python,
  [join(here, 'decode_torch.py'), '--lengths', values.lengths, '--batch-size', values['batch-size']],
  { encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'], maxBuffer: 2 ** 28 },
);
if (child.status !== 0) throw new Error(`decode_torch.py ended with ${child.status ?? child.signal}`);
const peers = JSON.parse(child.stdout.trim().split('\n').at(-1));
for (const { peer, S, reason } of peers.refused) console.log(`S ${S}: ${peer}: ${reason}`);
lengths.forEach((S, i) => {
  const all = peers.rows.filter((row) => row.S === S);
  for (const { peer, ms } of all)
    console.log(
      `S ${S}, batch ${batch}: NSA ${nsa[i].ms.toFixed(4)} ms, SDPA ${peer} ${ms.toFixed(4)} ms: ${(ms / nsa[i].ms).toFixed(1)}x`,
    );
  const best = Math.min(...all.map(({ ms }) => ms));
  console.log(
    `S ${S}, batch ${batch}: NSA ${nsa[i].ms.toFixed(4)} ms, our dense ${dense[i].ms.toFixed(4)} ms, best SDPA ` +
      `${best.toFixed(4)} ms: ${(best / nsa[i].ms).toFixed(1)} times faster than the best SDPA`,
  );
});
if (values.out) writeFileSync(values.out, `${JSON.stringify({ nsa, dense, peers }, null, 1)}\n`);
