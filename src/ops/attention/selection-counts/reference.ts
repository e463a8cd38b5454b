/** Rows by how many of their slots are not -1. */
export function countSelections(selected: ArrayLike<number>, slots: number): number[] {
  const counts = new Array<number>(slots + 1).fill(0);
  for (let row = 0; row < selected.length / slots; row++) {
    let blocks = 0;
    for (let slot = 0; slot < slots; slot++) if (selected[row * slots + slot] >= 0) blocks += 1;
    counts[blocks] += 1;
  }
  return counts;
}
