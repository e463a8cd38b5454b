/**
 * runtime.strict_asserts: what must hold of every gate and selection, checked in every forward pass. A violation is a bug of
 * ours and stops the run at once.
 */
import type { Observer } from '../model/attention.js';
import type { ModelShape } from '../model/shape.js';

const SUM_TOLERANCE = 1e-5;

/** Checks, then tells `next`. */
export function strictObserver(shape: ModelShape, next?: Observer): Observer {
  return {
    gates(layer, gates) {
      const values = gates.read();
      for (let i = 0; i < values.length; i += 3) {
        const [a, b, c] = [values[i], values[i + 1], values[i + 2]];
        const sum = a + b + c;
        const isShare =
          a >= 0 && b >= 0 && c >= 0 && (shape.nsa.gate === 'sigmoid' ? sum <= 3 : Math.abs(sum - 1) < SUM_TOLERANCE);
        if (!isShare) throw new Error(`layer ${layer}: gates [${a}, ${b}, ${c}] of row ${i / 3} are no weights`);
      }
      next?.gates?.(layer, gates);
    },
    selected(layer, selected) {
      const [, , slots] = selected.shape;
      const blocks = selected.read();
      for (let row = 0; row < blocks.length; row += slots) {
        let previous = -1;
        for (let slot = 0; slot < slots && blocks[row + slot] >= 0; slot++) {
          if (blocks[row + slot] <= previous)
            throw new Error(
              `layer ${layer}: the selection [${blocks.slice(row, row + slots).join(', ')}] does not ascend`,
            );
          previous = blocks[row + slot];
        }
        if (blocks[row] !== 0) throw new Error(`layer ${layer}: a selection without block 0`);
      }
      next?.selected?.(layer, selected);
    },
  };
}
