import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { Parameter } from '../../tensor/parameter.js';
import { Tape } from '../../tensor/tape.js';
import { cpu, devices, rounded, tolerance } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { embedding } from './op.js';
import { embeddingBackward, embeddingForward } from './reference.js';

const randomIds = (count: number, vocab: number, seed: number) =>
  Int32Array.from(randomValues(count, seed), (v) => Math.floor(((v + 1) / 2) * vocab));

describe('embedding reference', () => {
  it('has a gradient equal to finite differences', () => {
    const ids = [2, 0, 2, 3];
    const [table, dy] = [randomValues(15, 1), randomValues(12, 2)];
    const value = () => dot(embeddingForward(table, ids, 3), dy);
    expect(relativeError(embeddingBackward(ids, dy, 5, 3), finiteDifferences(value, table))).toBeLessThan(1e-8);
  });
});

describe.each(devices())('embedding on $name', ({ device, dtype }) => {
  it.each([
    [1, 1, 1],
    [7, 3, 5],
    [300, 17, 64],
    [50, 1000, 100],
    [3, 4, 20000],
    [0, 8, 4],
    [4, 8, 0],
    [9000, 300, 40], // several blocks of the sort
    [5000, 70000, 8], // ids of more than two bytes
    [3000, 2, 264], // long lists of one id
  ])('equals the reference for %i tokens, %i entries of %i', (tokens, vocab, dim) => {
    const ids = randomIds(tokens, vocab, 1);
    const [table, dy] = [randomValues(vocab * dim, 2), rounded(randomValues(tokens * dim, 3), dtype)];
    const tape = new Tape(device());
    const tTable = tape.watch(tape.from(table, [vocab, dim]));
    const y = embedding(tape, tTable, tape.from(ids, [tokens], 'i32'), dtype);
    expect(relativeError(y.read(), rounded(embeddingForward(table, ids, dim), dtype))).toBe(0);
    tape.backward(y, dy);
    const expected = embeddingBackward(ids, dy, vocab, dim);
    expect(tape.gradient(tTable)!.dtype).toBe('f32');
    expect(relativeError(tape.gradient(tTable)!.read(), expected)).toBeLessThan(tolerance('f32'));
    tape.end();
  });

  it('gives the same bits every time', () => {
    const [tokens, vocab, dim] = [5000, 50, 96];
    const run = () => {
      const tape = new Tape(device());
      const table = tape.watch(tape.zeros([vocab, dim]));
      const y = embedding(tape, table, tape.from(randomIds(tokens, vocab, 1), [tokens], 'i32'), dtype);
      tape.backward(y, randomValues(tokens * dim, 2));
      const bytes = tape.gradient(table)!.readBytes();
      tape.end();
      return Buffer.from(bytes);
    };
    const first = run();
    for (let i = 0; i < 3; i++) expect(Buffer.compare(run(), first)).toBe(0);
  });

  it('overwrites the gradient of the last step, also of rows it does not touch', () => {
    const table = new Parameter(device(), 'table', [3, 2]);
    table.value.zero();
    const step = (ids: number[]) => {
      const tape = new Tape(device());
      const y = embedding(tape, table.value, tape.from(ids, [ids.length], 'i32'), dtype);
      tape.backward(y, new Float32Array(y.size).fill(1));
      tape.end();
    };
    step([0, 0, 2]);
    expect([...table.gradient!.read()]).toEqual([2, 2, 0, 0, 1, 1]);
    step([1, 2]);
    expect([...table.gradient!.read()]).toEqual([2, 2, 1, 1, 2, 2]);
    table.clearGradient();
    step([1]);
    expect([...table.gradient!.read()]).toEqual([0, 0, 1, 1, 0, 0]);
    table.free();
  });

  it.each([
    [[0, 5, 9], 'token 1 has id 5, outside the vocabulary of 5'],
    [[-1], 'token 0 has id -1, outside the vocabulary of 5'],
  ])('refuses ids outside the table, or makes NaN of them where the host cannot know: %j', (ids, message) => {
    const tape = new Tape(device());
    const table = tape.watch(tape.zeros([5, 2]));
    const run = () => embedding(tape, table, tape.from(ids, [ids.length], 'i32'), dtype);
    if (device().kind === 'cpu') {
      expect(run).toThrow(UsageError);
      expect(run).toThrow(message);
    } else {
      const y = run();
      expect(Array.from(y.read(), Number.isNaN)).toEqual(ids.flatMap((id) => Array(2).fill(id < 0 || id >= 5)));
      tape.backward(y, new Float32Array(y.size).fill(1));
      const touched = ids.includes(0) ? [1, 1] : [0, 0];
      expect([...tape.gradient(table)!.read()]).toEqual([...touched, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    tape.end();
    expect(device().pool.bytesInUse).toBe(0);
  });

  it('names the tensor whose shape or type does not fit', () => {
    const tape = new Tape(device());
    expect(() => embedding(tape, tape.zeros([4]), tape.zeros([2], 'i32'))).toThrow(
      'embedding: table must have shape [*, *], not [4]',
    );
    expect(() => embedding(tape, tape.zeros([4, 2]), tape.zeros([2]))).toThrow('embedding: ids must be i32, not f32');
    tape.end();
  });

  it('propagates NaN to its own row only', () => {
    const tape = new Tape(device());
    const table = tape.watch(tape.from([1, Number.NaN, 3, 4], [2, 2]));
    const y = embedding(tape, table, tape.from([1, 0], [2], 'i32'), dtype);
    expect([...y.read()]).toEqual([3, 4, 1, Number.NaN]);
    tape.backward(y, [1, 2, Number.NaN, 4]);
    expect([...tape.gradient(table)!.read()]).toEqual([Number.NaN, 4, 1, 2]);
    tape.end();
  });
});

it('gives the same gradient for any number of threads', () => {
  expectSameForAnyThreadCount(() => {
    const tape = new Tape(cpu());
    const table = tape.watch(tape.zeros([11, 300]));
    const y = embedding(tape, table, tape.from(randomIds(500, 11, 1), [500], 'i32'));
    tape.backward(y, randomValues(500 * 300, 2));
    const bytes = tape.gradient(table)!.readBytes();
    tape.end();
    return [bytes];
  });
});
