import { expect, it } from 'vitest';
import { fitFields, formatTable } from './table.js';

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

it('drops the last fields of a step line that do not fit', () => {
  const line = 'step 0020 | loss 5.4321 | lr 3.00e-04 | toks/s 51234 | mfu 41.2% | grad_norm 0.87 | fetch 3ms';
  expect(fitFields(line, 80)).toBe('step 0020 | loss 5.4321 | lr 3.00e-04 | toks/s 51234 | mfu 41.2%');
  expect(fitFields(line, 200)).toBe(line);
});

it('is only its titles when there are no rows', () => {
  expect(formatTable([{ title: 'a' }, { title: 'b' }], [])).toBe('a  b\n');
});

it('wraps the columns that allow it when the table is too wide', () => {
  const table = formatTable(
    [{ title: 'check' }, { title: 'found', wrap: true }],
    [
      ['disk', 'a folder with a long name /srv/data/models/without/any/space'],
      ['node', 'v20'],
    ],
    40,
  );
  expect(table.split('\n')).toEqual([
    'check  found',
    'disk   a folder with a long name',
    '       /srv/data/models/without/any/spac',
    '       e',
    'node   v20',
    '',
  ]);
});

it('does not count colour codes as width', () => {
  const rows = [['\x1b[31mred\x1b[39m', 'x']];
  expect(formatTable([{ title: 'level' }, { title: 'b' }], rows)).toBe('level  b\n\x1b[31mred\x1b[39m    x\n');
});
