import { describe, expect, it } from 'vitest';
import { swiglu } from '../ops/activation/op.js';
import { AdamW } from '../ops/adamw/op.js';
import { add } from '../ops/add/op.js';
import { linearCrossEntropy } from '../ops/crossentropy/op.js';
import { embedding } from '../ops/embedding/op.js';
import { clipFactor, gradientNorm } from '../ops/gradnorm/op.js';
import { linear } from '../ops/linear/op.js';
import { rmsnorm } from '../ops/rmsnorm/op.js';
import { cpu } from '../testing/devices.js';
import { Parameter } from './parameter.js';
import { fillIntegers, fillNormal } from './random/op.js';
import { Tape } from './tape.js';
import { Tensor } from './tensor.js';

const device = cpu();

describe('a training step', () => {
  it('asks the system for nothing once it has run twice, and learns', () => {
    const before = device.pool.bytesInUse;
    const [tokens, dim, hidden, vocab] = [96, 32, 64, 100];
    const shapes = { embed: [vocab, dim], norm: [dim], up: [2 * hidden, dim], down: [dim, hidden], head: [vocab, dim] };
    const make = (name: string, shape: number[], stream: number) => {
      const parameter = new Parameter(device, name, shape);
      fillNormal(parameter.value, { seed: 1, stream }, 0.1);
      return parameter;
    };
    const parameters = Object.entries(shapes).map(([name, shape], i) => make(name, shape, i));
    const [embed, norm, up, down, head] = parameters.map(({ value }) => value);
    const optimizer = new AdamW(
      device,
      parameters.map((parameter) => ({ parameter, weightDecay: 0.01 })),
    );
    const ids = Tensor.empty(device, [tokens], 'i32');
    fillIntegers(ids, { seed: 1, stream: 99 }, vocab);
    const step = () => {
      const tape = new Tape(device);
      const x = embedding(tape, embed, ids);
      const normed = rmsnorm(tape, x, norm);
      const fused = linear(tape, normed, up);
      const gated = swiglu(tape, fused);
      const branch = linear(tape, gated, down);
      const y = add(tape, x, branch);
      for (const tensor of [x, normed, fused, gated, branch]) tape.drop(tensor);
      const loss = linearCrossEntropy(tape, y, head, ids, { chunk: 40 });
      tape.drop(y);
      const value = loss.item();
      tape.backward(loss);
      tape.end();
      const { norm: length } = gradientNorm(
        device,
        parameters.map(({ gradient }) => gradient!),
      );
      optimizer.step({ learningRate: 0.01, gradientScale: clipFactor(length, 1) });
      for (const parameter of parameters) parameter.clearGradient();
      return value;
    };
    const losses = [step(), step()];
    const { pool } = device;
    const [allocations, used] = [pool.systemAllocations, pool.bytesInUse];
    for (let i = 0; i < 30; i++) losses.push(step());
    expect([pool.systemAllocations, pool.bytesInUse]).toEqual([allocations, used]);
    expect(losses.at(-1)!).toBeLessThan(losses[0] / 4);
    for (const thing of [...parameters, optimizer, ids]) thing.free();
    expect(pool.bytesInUse).toBe(before);
  });
});
