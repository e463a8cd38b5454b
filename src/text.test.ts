import { execFileSync } from 'node:child_process';
import { expect, it } from 'vitest';
import { shellQuote, visible, wrapText } from './text.js';

it.each(['artifacts/mine', 'my runs/a', "it's", '$(rm x)', 'a;b', '', '*', 'ü', 'a\nb'])(
  'shellQuote: a shell reads %j back unchanged',
  (text) => {
    expect(execFileSync('/bin/sh', ['-c', `printf %s ${shellQuote(text)}`], { encoding: 'utf8' })).toBe(text);
  },
);

it('shellQuote leaves plain paths as they are', () => {
  expect(shellQuote('artifacts/run-1/config.yaml')).toBe('artifacts/run-1/config.yaml');
});

it('wrapText breaks between words and cuts words that are longer than a line', () => {
  expect(wrapText('one two three', 7)).toEqual(['one two', 'three']);
  expect(wrapText('abcdefghij kl', 4)).toEqual(['abcd', 'efgh', 'ij', 'kl']);
  expect(wrapText('', 4)).toEqual(['']);
});

it('visible replaces control characters', () => {
  expect(visible('a\x1b[2Jb\x7f\r\n\tc')).toBe('a␛[2Jb␡␍\n\tc');
});
