/** The whole attention module on a device, in every configuration. */
import { configSchema } from '../config/schema.js';
import type { Device } from '../device/device.js';
import { Attention } from '../model/attention.js';
import { ParameterStore } from '../model/parameters.js';
import { type ModelShape, modelShape } from '../model/shape.js';
import type { SelectionKernel } from '../ops/attention/selected/op.js';
import type { Parameter } from '../tensor/parameter.js';
import { gradientOf, withSequences } from './core.js';
import type { Weights } from './module-reference.js';
import { randomValues, sum } from './numbers.js';

/** Every phi, gate and place of the compressed keys' rotation: `phi mlp, gate sigmoid, rope before`. */
export const VARIANTS: readonly { readonly name: string; readonly shape: ModelShape }[] = (
  ['avg', 'conv', 'mlp'] as const
).flatMap((phi) =>
  (['softmax', 'sigmoid'] as const).flatMap((gate) =>
    (['after', 'before', 'none'] as const).map((rope) => ({
      name: `phi ${phi}, gate ${gate}, rope ${rope}`,
      shape: tinyShape({ phi, gate, cmpRope: rope }),
    })),
  ),
);

/** Settings that change which inputs a part reads. */
export const OTHERS: typeof VARIANTS = [
  { name: 'positions in the window alone', shape: tinyShape({ rope: 'window', cmpRope: 'none' }) },
];

/** A module with blocks small enough for a hundred tokens to cross every edge; d_k and d_v differ on purpose. */
export function tinyShape(
  nsa: Partial<ModelShape['nsa']>,
  model: Partial<ModelShape> = {},
  vocabulary = 64,
): ModelShape {
  const config = configSchema.parse({
    model: { dim: 24, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 6, mlp_ratio: 2 },
    nsa: { l: 8, d: 4, l_sel: 16, n_sel: 4, w: 24, gate_temp: 0.7 },
  });
  const shape = modelShape(config, vocabulary);
  return { ...shape, ...model, nsa: { ...shape.nsa, ...nsa } };
}

export interface ModuleOutput {
  /** [T, dim] */
  readonly out: Float32Array;
  readonly selected: Int32Array;
  /** Gradients of `x` and of every parameter, by name; null without `dOut`. */
  readonly gradients: ReadonlyMap<string, Float32Array> | null;
}

const NAME = 'attention';

/** A module with large random parameters: the zeros and small numbers of the initialisation would hide errors. */
export class TestModule {
  readonly shape: ModelShape;
  readonly #device: Device;
  readonly #store: ParameterStore;
  readonly #module: Attention;

  constructor(device: Device, shape: ModelShape, seed: number) {
    this.shape = shape;
    this.#device = device;
    this.#store = new ParameterStore(device, seed, 1);
    this.#module = new Attention(this.#store, NAME, shape);
    this.#store.parameters.forEach(({ value }, i) => {
      const inputs = value.shape[value.shape.length - 1];
      value.write(randomValues(value.size, seed * 50 + i, value.shape.length === 2 ? 2 / Math.sqrt(inputs) : 0.5));
    });
  }

  get weights(): Weights {
    return Object.fromEntries(this.#parameters.map(([name, { value }]) => [name, Float64Array.from(value.read())]));
  }

  run(
    x: ArrayLike<number>,
    lengths: readonly number[],
    dOut: ArrayLike<number> | null = null,
    kernel: SelectionKernel = 'adaptive',
  ): ModuleOutput {
    for (const [, parameter] of this.#parameters) parameter.clearGradient();
    return withSequences(this.#device, lengths, (tokens, tape) => {
      try {
        const input = tape.watch(tape.from(x, [sum(lengths), this.shape.dim]));
        let selected = new Int32Array(0);
        const observer = {
          selected: (_: number, blocks: { read(): ArrayLike<number> }) => {
            selected = Int32Array.from(blocks.read());
          },
        };
        const output = this.#module.forward(tape, input, { lengths: tokens, kernels: { kernel }, observer });
        const out = output.read() as Float32Array;
        if (!dOut) return { out, selected, gradients: null };
        tape.backward(output, dOut);
        const gradients = new Map([['x', gradientOf(tape, input)]]);
        for (const [name, { value, gradient }] of this.#parameters)
          gradients.set(name, (gradient?.read() as Float32Array | undefined) ?? new Float32Array(value.size));
        return { out, selected, gradients };
      } finally {
      }
    });
  }

  free(): void {
    this.#store.free();
  }

  get #parameters(): [string, Parameter][] {
    return this.#store.parameters.map((parameter) => [parameter.name.slice(NAME.length + 1), parameter]);
  }
}

export function withModule<T>(device: Device, shape: ModelShape, seed: number, body: (module: TestModule) => T): T {
  const module = new TestModule(device, shape, seed);
  try {
    return body(module);
  } finally {
    module.free();
  }
}
