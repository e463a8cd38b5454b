import { expect, it } from 'vitest';
import { formatTable } from './table.js';

it('aligns columns and leaves no spaces at the end', () => {
  expect(
    formatTable(
      [{ title: 'name' }, { title: 'ms', align: 'right' }, { title: 'note' }],
      [
        ['a', '1.5', ''],
        ['longer', '10.5', 'slow'],
      ],
    ),
  ).toBe('name      ms  note\na        1.5\nlonger  10.5  slow\n');
});

it('is only its titles when there are no rows', () => {
  expect(formatTable([{ title: 'a' }, { title: 'b' }], [])).toBe('a  b\n');
});
