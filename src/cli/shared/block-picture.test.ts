import { describe, expect, it } from 'vitest';
import { blockPicture } from './block-picture.js';
import { stylesFor } from './io.js';

const plain = stylesFor({ isTTY: false }, {});
const coloured = stylesFor({ isTTY: true }, {});
const picture = {
  read: [
    [
      [0, 2, 5, 6],
      [0, 3, 5, 6],
    ],
  ],
  current: 6,
  wanted: 2,
  window: 5,
};

describe('block picture', () => {
  it('draws a row for each layer and group, the block of the fact and the window', () => {
    expect(blockPicture(picture, plain).split('\n')).toEqual([
      'layer 0, group 0  ▒▒··██····▒▒▒▒',
      'layer 0, group 1  ▒▒····██··▒▒▒▒',
      'the fact              ▲▲',
      'the window                  ────',
    ]);
  });

  it('fits 80 columns with any number of blocks up to 62, one column each where two do not fit', () => {
    for (const current of [0, 1, 30, 31, 61]) {
      const lines = blockPicture({ ...picture, read: [[[0, current]]], current, wanted: 0 }, plain).split('\n');
      for (const line of lines) expect(line.length).toBeLessThanOrEqual(80);
      expect(lines[0]).toHaveLength(18 + (current <= 30 ? 2 : 1) * (current + 1));
    }
  });

  it('has colour codes on a terminal only, and the same text', () => {
    const text = blockPicture(picture, coloured);
    expect(text).toContain('\x1b[32m██\x1b[39m');
    // biome-ignore lint/suspicious/noControlCharactersInRegex: the escape character of a colour code.
    expect(text.replace(/\x1b\[\d+m/g, '')).toBe(blockPicture(picture, plain));
    expect(blockPicture(picture, stylesFor({ isTTY: true }, { NO_COLOR: '1' }))).not.toContain('\x1b');
  });
});
