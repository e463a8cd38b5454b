// The runs of bench/context.mjs: what each variant changes, and the order in which they run. Rows of variants that lost stay
// in the results with their settings.

const scorer = { 'train.scorer_loss': 0.1 };
const none = { 'train.scorer_loss': 0 };
const muon = { 'train.optimizer': 'muon' };
const twice = { 'train.lr': 8e-3 };
const fourTimes = { 'train.lr': 16e-3 };
// AdamW, which trains the gate, makes steps of one size: a temperature of 10 is a tenth of the rate.
const slowGate = { 'nsa.gate_temp': 10 };
// The curriculum of needle_cpu in half of its samples. 1024 tokens are the longest of the training.
const short = {
  'train.steps': 750,
  'data.needle_curriculum': '64+128:300,128+512:600,64+128+256+512:800,256+1024:1000000',
};
// All lengths from the first step.
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
  // text_cpu without the recipe, which the variants add.
  ...{ 'nsa.rope': 'all', 'nsa.cmp_rope': 'after', 'nsa.gate_temp': 1 },
};

// One million parameters and 20 million tokens of code, in half an hour on one core.
const smallCode = {
  ...code,
  ...{ 'runtime.precision': 'fp32', 'model.dim': 128, 'model.n_heads': 4, 'train.batch_size': 8, 'train.steps': 1200 },
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
const stories = (...changes) => ({ config: 'quickstart', set: Object.assign({}, ...changes) });
// The steps and drills of quickstart; with AdamW it had twice as many.
const half = { 'train.steps': 1000, 'data.stories_drills': 1200 };
const text = (...changes) => ({
  config: 'text_cpu',
  device: 'cuda',
  set: Object.assign({}, code, ...changes),
});
const smallText = (...changes) => ({ config: 'text_cpu', set: Object.assign({}, smallCode, ...changes) });

/** Changes of each variant to its config; `device` is where it trains, by default the CPU. */
export const VARIANTS = {
  nsa: needle(none),
  scorer: needle(scorer),
  // With Muon, in half of the steps.
  'short-nsa-muon': needle(short, none, muon),
  'short-scorer-muon': needle(short, scorer, muon),
  'mixed-scorer-muon': needle(mixed, scorer, muon, { 'train.steps': 750 }),
  'short-gate-muon': needle(short, scorer, muon, slowGate),
  'rate2-scorer-muon': needle(short, scorer, muon, twice),
  'rate2-gate-muon': needle(short, scorer, muon, twice, slowGate),
  'rate4-scorer-muon': needle(short, scorer, muon, fourTimes),
  'rate4-gate-muon': needle(short, scorer, muon, fourTimes, slowGate),
  'rope2-scorer-muon': needle(rope, short, scorer, muon),
  'rope2-slow-muon': needle(rope, slow, short, scorer, muon),
  'rope2-far-slow-muon': needle(rope, slow, far, scorer, muon),
  'rope2-window-muon': needle(rope, short, scorer, muon, windowRope),
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
  'code-scorer-gate': text(scorer, slowGate),
  'code-scorer-window': text(scorer, windowRope, slowGate),
  'small-code-dense': smallText({ 'model.attention': 'dense', 'model.mlp_hidden': 345 }),
  'small-code-window': smallText(scorer, windowRope, slowGate),
};

/** The runs in the order in which they answer most: variants and their seeds. */
export const PLAN = [
  ['short-scorer-muon', [1, 2, 3, 4, 5]],
  ['code-dense,code-scorer-window,code-scorer,code-nsa,code-scorer-gate', [1, 2, 3]],
  ['small-code-dense,small-code-window', [1, 2, 3]],
  ['stories-dense-muon,stories-muon,stories-nsa-muon,stories,stories-scorer', [1, 2, 3]],
  ['mixed-scorer-muon,rope2-window-muon,rate2-gate-muon,rate4-gate-muon,short-gate-muon', [1, 2, 3]],
  ['short-nsa-muon,rate2-scorer-muon,rate4-scorer-muon,rope2-scorer-muon,rope2-slow-muon', [1, 2, 3]],
  ['nsa,scorer,rope2-far-slow-muon', [1, 2, 3]],
].flatMap(([names, seeds]) => seeds.flatMap((seed) => names.split(',').map((name) => [name, seed])));
