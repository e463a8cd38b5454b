import { expect, it } from 'vitest';
import { explainRule } from './explain.js';

it.each(['gate_entropy', 'gate_collapse'])('%s names the key that a converted model needs', (rule) => {
  expect(explainRule(rule)).toContain('train.gate_release_steps');
});
