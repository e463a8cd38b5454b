/** The ranks of a training: the world they form, and what sums their gradients. */
import { createHash } from 'node:crypto';
import type { Config } from '../config/schema.js';
import type { Device, DeviceKind } from '../device/device.js';
import type { World } from '../ranks/world.js';
import type { Parameter } from '../tensor/parameter.js';
import { DataParallel } from './data-parallel.js';

export interface Ranks {
  readonly world: World;
  readonly parallel: DataParallel;
}

const MIB = 2 ** 20;
/** What fits a core's cache is summed twice as fast on CPUs; GPUs and their networks like larger pieces. */
const BUCKET_MIB: Record<DeviceKind, number> = { cpu: 2, cuda: 16 };
/** Safe mode: no overlap, and pieces small enough for any network's buffers. */
const SAFE_BUCKET_BYTES = MIB;

export function joinRanks(world: World, device: Device, parameters: readonly Parameter[], config: Config): Ranks {
  const { ddp_safe: isSafe, bucket_mb, wire, zero } = config.train;
  const mib = bucket_mb ?? BUCKET_MIB[device.kind];
  const parallel = new DataParallel(device, world.collectives, parameters, {
    bucketBytes: isSafe ? Math.min(SAFE_BUCKET_BYTES, mib * MIB) : mib * MIB,
    overlap: !isSafe,
    wire: wire === 'bf16' ? 'bf16' : 'f32',
    zero: zero === 1,
  });
  return { world, parallel };
}

/**
 * Compares the weights of all ranks by a hash of every bit. Null when they are equal, else a line that names the ranks
 * which differ from most.
 */
export function differingWeights({ world }: Ranks, parameters: readonly Parameter[]): string | null {
  const hash = createHash('sha1');
  for (const { value } of parameters) hash.update(value.readBytes());
  const hashes = world.together.gather(hash.digest('hex'));
  if (hashes.every((one) => one === hashes[0])) return null;
  const usual = mostCommon(hashes);
  const others = hashes.flatMap((one, rank) => (one === usual ? [] : [`${rank} on ${world.members[rank].host}`]));
  return `the weights differ between ranks: rank ${others.join(', rank ')} not as the others`;
}

function mostCommon(values: readonly string[]): string {
  const count = (value: string) => values.filter((one) => one === value).length;
  return values.reduce((best, value) => (count(value) > count(best) ? value : best));
}
