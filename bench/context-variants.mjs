// The runs of bench/context.mjs: what each variant changes, and the order in which they run.

const scorer = { 'train.scorer_loss': 0.1 };
const none = { 'train.scorer_loss': 0 };
const muon = { 'train.optimizer': 'muon' };
const twice = { 'train.lr': 8e-3 };
const fourTimes = { 'train.lr': 16e-3 };
// The curriculum of needle_cpu in half of its samples. 1024 tokens are the longest of the training.
const short = {
  'train.steps': 750,
  'data.needle_curriculum': '64+128:300,128+512:600,64+128+256+512:800,256+1024:1000000',
};
// The same steps with fewer short sequences.
const early = { ...short, 'data.needle_curriculum': '64+128:200,128+512:400,256+1024:1000000' };
// Half of the tokens in the steps of needle_cpu: one sequence of 2,048 tokens a step, and its curriculum in half of the samples.
const small = {
  'train.batch_size': 1,
  'data.needle_curriculum': '64+128:300,128+512:600,256+1024:900,64+128+256+512:1100,256+1024:1000000',
};
// Long sequences from the first step; all lengths from the first step.
const flat = { 'data.needle_curriculum': '256+1024:1000000' };
const mixed = {
  'train.seq_len': 4096,
  'train.batch_size': 1,
  'data.needle_curriculum': '64+128+256+1024:1000000',
};
// Sequences of 4,096 tokens in the second half: what is then found at 4,096 was trained at that length.
const far = {
  ...{ 'train.seq_len': 8192, 'train.batch_size': 1, 'train.steps': 750 },
  'data.needle_curriculum': '64+128:100,128+512:250,256+1024:400,1024+4096:1000000',
};
const rope = { 'model.rope_scale': 1, 'model.n_layers': 2 };
// Positions in the window alone.
const windowRope = { 'nsa.rope': 'window', 'nsa.cmp_rope': 'none' };
// Waves of more than 64 tokens stand still, so that what is found at one distance is found at any.
const slow = { 'model.rope_type': 'llama3', 'model.rope_factor': 1e6, 'model.rope_original_context': 64 };
// Three million parameters on a GPU, 49 million tokens of code; a window of 64 tokens of 2,048.
const code = {
  ...{ 'runtime.precision': 'bf16', 'model.dim': 256, 'model.n_heads': 8, 'nsa.n_sel': 12 },
  ...{ 'train.steps': 1500, 'train.seq_len': 2048, 'train.batch_size': 16, 'train.warmup_steps': 100 },
  ...muon,
  ...{ 'train.save_every': 0, 'train.sample_every': 0, 'train.eval_every': 0, 'data.val_fraction': 0 },
};

/** Changes to the recipe needle_cpu as it was with AdamW: 1,500 steps. */
const needle = (...changes) => ({
  config: 'needle_cpu',
  set: Object.assign(
    { 'train.steps': 1500, 'train.optimizer': 'adamw' },
    { 'data.needle_curriculum': '64+128:600,128+512:1200,256+1024:1800,64+128+256+512:2200,256+1024:1000000' },
    ...changes,
  ),
});
const forced = { ...none, 'nsa.force_branch': 'cmp', 'train.steps': 900 };
const stories = (...changes) => ({ config: 'quickstart', set: Object.assign({}, ...changes) });
// Half of the steps of quickstart, and of its drills.
const half = { 'train.steps': 1000, 'data.stories_drills': 1200 };
const text = (...changes) => ({
  config: 'text_cpu',
  device: 'cuda',
  set: Object.assign({}, code, ...changes),
});

