/** The shipped config of a run whose user names none. */

/** Drivers report a little less than the nominal size of a card, so the limits lie well between the sizes. */
const LIMITS: readonly (readonly [atLeastGib: number, config: string])[] = [
  [70, 'm7c_125m_80g'],
  [35, 'm7c_125m_40g'],
  [0, 'm7c_125m_24g'],
];

/** The config for a GPU with `gib` GiB of memory; null (no GPU) gives the quickstart, the only one that suits a CPU. */
export function pickConfigByGpuMemory(gib: number | null): string {
  if (gib === null) return 'quickstart';
  const found = LIMITS.find(([atLeast]) => gib >= atLeast);
  if (found === undefined) throw new RangeError(`GPU memory of ${gib} GiB`);
  return found[1];
}
