/**
 * A CUDA device without a GPU that compares a launch with the kernel's parameters in its source: how many, and whether each
 * is given memory of its type or a number. It computes nothing.
 */
import { existsSync, readFileSync } from 'node:fs';
import { ListingCuda } from '../device/cuda/listing.js';
import {
  type CudaCode,
  Floating,
  type KernelMacros,
  type LaunchArgument,
  type LaunchShape,
} from '../device/cuda/runtime.js';
import type { Addressable, KernelModule, Kernels, Signatures } from '../device/device.js';
import {
  type FusedShape,
  gatherShared,
  scorerShared,
  scoringSplit,
  sharedBytes,
  sharedLimit,
  unionTokens,
} from '../ops/attention/fused/plan.js';

export interface Launch {
  readonly kernel: string;
  readonly shape: LaunchShape;
  readonly values: readonly LaunchArgument[];
  readonly macros: KernelMacros;
}

/** Types of kernel parameters, and what a tensor must hold to be given for one. */
const DTYPES: Readonly<Record<string, string>> = {
  'bf16*': 'bf16',
  'unsigned char*': 'bf16', // packed keys and values
  'float*': 'f32',
  'float2*': 'f32',
  'f32*': 'f32', // of a macro that is a dtype
  'i64*': 'address',
  'int*': 'i32',
  'i32*': 'i32',
  'Plan*': 'i32', // plan.cuh
  'u32*': 'i32',
  'u8*': 'e4m3 e5m2',
};

export class RecordingCuda extends ListingCuda {
  readonly launches: Launch[] = [];
  readonly #constants: (name: string) => number;

  /** `constants`: what compiled code would say of itself. */
  constructor(constants: (name: string) => number, architecture = 90) {
    super({ architecture, multiprocessors: 132 });
    this.#constants = constants;
  }

  override compile(source: URL, macros: KernelMacros = {}): CudaCode {
    const text = withHeaders(source);
    return {
      constant: this.#constants,
      launch: (kernel, shape, ...values) => {
        checkArguments(kernel, parametersOf(text, kernel, macros), values);
        this.launches.push({ kernel, shape, values, macros });
      },
    };
  }

  /** Operations called along the way; they are not what is tested. */
  override kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    const names = Object.keys(module.functions);
    return Object.fromEntries(
      names.map((kernel) => [
        kernel,
        (...values: LaunchArgument[]) => {
          for (const value of values) if (isMemory(value)) void value.pointer; // throws when it was freed
          this.launches.push({ kernel, shape: { grid: 1, block: 1 }, values, macros: {} });
        },
      ]),
    ) as unknown as Kernels<S>;
  }
}

/** The numbers that compiled attention kernels export, for head sizes up to 64; the tests on a GPU compare it. */
export function exportedBy(shape: FusedShape): (name: string) => number {
  const build = { queryMajor: false, mmaSync: false };
  const tokens = unionTokens(shape, build, sharedLimit(90));
  const shared: Readonly<Record<string, number>> = sharedBytes(shape, build, tokens);
  const numbers: Readonly<Record<string, number>> = {
    select_plan_words: 1415,
    selected_outer_blocks: 4,
    select_blocks_tokens: 64 / scoringSplit(shape.heads),
    select_blocks_threads: scoringSplit(shape.heads) > 1 ? 256 + 128 / scoringSplit(shape.heads) : 128,
    compressed_forward_tiles: 2,
    joint_gradients_chunk: 1024,
    joint_gradients_keys: 192,
    joint_gradients_threads: 512,
    joint_gradients_shared: 169_536,
    selected_gather_threads: 544,
    selected_gather_shared: gatherShared(shape),
    ...scorerShared(shape),
    select_union_tokens: tokens,
    selected_union_tokens: tokens,
    step_attention_shared: 40_000,
    step_scores_shared: 20_000,
    step_linear_shared: 5_000,
  };
  return (name) => {
    const rows = name.includes('query_gradient') ? 192 : 128;
    if (name in numbers) return numbers[name];
    if (name.endsWith('_rows')) return rows;
    if (name.endsWith('_threads')) return 2 * rows;
    const value = shared[name];
    if (value === undefined) throw new Error(`no constant ${name}`);
    return value;
  };
}

/** A source with the headers beside it that it includes, which may hold kernels. */
function withHeaders(source: URL, read = new Set<string>()): string {
  if (read.has(source.href)) return '';
  read.add(source.href);
  return readFileSync(source, 'utf8').replace(/^#include "(.*)"$/gm, (line, name: string) => {
    const header = new URL(name, source);
    return existsSync(header) ? withHeaders(header, read) : line;
  });
}

function parametersOf(source: string, kernel: string, macros: KernelMacros): string[] {
  const found = new RegExp(`__global__[^;{]*?\\b${kernel}\\(([^)]*)\\)\\s*\\{`, 's').exec(source);
  if (!found) throw new Error(`there is no kernel ${kernel}`);
  // `const bf16 *a, *b` does not occur in parameters; each is a type and a name.
  return found[1].split(',').map((parameter) =>
    parameter
      .trim()
      .replace(/^const\s+/, '')
      .replace(/\s*\w+$/, '')
      .replace(/^\w+/, (type) => String(macros[type] ?? type)),
  );
}

function checkArguments(kernel: string, types: readonly string[], values: readonly LaunchArgument[]): void {
  if (types.length !== values.length)
    throw new Error(`${kernel} takes ${types.length} arguments and is given ${values.length}`);
  types.forEach((type, i) => {
    const value = values[i];
    const where = `argument ${i} of ${kernel} is ${type}`;
    if (type === 'float' || type === 'double') {
      if (!(value instanceof Floating)) throw new Error(`${where}: f32 or f64 must wrap it`);
    } else if (type === 'int' || type === 'i64') {
      if (!Number.isSafeInteger(value)) throw new Error(`${where}, not ${String(value)}`);
    } else if (value !== null) {
      if (!isMemory(value)) throw new Error(`${where}, not ${String(value)}`);
      void value.pointer; // throws when it was freed
      if (!DTYPES[type]?.split(' ').includes(value.dtype ?? '')) throw new Error(`${where}, not ${value.dtype}`);
    }
  });
}

function isMemory(value: LaunchArgument): value is Addressable {
  return typeof value === 'object' && value !== null && !(value instanceof Floating);
}