/** Changes of each variant to its config; `phases` are the settings of runs that follow each other in one folder. */
export const VARIANTS = {
  nsa: needle(none),
  scorer: needle(scorer),
  'two-runs': { config: 'needle_cpu', phases: [needle(forced).set, needle(none).set] },
  'short-nsa': needle(short, none),
  'short-scorer': needle(short, scorer),
  'short-scorer-1': needle(short, { 'train.scorer_loss': 1 }),
  'short-scorer-betas': needle(short, scorer, { 'train.betas': '[0.9,0.99]' }),
  'early-scorer': needle(early, scorer),
  'early-scorer-0.3': needle(early, { 'train.scorer_loss': 0.3 }),
  'small-scorer': needle(small, scorer),
  'rate2-nsa': needle(none, twice),
  'rate2-scorer': needle(scorer, twice),
  'flat-nsa': needle(flat, none),
  'flat-scorer': needle(flat, scorer),
  'mixed-nsa': needle(mixed, none),
  'mixed-scorer': needle(mixed, scorer),
  'rope2-nsa': needle(rope, none),
  'rope2-scorer': needle(rope, scorer),
  'rope2-slow-nsa': needle(rope, slow, none),
  'rope2-slow-scorer': needle(rope, slow, scorer),
  // With Muon, in half of the steps.
  'short-nsa-muon': needle(short, none, muon),
  'short-scorer-muon': needle(short, scorer, muon),
  'mixed-scorer-muon': needle(mixed, scorer, muon, { 'train.steps': 750 }),
  'rope2-scorer-muon': needle(rope, short, scorer, muon),
  'rope2-slow-muon': needle(rope, slow, short, scorer, muon),
  'rope2-long-muon': needle(rope, scorer, muon),
  'rope2-mixed-muon': needle(rope, mixed, scorer, muon),
  'rope2-far-muon': needle(rope, far, scorer, muon),
  'rope2-far-slow-muon': needle(rope, slow, far, scorer, muon),
  'rope4-long-muon': needle(rope, scorer, muon, { 'model.n_layers': 4 }),
  'rope2-window-muon': needle(rope, short, scorer, muon, windowRope),
  'rate2-scorer-muon': needle(short, scorer, muon, twice),
  // AdamW, which trains the gate, makes steps of one size: a temperature of 10 is a tenth of the rate.
  'short-gate-muon': needle(short, scorer, muon, { 'nsa.gate_temp': 10 }),
  'rate2-gate-muon': needle(short, scorer, muon, twice, { 'nsa.gate_temp': 10 }),
  'rate2-inputs-muon': needle(short, scorer, muon, twice, { 'nsa.gate_inputs': 12 }),
  'rate4-scorer-muon': needle(short, scorer, muon, fourTimes),
  'rate4-gate-muon': needle(short, scorer, muon, fourTimes, { 'nsa.gate_temp': 10 }),
  'short-inputs-muon': needle(short, scorer, muon, { 'nsa.gate_inputs': 12 }),
  stories: stories(none, { 'train.steps': 2000, 'train.optimizer': 'adamw', 'data.stories_drills': 2400 }),
  'stories-scorer': stories(scorer, { 'train.steps': 2000, 'train.optimizer': 'adamw', 'data.stories_drills': 2400 }),
  'stories-muon': stories(half, scorer, muon),
  'stories-nsa-muon': stories(half, none, muon),
  // As many parameters as the sparse model, and positions, without which dense attention has no order.
  'stories-dense-muon': stories(half, muon, {
    ...{ 'model.attention': 'dense', 'model.mlp_hidden': 323, 'model.rope_scale': 1 },
  }),
  // As many parameters as the sparse model, in a wider feed-forward.
  'code-dense': text({ 'model.attention': 'dense', 'model.mlp_hidden': 605 }),
  'code-nsa': text(none),
  'code-scorer': text(scorer),
  'code-scorer-gate': text(scorer, { 'nsa.gate_temp': 10 }),
  'code-scorer-window': text(scorer, windowRope, { 'nsa.gate_temp': 10 }),
  'code-scorer-window-sel24': text(scorer, windowRope, { 'nsa.gate_temp': 10, 'nsa.n_sel': 24 }),
};

/** The runs in the order in which they answer most: variants and their seeds. */
export const PLAN = [
  ['short-scorer-muon', [1, 2]],
  ['code-dense,code-scorer', [1]],
  ['short-nsa-muon', [1]],
  ['short-scorer-muon', [3]],
  ['short-gate-muon,mixed-scorer-muon', [1]],
  ['short-scorer-muon', [4, 5]],
  ['mixed-scorer-muon', [2, 3]],
  ['code-nsa,code-scorer-gate,code-scorer-window,code-scorer-window-sel24', [1]],
  ['code-scorer', [2, 3]],
  ['code-dense,code-nsa', [2, 3]],
  ['code-scorer-window,code-scorer-gate', [2, 3]],
  ['rope2-window-muon', [1, 2, 3]],
  ['rope2-far-slow-muon,rope2-slow-muon,rope2-scorer-muon', [1]],
  ['stories,stories-scorer,stories-nsa-muon', [1]],
  ['stories,stories-scorer,stories-dense-muon,stories-muon,stories-nsa-muon', [2, 3]],
  ['rate2-scorer-muon,rate2-gate-muon,rate2-inputs-muon,rate4-scorer-muon,rate4-gate-muon', [1, 2, 3]],
  ['short-gate-muon,short-nsa-muon', [2, 3]],
  ['short-inputs-muon', [1, 2, 3]],
  ['rope2-slow-muon,rope2-scorer-muon', [2, 3]],
  ['rope2-far-muon,rope4-long-muon,rope2-mixed-muon,rope2-long-muon', [1]],
  ['rope2-slow-nsa,rate2-nsa', [1]],
  ['scorer', [1, 2, 3, 4, 5]],
  ['nsa', [1, 2, 3]],
  ['rate2-scorer', [1, 2, 3]],
  ['short-scorer-betas', [1]],
  ['short-scorer,mixed-scorer,rope2-slow-scorer', [1, 2, 3]],
  ['early-scorer,early-scorer-0.3,small-scorer,short-scorer-1,flat-scorer', [1]],
  ['rope2-scorer,two-runs', [1, 2, 3]],
  ['mixed-nsa,short-nsa,rope2-nsa,flat-nsa', [1]],
]
  .flatMap(([names, seeds]) => seeds.flatMap((seed) => names.split(',').map((name) => [name, seed])))
  .filter(([variant, seed], i, all) => all.findIndex((one) => one[0] === variant && one[1] === seed) === i);
