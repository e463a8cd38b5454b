import { afterAll, describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { modelShape } from '../model/shape.js';
import { Tensor } from '../tensor/tensor.js';
import { cpu } from '../testing/devices.js';
import { strictObserver } from './observers.js';

const shape = modelShape(parseConfig({}), 256);
const tensors: Tensor[] = [];
afterAll(() => {
  for (const tensor of tensors) tensor.free();
});

const gates = (values: number[]) => keep(Tensor.from(cpu(), values, [1, values.length / 3, 3]));
const blocks = (values: number[]) => keep(Tensor.from(cpu(), values, [1, 1, values.length], 'i32'));
function keep(tensor: Tensor): Tensor {
  tensors.push(tensor);
  return tensor;
}

describe('strict asserts', () => {
  it('passes valid gates and selections on to the next observer', () => {
    const heard: string[] = [];
    const observer = strictObserver(shape, {
      gates: (layer) => heard.push(`gates ${layer}`),
      selected: (layer) => heard.push(`selected ${layer}`),
    });
    observer.gates!(1, gates([0.2, 0.3, 0.5, 1, 0, 0]));
    observer.selected!(2, blocks([0, 3, 7, -1]));
    expect(heard).toEqual(['gates 1', 'selected 2']);
  });

  it.each([
    [[0.2, 0.3, 0.6], 'are not valid weights'],
    [[1.5, -0.5, 0], 'are not valid weights'],
    [[Number.NaN, 0.5, 0.5], 'are not valid weights'],
  ])('throws at gates %j', (values, message) =>
    expect(() => strictObserver(shape).gates!(0, gates(values))).toThrow(message),
  );

  it.each([
    [[0, 4, 4, -1], 'is not ascending'],
    [[0, 5, 3, 8], 'is not ascending'],
    [[1, 2, 3, 4], 'does not contain block 0'],
  ])('throws at the selection %j', (values, message) =>
    expect(() => strictObserver(shape).selected!(0, blocks(values))).toThrow(message),
  );
});
