// Checks of what the commands of entries.mjs print and write. A check returns { ok, measured }; it throws if a command has
// not written what it should: the entry is then broken, and says nothing.
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';

const round = (number) => Number(number.toFixed(5));

const fileOf = (out, name) => readFileSync(join(out, name), 'utf8');

/** No test failed. Requires at least `atLeast` that passed: a skipped or interrupted file must not look like a success. */
export const testsPass = (atLeast) => (out) => {
  const lines = existsSync(join(out, 'tests.jsonl')) ? fileOf(out, 'tests.jsonl').trim().split('\n') : [];
  const results = lines.filter((line) => line !== '').map((line) => JSON.parse(line));
  const named = (state) => [...new Set(results.filter((result) => result.state === state).map(({ test }) => test))];
  const [passed, failed] = [named('passed'), named('failed')];
  if (failed.length === 0 && passed.length < atLeast)
    throw new Error(`${passed.length} tests passed and none failed, but at least ${atLeast} should run`);
  return { ok: failed.length === 0, measured: { passed: passed.length, failed } };
};

/** bench/context.mjs: the loss and the gain from far context beside those of dense attention. */
export const usesItsContext = (out) => {
  const { runs } = JSON.parse(fileOf(out, 'context.json'));
  const [dense, sparse] = ['code-dense', 'code-scorer-window'].map((name) => {
    const { error, validation } = runs.find(({ variant }) => variant === name);
    if (error) throw new Error(error);
    return { loss: validation.loss, gain: validation.far.gain };
  });
  return { ok: sparse.loss < dense.loss && sparse.gain >= 0.9 * dense.gain, measured: { dense, sparse } };
};

/** bench train: the recipe for context has at least this share of the tokens/s without it. */
export const recipeSpeed = (least) => (out) => {
  const [recipe, plain] = ['recipe.json', 'plain.json'].map(
    (name) => JSON.parse(fileOf(out, name)).rows[0].tokens_per_s,
  );
  return { ok: recipe >= least * plain, measured: { recipe, plain, ratio: round(recipe / plain) } };
};

/** eval needle: 99 % at lengths up to `trained`, 97 % beyond, and 90 % at every depth. */
export const findsNeedles = (trained) => (out) => {
  const { rows } = JSON.parse(fileOf(out, 'needle.json'));
  const measured = [...new Set(rows.map(({ length }) => length))].map((length) => {
    const cells = rows.filter((row) => row.length === length).map(({ accuracy }) => accuracy);
    const found = cells.reduce((sum, accuracy) => sum + accuracy, 0) / cells.length;
    return { length, found: round(found), worst: Math.min(...cells) };
  });
  const ok = measured.every(({ length, found, worst }) => found >= (length <= trained ? 0.99 : 0.97) && worst >= 0.9);
  return { ok, measured };
};

/** bench/peers/cuda/compare.mjs --part nsa: faster than the public kernels at every length, forward and backward. */
export const fasterThanPublic = (out) => {
  const { ours, peers } = JSON.parse(fileOf(out, 'nsa.json')).nsa;
  const measured = peers.rows.flatMap(({ S, forward_ms, backward_ms }) =>
    Object.entries({ forward: forward_ms, backward: backward_ms }).map(([pass, public_ms]) => {
      const { ms } = ours.rows.find((row) => row.what === 'nsa' && row.pass === pass && row.S === S);
      return { S, pass, ms, public_ms, ratio: round(public_ms / ms) };
    }),
  );
  return { ok: measured.every(({ ratio }) => ratio >= 1), measured };
};

/** bench/compare-builds.mjs: no figure of the new build is below the old one's by more than `percent`. */
export const nothingSlower = (percent) => (out) => {
  const { rows } = JSON.parse(fileOf(out, 'compare.json'));
  return {
    ok: rows.length > 0 && rows.every(({ ratio }) => ratio >= 1 - percent / 100),
    measured: Object.fromEntries(rows.map(({ name, ratio }) => [name, round(ratio)])),
  };
};
