/** Which shipped config a run takes when the user names none. */

/** The cards are sold by their size; what the driver reports is a little less, so the limits lie well between them. */
const LIMITS: readonly (readonly [atLeastGib: number, config: string])[] = [
  [70, 'm7c_125m_80g'],
  [35, 'm7c_125m_40g'],
  [0, 'm7c_125m_24g'],
];

/** Name of a config for a GPU with so much memory; null = no GPU, where only the quickstart is of a bearable size. */
export function pickConfigByGpuMemory(gib: number | null): string {
  if (gib === null) return 'quickstart';
  const found = LIMITS.find(([atLeast]) => gib >= atLeast);
  if (found === undefined) throw new RangeError(`GPU memory of ${gib} GiB`);
  return found[1];
}
