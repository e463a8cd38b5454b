// Experiments that wait for a GPU, most important first. pending.mjs runs it.
//
// seconds   time limit of the entry, on one H200 with 16 cores
// commands  started at the same time. The first word is `trefoil` (this build), `vitest`, or a program
// needs     `corpus`: source code of the machine's Python packages as GPT-2 tokens; `before`: the build before; `fla`:
//           the Python package (pip install fla-core, or its folder in PYTHONPATH)
// check     what pending.mjs judges by (checks.mjs); `expected` says it in words
// passed, failed   what follows
//
// In words: {out} is the entry's folder, {before} that of the build before, {corpus} that of the corpus, {train} and {val}
// its token shards.
import * as checks from './checks.mjs';

const settings = (values) => Object.entries(values).flatMap(([key, value]) => ['--set', `${key}=${value}`]);
const tests = (files, pattern) => ['vitest', 'run', ...files, ...(pattern ? ['--testNamePattern', pattern] : [])];
const not = (...patterns) => `^(?!.*(?:${patterns.join('|')}))`;

const FUSED = 'src/ops/attention/fused/op.test.ts';
/** Most of its time is compilation and float64 on one core: parts of the file run at the same time. */
const FUSED_PARTS = [
  "equal the reference: '(the|5|16 heads a|heads of 32)",
  "equal the reference: '(16 heads of|13)",
  "equal the reference: '(keys|blocks|heads of 96|64)",
  "awkward: '(one|shorter|exactly|no)",
  "awkward: '(S|G|6)",
  "awkward: '(n_sel|window|blocks|ragged|empty|only)",
  'ragged batch: (v1|v2|union|outer|gather|apart)',
  'ragged batch: (deterministic|mma)',
  "by one kernel: '(the|several)",
  "by one kernel: '(16|one)",
  'sampled rows of 65,536',
  'give the tokens|cannot see the future|the same bits',
  "computes: '(the|5|16|13)",
];

