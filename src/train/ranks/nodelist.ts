/** Expands Slurm's short form of host names, `node[01-03,7],login`. */
import { UsageError } from '../../errors.js';

/** A limit, so that a mistyped range does not exhaust the memory. */
const MAX_HOSTS = 1 << 17;

export function expandNodeList(list: string): string[] {
  const hosts = splitOutside(list).flatMap((item) => expandItem(item.trim(), list));
  if (hosts.length === 0) throw refuse(list, 'it names no host');
  return hosts;
}

/** Splits at commas outside brackets. */
function splitOutside(list: string): string[] {
  const items: string[] = [];
  let [depth, start] = [0, 0];
  for (let i = 0; i <= list.length; i++) {
    const character = list[i];
    if (character === '[') depth += 1;
    if (character === ']') depth -= 1;
    if (depth < 0 || depth > 1) throw refuse(list, 'its brackets do not match');
    if (i < list.length && (character !== ',' || depth > 0)) continue;
    if (i > start) items.push(list.slice(start, i));
    start = i + 1;
  }
  if (depth !== 0) throw refuse(list, 'its brackets do not match');
  return items;
}

/** Expands every bracket of a name, the last one fastest: `r[1-2]n[1-2]` is r1n1, r1n2, r2n1, r2n2. */
function expandItem(item: string, list: string): string[] {
  const open = item.indexOf('[');
  if (open < 0) return item === '' ? [] : [item];
  const close = item.indexOf(']', open);
  const prefix = item.slice(0, open);
  const rest = expandItem(item.slice(close + 1), list);
  const ends = rest.length === 0 ? [''] : rest;
  const numbers = item
    .slice(open + 1, close)
    .split(',')
    .flatMap((range) => expandRange(range, list));
  if (numbers.length * ends.length > MAX_HOSTS) throw refuse(list, `it names more than ${MAX_HOSTS} hosts`);
  return numbers.flatMap((number) => ends.map((end) => `${prefix}${number}${end}`));
}

/** `08-10` is 08, 09, 10: leading zeros are kept. */
function expandRange(range: string, list: string): string[] {
  const match = /^(\d+)(?:-(\d+))?$/.exec(range.trim());
  if (!match) throw refuse(list, `${JSON.stringify(range)} is not a range of numbers`);
  const [, first, last = first] = match;
  const [from, to] = [Number(first), Number(last)];
  if (to < from) throw refuse(list, `the range ${range} runs backwards`);
  if (to - from >= MAX_HOSTS) throw refuse(list, `it names more than ${MAX_HOSTS} hosts`);
  return Array.from({ length: to - from + 1 }, (_, i) => String(from + i).padStart(first.length, '0'));
}

function refuse(list: string, reason: string): UsageError {
  return new UsageError(`the node list ${JSON.stringify(list)} cannot be read: ${reason}`);
}
