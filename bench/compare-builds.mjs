// Two builds of this package against each other on one machine, in turns: is the new one slower anywhere?
//
//   node bench/compare-builds.mjs OLD_DIST NEW_DIST [--rounds 5] [--device auto|cpu|cuda] [--out FILE.json] [--limit 1]
//
// Measures training and attention with `trefoil bench train` and `bench attention` of each build, alternately, and prints
// the medians and their ratio. Exit code 1 if the new build is slower by more than --limit percent. A build is the folder
// `dist` that `npm run build` writes; its package.json and node_modules are found beside it.
import { spawnSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    rounds: { type: 'string', default: '5' },
    device: { type: 'string', default: 'auto' },
    limit: { type: 'string', default: '1' },
    out: { type: 'string' },
  },
});
if (positionals.length !== 2) throw new Error('give the dist folders of the old and the new build');
const [before, after] = positionals;
const probe = JSON.parse(
  run(after, ['bench', 'attention', '--device', values.device, '--quick', '--lengths', '1024', '--json']),
);
const isGpu = probe.device === 'cuda';
const lengths = isGpu ? { train: '8192', attention: '65536' } : { train: '1024', attention: '4096' };
/** Name of the case, command, and the figure of its JSON that is compared: more is better. */
const cases = [
  [
    `training, ${lengths.train} tokens, tokens/s`,
    ['bench', 'train', '--seq-len', lengths.train],
    (rows) => rows[0].tokens_per_s,
  ],
  [
    `attention, ${lengths.attention} tokens, 1/ms`,
    ['bench', 'attention', '--lengths', lengths.attention],
    attentionSpeed,
  ],
];

const measured = new Map(cases.map(([name]) => [name, { before: [], after: [] }]));
for (let round = 0; round < Number(values.rounds); round++)
  for (const [name, words, figure] of cases) {
    // The order changes every round, so that a clock that slows down meets both.
    const builds = round % 2 === 0 ? ['before', 'after'] : ['after', 'before'];
    for (const build of builds) {
      const { rows } = JSON.parse(
        run(build === 'before' ? before : after, [...words, '--device', values.device, '--json']),
      );
      measured.get(name)[build].push(figure(rows));
    }
    process.stderr.write(`round ${round + 1}: ${name}\n`);
  }

const rows = [...measured].map(([name, { before: old, after: fresh }]) => {
  const ratio = median(fresh) / median(old);
  return { name, before: median(old), after: median(fresh), ratio, all: { before: old, after: fresh } };
});
for (const { name, before: old, after: fresh, ratio } of rows)
  console.log(`${name}: before ${old.toPrecision(5)}, after ${fresh.toPrecision(5)}, ratio ${ratio.toFixed(4)}`);
if (values.out)
  writeFileSync(values.out, `${JSON.stringify({ machine: probe.machine, device: probe.device, rows }, null, 2)}\n`);
process.exitCode = rows.some(({ ratio }) => ratio < 1 - Number(values.limit) / 100) ? 1 : 0;

/** Whole sparse attention, forward and backward together. */
function attentionSpeed(rows) {
  return 1 / rows.filter(({ what }) => what === 'nsa').reduce((sum, { ms }) => sum + ms, 0);
}

function median(numbers) {
  return [...numbers].sort((a, b) => a - b)[numbers.length >> 1];
}

function run(dist, words) {
  const { status, stdout, stderr } = spawnSync(process.execPath, [join(dist, 'cli', 'main.js'), ...words], {
    encoding: 'utf8',
    maxBuffer: 1 << 26,
  });
  if (status !== 0) throw new Error(`${dist} ${words.join(' ')}: ${stderr}`);
  return stdout;
}