export const ENTRIES = [
  {
    id: 'fused-op',
    feature: 'all tests of the fused attention kernels, after a change of theirs (last: all 73 passed, build 52aa9039)',
    seconds: 200,
    commands: [...FUSED_PARTS, not(...FUSED_PARTS)].map((part) => tests([FUSED], part)),
    expected: 'no test fails, and all 73 are run',
    check: checks.testsPass(73),
    passed: 'docs/reference/testing.md: the row of this file',
    failed: 'the tests that failed are named in the result; repair them first',
  },
  {
    id: 'train',
    feature:
      'training steps as graphs, with batches whose sequences own the layout of their blocks; pinned memory as a method of the device, with one event for both directions',
    seconds: 200,
    commands: [
      tests([
        ...['src/train/cuda.test.ts', 'src/train/fp8.test.ts', 'src/infer/device-decoder.test.ts'],
        'src/infer/engine/prefix/files.slow.test.ts',
      ]),
    ],
    expected: 'no test fails, and at least 32 are run',
    check: checks.testsPass(32),
    passed: 'docs/reference/testing.md: rows of these files',
    failed: 'the tests that failed are named in the result; repair them first (src/device/cuda/pinned-memory.ts)',
  },
  {
    id: 'scorer-loss',
    feature: 'train.scorer_loss on a GPU: its kernels have only run on the thread emulator, and needles in one run',
    seconds: 190,
    commands: [
      tests(['src/ops/attention/scorer-loss/op.slow.test.ts']),
      [
        ...['trefoil', 'train', '--config', 'needle_cpu', '--device', 'cuda', '--json'],
        ...settings({ 'runtime.precision': 'fp32', 'train.out_dir': '{out}/needle', 'train.steps': 200 }),
      ],
    ],
    expected: 'no test fails, at least 60 are run, and 200 steps of the recipe end',
    check: checks.testsPass(60),
    passed: 'docs/reference/features.md and docs/explain/context.md: it has run on a GPU',
    failed: 'the cases that failed are named in the result; repair them first',
  },
  {
    id: 'experiment-ops',
    feature: 'mul, scale, exp, log, softmax, sum, mean and slice, which have only run on the thread emulator',
    seconds: 90,
    commands: [tests(['pointwise', 'softmax', 'sum', 'slice'].map((name) => `src/ops/${name}/op.test.ts`))],
    expected: 'no test fails, and at least 140 are run',
    check: checks.testsPass(140),
    passed: 'nothing: the tables of features.md say so already',
    failed: 'the tests that failed are named in the result; repair them first',
  },
  {
    id: 'same-speed',
    feature:
      'training, attention and decoding beside the build before, in turns (last: 52aa9039 beside 1212f1d3, passed)',
    seconds: 300,
    needs: ['before'],
    commands: [
      [
        ...['node', 'bench/compare-builds.mjs', '{before}/dist', 'dist', '--device', 'cuda', '--rounds', '2'],
        ...['--lengths', '8192', '--limit', '2', '--out', '{out}/compare.json'],
      ],
    ],
    expected: 'nothing is more than 2 % slower',
    check: checks.nothingSlower(2),
    passed: 'the CHANGELOG may say so',
    failed: 'profile what is slower: bench train --profile, dev/cuda/decode-step.mjs --dist',
  },
  {
    id: 'public-nsa',
    feature: '64 heads in 4 groups of 128 beside the Triton kernels of flash-linear-attention',
    seconds: 190,
    needs: ['fla'],
    commands: [
      [
        ...['node', 'bench/peers/cuda/compare.mjs', '--part', 'nsa'],
        ...['--lengths', '8192,65536', '--out', '{out}/nsa.json'],
      ],
    ],
    expected:
      'faster at both lengths, forward and backward (theirs has no window and a quarter of the compressed keys)',
    check: checks.fasterThanPublic,
    passed: 'a row of the table of attention in docs/benchmarks.md',
    failed: 'the page says where the public kernels are faster',
  },
  {
    id: 'code-model-context',
    feature:
      'the recipe for context (Muon, scorer loss) at 32,768 tokens, dense attention beside it, a tenth of the steps',
    seconds: 250,
    needs: ['corpus'],
    commands: [
      [
        ...[
          'node',
          'examples/code-model/run.mjs',
          '--out',
          '{corpus}',
          '--form',
          'context',
          '--dense',
          '--steps',
          '130',
        ],
        ...settings({ 'train.warmup_steps': 25, 'train.eval_every': 130, 'train.save_every': 0 }),
      ],
    ],
    expected:
      'the loss of the sparse model is not above the dense one, four fifths of the possible coverage, gates above 0.5 nats',
    check: checks.usesItsContext,
    passed: 'run all 1,300 steps (examples/code-model/README.md) and write docs/explain/code-model.md anew',
    failed: 'docs/explain/context.md says by how much; too slow: profile the branch kernels beside the fused ones',
  },
];

/** Asked for before and not in the program, with the reason. */
export const DECIDED = [
  'v1 of the selected branch: on an H200 a training step with v2 is 1.30, 1.39 and 1.54 times as fast at 128, 512 and 2,048 ' +
    'tokens. queryMajor and its builds in plan.ts, code.ts and selected.cu may go.',
  'programmatic dependent launch of the forward pass: there is no code for it in the tree. Measured on an H200 it gains ' +
    '2 % at 2,048 tokens, 0.7 % at 8,192 and nothing at 65,536 for two lines in each of 27 kernels: not built.',
  'six forms of top-n ranking (decode/step/ranking.cuh, select/cuda.cu, fused/top-blocks.cuh, selection.h): no build has a ' +
    'switch for one of them. To decide, replace a form by another in a copy and compare the two with ' +
    'dev/cuda/decode-step.mjs --dist.',
];
