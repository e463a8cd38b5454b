// Experiments that wait for a GPU, most important first. pending.mjs runs it.
//
// seconds   time limit of the entry, on one H200 with 16 cores
// commands  started at the same time. The first word is `trefoil` (this build), `vitest`, or a program
// needs     `before`: the build before; `fla`: the Python package (pip install fla-core, or its folder in PYTHONPATH)
// check     what pending.mjs judges by (checks.mjs); `expected` says it in words
// passed, failed   what follows
//
// In words: {out} is the entry's folder, {before} that of the build before.
import * as checks from './checks.mjs';

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
  'scorer loss: (adaptive|outer|gather)',
  'scorer loss: (deterministic|mma)',
  "by one kernel: '(the|several)",
  "by one kernel: '(16|one)",
  'sampled rows of 65,536',
  'give the tokens|cannot see the future|the same bits',
  "computes: '(the|5|16|13)",
];

export const ENTRIES = [
  {
    id: 'fused-op',
    feature:
      'all tests of the fused attention kernels (73 passed, build 52aa9039), and the new ones: queries of the window branch ' +
      'apart and the scorer loss (nsa.rope: window, train.scorer_loss), which ran on the emulator alone',
    seconds: 230,
    commands: [...FUSED_PARTS, not(...FUSED_PARTS)].map((part) => tests([FUSED], part)),
    expected: 'no test fails, and all 78 are run',
    check: checks.testsPass(78),
    passed: 'docs/reference/testing.md: the row of this file',
    failed: 'the tests that failed are named in the result; repair them first',
  },
  {
    id: 'recipe-speed',
    feature: 'the recipe for context by fused kernels: the 155M model at 32,768 tokens beside the same without it',
    seconds: 90,
    commands: [
      [
        'sh',
        '-c',
        'bench() { node dist/cli/main.js bench train "$@" --seq-len 32768 --batch-size 2 --json; }; ' +
          'bench --config examples/code-model/context.yaml > "$0/recipe.json" && ' +
          'bench --config examples/code-model/gpu.yaml > "$0/plain.json"',
        '{out}',
      ],
    ],
    expected:
      'at least 0.6 of the tokens/s without the recipe (which also has AdamW in place of Muon); 12,132 with branch kernels',
    check: checks.recipeSpeed(0.6),
    passed:
      'the figure into docs/explain/context.md and examples/code-model/README.md; then run.mjs --form context --dense, about ' +
      'a quarter of an hour',
    failed:
      'the same figure; bench train --profile: scorer_masses, scorer_gradients and window_query_gradient come first',
  },
  {
    id: 'decode-step',
    feature:
      'a decode step of a model with positions in the window alone (nsa.rope: window), among all tests of the step',
    seconds: 90,
    commands: [tests(['src/ops/attention/decode/step/step.slow.test.ts'], not('emulated'))],
    expected: 'no test fails',
    check: checks.testsPass(60),
    passed: 'docs/reference/testing.md: the row of this file',
    failed: 'decodeStepRefusal refuses such a model again, until the kernel is repaired',
  },
  {
    id: 'context-language',
    feature: 'the recipe for models that use their context on code: the third seed (two are measured)',
    seconds: 380,
    commands: [
      [
        ...['node', 'bench/context.mjs', '--device', 'cuda', '--only', 'code-scorer-window,code-dense'],
        ...['--seeds', '3', '--threads', '4', '--work', '{out}/work', '--out', '{out}/context.json'],
      ],
    ],
    expected: 'a loss below that of dense attention beside it, and at least 0.9 of its gain from far context',
    check: checks.usesItsContext,
    passed:
      'where dense attention is at 2.136 as before (the same packages): add the row to bench/results/context.json, then ' +
      'node bench/context-page.mjs; else a line in dev/log',
    failed: 'the same, and docs/explain/context.md says that one seed of three falls short',
  },
  {
    id: 'needle-one-run',
    feature: 'the needle model for 65,536 tokens in one run, by the scorer loss instead of a first run of one branch',
    seconds: 200,
    commands: [
      [
        'sh',
        '-c',
        'trefoil() { node dist/cli/main.js "$@"; }; ' +
          'trefoil train --config needle_h200 --set train.scorer_loss=0.1 --set train.optimizer=muon --out-dir "$0/run" && ' +
          'trefoil eval needle --model "$0/run" --lengths 256,1024,4096,16384,65536 --trials 40 --records 2 --facts 8 --json ' +
          '> "$0/needle.json"',
        '{out}',
      ],
    ],
    expected:
      'at least 99 % found at each length up to 16,384 and 97 % at 65,536, worst depth 90 %, as on a CPU to 4,096',
    check: checks.findsNeedles(16_384),
    passed: 'configs/needle_h200.yaml and docs/guide/long-context.md: one run, its figures; three seeds',
    failed: 'the guide keeps two runs; a row in docs/explain/context.md says what one run finds',
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
];

/** Asked for before and not in the program, with the reason. */
export const DECIDED = [
  'the code model with the recipe for context at 32,768 tokens, dense attention beside it: longer than this program may ' +
    'take. Its command is in examples/code-model/README.md; recipe-speed says how long it takes.',
  'v1 of the selected branch: on an H200 a training step with v2 is 1.30, 1.39 and 1.54 times as fast at 128, 512 and 2,048 ' +
    'tokens. queryMajor and its builds in plan.ts, code.ts and selected.cu may go.',
  'programmatic dependent launch of the forward pass: there is no code for it in the tree. Measured on an H200 it gains ' +
    '2 % at 2,048 tokens, 0.7 % at 8,192 and nothing at 65,536 for two lines in each of 27 kernels: not built.',
  'six forms of top-n ranking (decode/step/ranking.cuh, select/cuda.cu, fused/top-blocks.cuh, selection.h): no build has a ' +
    'switch for one of them. To decide, replace a form by another in a copy and compare the two with ' +
    'dev/cuda/decode-step.mjs --dist.',
];
