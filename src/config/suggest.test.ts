import { describe, expect, it } from 'vitest';
import { hint, nearest } from './suggest.js';

describe('nearest', () => {
  const known = ['cosine', 'wsd', 'linear', 'constant'];

  it.each([
    ['cosin', 'cosine'],
    ['csoine', 'cosine'],
    ['COSINE', 'cosine'],
    ['lineer', 'linear'],
    ['wds', 'wsd'],
  ])('%s means %s', (typed, meant) => expect(nearest(typed, known)).toBe(meant));

  it('finds nothing when the word is another word', () => {
    expect(nearest('polynomial', known)).toBeUndefined();
    expect(hint('polynomial', known)).toBe('');
  });

  it('prefers the nearer of two', () => expect(nearest('steps', ['step', 'steps_', 'steps'])).toBe('steps'));

  it('knows what people call a CUDA device', () => {
    expect(nearest('gpu', ['auto', 'cpu', 'cuda'])).toBe('cuda');
    expect(nearest('gpu', ['auto', 'cpu'])).toBe('cpu');
  });

  it('asks in words', () => expect(hint('cosin', known)).toBe(' (did you mean cosine?)'));
});
