/**
 * The speed of one device, from the rows of `bench train --json`: operations per second of a forward and backward pass by
 * sequence length and tokens per micro-batch, without the launch cost. Interpolates between measured points over the
 * logarithm; beyond them, uses the nearest. The launch cost is the same for small and large batches.
 *
 * Rows of several models: the one with most rows is the base; the others say how much faster or slower layers of their size
 * are computed, as a factor that is interpolated over the parameters per layer.
 */
import { readFileSync } from 'node:fs';
import type { Config } from '../config/schema.js';
import type { DeviceKind } from '../device/device.js';
import { UsageError } from '../errors.js';
import type { StepPrecision } from '../model/shape.js';
import * as z from '../zod.js';
import { launchesOf, launchesOfPass } from './launches.js';

const rowSchema = z.object({
  config: z.string(),
  attention: z.enum(['nsa', 'dense']),
  S: z.number().int().positive(),
  batch: z.number().int().positive(),
  ms_step: z.number().positive(),
  mfu: z.number().positive(),
  params: z.number().int().positive(),
  /** Defaults to that of the 125m shape. */
  layers: z.number().int().positive().default(12),
  /** Default: bf16 on a GPU, fp32 on a CPU. */
  precision: z.enum(['fp32', 'bf16', 'fp8']).optional(),
  /** With what gradient checkpointing computes again; default: nothing, `mfu`. */
  hfu: z.number().positive().optional(),
});

const fileSchema = z.object({
  machine: z.string(),
  device: z.enum(['cpu', 'cuda']),
  peak_gflops: z.number().positive(),
  rows: z.array(rowSchema).min(1),
});

export type MeasuredFile = z.infer<typeof fileSchema>;
type MeasuredRow = MeasuredFile['rows'][number];

/** The settings on which the speed of a model depends. */
export interface MeasuredModel {
  readonly attention: Config['model']['attention'];
  readonly precision: StepPrecision;
  readonly params: number;
  readonly layers: number;
}

export interface Speed {
  readonly machine: string;
  readonly device: DeviceKind;
  /** Operations per second, without launches and update, for micro-batches of `tokens` in sequences of `length`. */
  rate(model: MeasuredModel, length: number, tokens: number): number;
  /** Seconds of gradient norm and AdamW per parameter. */
  readonly updatePerParameter: number;
  /** Seconds per launch. */
  readonly perLaunch: number;
}

/**
 * The shipped figures, measured with `bench train --device cuda`. Each row names its build; bench/results/plan-h200.json has
 * the commands and what they printed.
 */
export const SHIPPED = new URL('./h200.json', import.meta.url);

/**
 * Norm and AdamW, from the profiles in dev/log/2026-11-benchmarks.md: 1.3 ms for the 155.5M parameters of the 125m shape on an H200,
 * 103 ms for the 78.6M with a byte vocabulary on a CPU. Both run at the speed of memory, so they grow with parameters alone.
 */
const UPDATE_PER_PARAMETER: Readonly<Record<DeviceKind, number>> = { cuda: 1.3e-3 / 155.5e6, cpu: 0.103 / 78.6e6 };

/**
 * From steps of an H200 with 1 and 4 sequences of 2,048 tokens, 9.70 and 21.15 ms: a line through them leaves 5.88 ms for no
 * token at all, 1.3 of them the update, the others 717 launches. Steps that it was not taken from are held against it by
 * tests. On a CPU a launch is a call.
 */
const PER_LAUNCH: Readonly<Record<DeviceKind, number>> = { cuda: 6.39e-6, cpu: 0 };
/** Maximum share of a step that is attributed to launches, for GPUs whose launches cost less. */
const MAX_LAUNCHING = 0.9;

export function readMeasured(path: string | URL = SHIPPED): MeasuredFile {
  let text: string;
  try {
    text = readFileSync(path, 'utf8');
  } catch (error) {
    throw new UsageError(`${String(path)}: cannot be read (${(error as NodeJS.ErrnoException).code})`, {
      cause: error,
    });
  }
  const wanted = 'expected the output of trefoil bench train --json';
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new UsageError(`${String(path)}: is not JSON; ${wanted}`, { cause: error });
  }
  const parsed = fileSchema.safeParse(value);
  if (parsed.success) return parsed.data;
  const [{ path: key, message }] = parsed.error.issues;
  throw new UsageError(`${String(path)}: ${key.join('.') || 'the file'}: ${message}; ${wanted}`);
}

