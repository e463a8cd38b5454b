/** Ablation: runs a model with one attention branch switched off. */
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { BRANCHES, type Branch } from '../ops/attention/gate/op.js';

/** A logit for which softmax and sigmoid both give exactly 0. */
const NEVER = -1e30;

/** Runs `body` with the gate of `branch` at 0 in every layer. A softmax gate gives its weight to the other two. */
export function withoutBranch<T>(model: LanguageModel, branch: Branch, body: () => T): T {
  const switchOn = switchOffBranch(model, branch);
  try {
    return body();
  } finally {
    switchOn();
  }
}

/** Sets the gate of `branch` to 0 in every layer. Returns the function that restores it. */
export function switchOffBranch(model: LanguageModel, branch: Branch): () => void {
  const { attention, nsa } = model.shape;
  if (attention !== 'nsa') throw new UsageError('a model with dense attention has no branches to switch off');
  if (nsa.forceBranch !== 'none' || nsa.forceUniformGate)
    throw new UsageError(
      'the gates of this model are fixed (nsa.force_branch, nsa.force_uniform_gate): none can be switched off',
    );
  const biases = model.parameters.filter(({ name }) => name.endsWith('.gate.bias')).map(({ value }) => value);
  const before = biases.map((bias) => Float32Array.from(bias.read()));
  const column = BRANCHES.indexOf(branch);
  for (const [i, bias] of biases.entries())
    bias.write(before[i].map((value, at) => (at % BRANCHES.length === column ? NEVER : value)));
  return () => {
    for (const [i, bias] of biases.entries()) bias.write(before[i]);
  };
}
