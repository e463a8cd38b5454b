/** How far two lists of numbers are apart: the measure of every tolerance in this project. */

/** ‖a-b‖/‖b‖; NaN if either holds one, absolute where b is zero. */
export function relativeError(actual: ArrayLike<number>, expected: ArrayLike<number>): number {
  if (actual.length !== expected.length)
    throw new Error(`${actual.length} values cannot be compared with ${expected.length}`);
  let [difference, norm] = [0, 0];
  for (let i = 0; i < actual.length; i++) {
    difference += (actual[i] - expected[i]) ** 2;
    norm += expected[i] ** 2;
  }
  return norm === 0 ? Math.sqrt(difference) : Math.sqrt(difference / norm);
}