export function speedOf(measured: MeasuredFile): Speed {
  const { machine, device } = measured;
  const updatePerParameter = UPDATE_PER_PARAMETER[device];
  const perLaunch = PER_LAUNCH[device];
  const rateOf = ({ attention, layers, mfu, hfu = mfu, ms_step, params }: MeasuredRow): number => {
    const seconds = ms_step / 1e3;
    const passes = seconds - params * updatePerParameter;
    if (passes <= 0) throw new UsageError(`${machine}: a step of ${ms_step} ms is shorter than its update`);
    const again = hfu > mfu ? layers * launchesOf(attention).blockAgain : 0;
    const launching = Math.min((launchesOfPass(attention, layers) + again) * perLaunch, MAX_LAUNCHING * passes);
    return (hfu * measured.peak_gflops * 1e9 * seconds) / (passes - launching);
  };
  const rates = (rows: readonly MeasuredRow[]): Point[] => rows.map((row) => ({ row, value: rateOf(row) }));
  return {
    machine,
    device,
    updatePerParameter,
    perLaunch,
    rate({ attention, precision, params, layers }, length, tokens) {
      const rows = measured.rows.filter((row) => row.attention === attention);
      if (rows.length === 0)
        throw new UsageError(`no ${attention} attention among the measured figures; give yours with --measured FILE`);
      const [base, ...others] = byModel(ofPrecision(rows, precision, device)).map(rates);
      const factors = others.map((points) => {
        const relative = points.map(({ row, value }) => ({ row, value: value / at(base, row.S, row.batch * row.S) }));
        return [layerSize(points[0].row), at(relative, length, tokens)] as const;
      });
      const sizes = [[layerSize(base[0].row), 1] as const, ...factors];
      return at(base, length, tokens) * interpolate(sizes, layerSize({ params, layers }));
    },
  };
}

interface Point {
  readonly row: MeasuredRow;
  readonly value: number;
}

const layerSize = ({ params, layers }: { params: number; layers: number }): number => params / layers;

/** The rows of a precision; without any, those of the default precision, without those, all. */
function ofPrecision(rows: MeasuredRow[], precision: StepPrecision, device: DeviceKind): MeasuredRow[] {
  const usual = device === 'cuda' ? 'bf16' : 'fp32';
  const of = (wanted: StepPrecision) => rows.filter((row) => (row.precision ?? usual) === wanted);
  return [of(precision), of(usual), rows].find((found) => found.length > 0)!;
}

/** The rows of each model, the one with most of them first. */
function byModel(rows: readonly MeasuredRow[]): MeasuredRow[][] {
  const models = new Map<number, MeasuredRow[]>();
  for (const row of rows) models.set(row.params, [...(models.get(row.params) ?? []), row]);
  return [...models.values()].sort((a, b) => b.length - a.length);
}

/** The points at a length and a number of tokens: interpolated over the tokens of each length, then over the lengths. */
function at(points: readonly Point[], length: number, tokens: number): number {
  const lengths = [...new Set(points.map(({ row }) => row.S))];
  const curve = lengths.map((S) => {
    const own = points.filter(({ row }) => row.S === S).map(({ row, value }) => [row.batch * S, value] as const);
    return [S, interpolate(best(own), tokens)] as const;
  });
  return interpolate(curve, length);
}

/** The fastest of several kernels for the same shape, which a run would use. */
function best(points: readonly (readonly [number, number])[]): [number, number][] {
  const fastest = new Map<number, number>();
  for (const [x, y] of points) fastest.set(x, Math.max(y, fastest.get(x) ?? 0));
  return [...fastest];
}

/** Linear interpolation over log x; constant beyond the ends. */
export function interpolate(points: readonly (readonly [number, number])[], x: number): number {
  const sorted = [...points].sort(([a], [b]) => a - b);
  const above = sorted.findIndex(([at]) => at >= x);
  if (above === -1) return sorted[sorted.length - 1][1];
  if (above === 0) return sorted[0][1];
  const [[x0, y0], [x1, y1]] = [sorted[above - 1], sorted[above]];
  const share = Math.log(x / x0) / Math.log(x1 / x0);
  return y0 + share * (y1 - y0);
}
