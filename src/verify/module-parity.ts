/**
 * Invariants 1 and 6 for the whole module, in every configuration: outputs equal the reference, gradients equal
 * finite differences.
 */
import type { Device } from '../device/device.js';
import type { ModelShape } from '../model/shape.js';
import { nsaForward } from '../ops/attention/reference.js';
import { type CaseShapes, FILE_NAMES, INPUT_NAMES, layoutOf, outputShape, randomInputs, SMALL } from './cases.js';
import { check, type Finding, TOLERANCE, type VerifyCheck, Worst } from './check.js';
import { wrongSelection } from './compare.js';
import { runCore } from './core.js';
import { OTHERS, VARIANTS, withModule } from './module.js';
import { moduleForward, type Weights } from './module-reference.js';
import { dot, randomValues, relativeError, sum } from './numbers.js';

/** One sequence longer than n*l', so that the selection has a choice, and one shorter than a block. */
const LENGTHS = [101, 5];
/** Fewer tokens where the reference runs many times; still longer than n*l'. */
const SHORT_LENGTHS = [67, 5];
const DIRECTIONS = 2;
const STEP = 1e-5;

export function moduleChecks(device: Device): VerifyCheck[] {
  const limit = TOLERANCE;
  const parity = [...VARIANTS, ...OTHERS].map(({ name, shape }) =>
    check('1 reference', `module, ${name}`, limit, () => moduleParity(device, shape)),
  );
  const gradients = [...VARIANTS, ...OTHERS].map(({ name, shape }) =>
    check('6 gradients', `module, ${name}`, limit, () => moduleGradients(device, shape)),
  );
  const core = check('6 gradients', 'core, ragged batch', limit, () => coreGradients(device));
  return [...parity, core, ...gradients];
}

function moduleParity(device: Device, shape: ModelShape): Finding {
  const worst = new Worst();
  const x = randomValues(sum(LENGTHS) * shape.dim, 11, 2);
  withModule(device, shape, 3, (module) => {
    for (const kernel of ['v1', 'v2'] as const) {
      const { out, selected } = module.run(x, LENGTHS, null, kernel);
      const reference = moduleForward(shape, module.weights, x, LENGTHS, selected);
      // Scores of projections that were rounded to float32 may differ by as much as those projections do.
      const wrong = wrongSelection(selected, reference.inputs, reference.layout, TOLERANCE);
      if (wrong) worst.add(1, `${kernel}: ${wrong}`);
      else worst.add(relativeError(out, reference.out), `${kernel}: the output is off`);
    }
  });
  return worst.finding;
}

function moduleGradients(device: Device, shape: ModelShape): Finding {
  const tokens = sum(SHORT_LENGTHS);
  const x = randomValues(tokens * shape.dim, 12, 2);
  const dOut = randomValues(tokens * shape.dim, 13);
  return withModule(device, shape, 4, (module) => {
    const { selected, gradients } = module.run(x, SHORT_LENGTHS, dOut);
    const values: Record<string, Float64Array> = { x, ...module.weights };
    const loss = () => {
      const { x: input, ...weights } = values;
      return dot(moduleForward(shape, weights as Weights, input, SHORT_LENGTHS, selected).out, dOut);
    };
    return compareWithDifferences(loss, values, gradients!);
  });
}

const RAGGED: CaseShapes = {
  lengths: [75, 0, 5, 30],
  heads: { heads: 4, groups: 2, dk: 6, dv: 5 },
  sparse: SMALL,
};

function coreGradients(device: Device): Finding {
  const inputs = randomInputs(RAGGED, 5);
  const layout = layoutOf(RAGGED);
  const dOut = randomValues(
    outputShape(RAGGED).reduce((a, b) => a * b),
    14,
  );
  const { selected, gradients } = runCore(device, inputs, RAGGED, dOut);
  const named = new Map(INPUT_NAMES.map((name) => [FILE_NAMES[name], gradients![name]]));
  const values = Object.fromEntries(INPUT_NAMES.map((name) => [FILE_NAMES[name], inputs[name]]));
  return compareWithDifferences(() => dot(nsaForward(inputs, layout, selected).out, dOut), values, named);
}

/**
 * Along random directions u of unit variance, the error e of a gradient shows as <e, u>, whose mean square is ‖e‖²:
 * a few directions estimate ‖e‖/‖g‖ for tensors of any size, where one entry at a time would take hours.
 */
function compareWithDifferences(
  loss: () => number,
  values: Readonly<Record<string, Float64Array>>,
  gradients: ReadonlyMap<string, ArrayLike<number>>,
): Finding {
  const worst = new Worst();
  let seed = 1000;
  for (const [name, value] of Object.entries(values)) {
    const gradient = gradients.get(name)!;
    const norm = Math.sqrt(dot(gradient, gradient));
    let squares = 0;
    for (let i = 0; i < DIRECTIONS; i++) {
      seed += 1;
      const direction = randomValues(value.length, seed, Math.sqrt(3));
      squares += (dot(gradient, direction) - slope(loss, value, direction)) ** 2;
    }
    const error = Math.sqrt(squares / DIRECTIONS);
    worst.add(norm === 0 ? error : error / norm, `the gradient of ${name} is off`);
  }
  return worst.finding;
}

/** The derivative of `loss` along a direction, by central differences; restores `value`. */
function slope(loss: () => number, value: Float64Array, direction: Float64Array): number {
  const kept = value.slice();
  const at = (step: number) => {
    for (let i = 0; i < value.length; i++) value[i] = kept[i] + step * direction[i];
    return loss();
  };
  const result = (at(STEP) - at(-STEP)) / (2 * STEP);
  value.set(kept);
  return result;
}
